// Owns attention of one token at a time over its window rows and compressed entries, with a sink
// per head and the turning back of values. Which entries is index.hip's, what they are
// compress.hip's.
//
// Built for DS4Q_HEAD_DIM = D, a multiple of 4, at most 512 (default 512). A token sees n keys: its
// window's rows from the oldest on, then `chosen` [T][topk] or, where that is null (topk 0), the
// first entries. Chunk c is keys 16 c .. 16 c + 15 of that list, so what a token adds up does not
// depend on its neighbours. `chunks` is what partial has room for, >= ceil(n / 16) of every token.
// Tokens [T] say where each stands; they may be of several sequences. Built for DS4Q_KV_TYPE, which
// keys are kept in and widened from as they are staged. Base pointers 16-byte aligned.
//
// attend: grid (X, ceil(heads / 16), T) with any X, block 256, LDS 36992 or 20608.
//   Block x takes chunks x, x + X, ..: keys are staged in shared memory and serve 16 heads. Group g
//   has heads 4 (g % 4) .. + 3 and half g / 4 of the columns: lane l owns columns 128 j + 4 l +
//   (0 .. 3) of its half, whose width is D / 2 rounded up to whole 128. q [T][heads][D] is normed
//   per head (no weight) and turned by cos, sin [T][pairs].
//   partial [T][chunks][heads][D + 4]: sum of w_i k_i, then max_i s_i, sum of w_i, with
//   s_i = q . k_i / (rms(q) sqrt(D)), w_i = exp(s_i - max). Dot products: a lane's columns
//   ascending, fused, then lanes pairwise at distance 16, 8, 4, 2, 1, then both halves; squares: a
//   lane's in order, fused, ds4q_group_sum, halves. Sums over keys: k_i ascending, fused; w_i: keys
//   i and i + 8, then pairwise at distance 1, 2, 4.
// attend_combine: grid (ceil(D / 128), heads, T), block 256, LDS 5120. out [T][heads][D] = sum over
//   chunks of exp(max_c - M) partial_c / (exp(sink - M) + the same of the w), M over chunks and
//   sink; turned back. Group g takes chunks g, g + 8, .. in order, fused; then the groups in order.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// attend 8.8 us at ratio 4 (640 keys), 6.0 us at 128 (160 keys); attend_combine 3.5 and 2.9
// us. Nothing here has run on AMD hardware.
#include "ds4q_state.h"

#ifndef DS4Q_HEAD_DIM
#define DS4Q_HEAD_DIM 512
#endif
#define ATTEND_QUADS ((DS4Q_HEAD_DIM + 255) / 256)  // of a lane
#define ATTEND_HALF (128 * ATTEND_QUADS)            // columns of a group
#define ATTEND_COLUMNS (2 * ATTEND_HALF)            // of a staged key, zeros past D
#define ATTEND_KEYS 16                              // of a chunk
#define ATTEND_STAGED (ATTEND_KEYS * ATTEND_QUADS / 4)  // quads of a thread
#define ATTEND_HEADS 4                              // of a group
#define ATTEND_STRIDE (DS4Q_HEAD_DIM + 4)           // floats of a head's partial result

// Where the quad lies that this thread stages as its i-th, if it has one there.
struct attend_source {
  const ds4q_kept* row;
  bool inside;
};
DS4Q_FN attend_source attend_find(const ds4q_kept* window, const ds4q_kept* entries,
                                  ds4q_sight sight, int place, int begin, int i) {
  int quad = (int)ds4q_thread() + 256 * i;
  int key = quad / (ATTEND_COLUMNS / 4), column = 4 * (quad % (ATTEND_COLUMNS / 4));
  int at = (int)ds4q_shuffle_bits((ds4q_u32)place, (ds4q_u32)key);
  const ds4q_kept* row = at < 0 ? window : entries;
  row += (ds4q_u64)(at < 0 ? -1 - at : at) * DS4Q_HEAD_DIM + column;
  return {row, begin + key < sight.rows + sight.entries && column < DS4Q_HEAD_DIM};
}

// Stages the keys of one chunk, zeros past the last.
DS4Q_FN void attend_stage(float* keys, const ds4q_layer_state* state, ds4q_sight sight,
                          const int* chosen, int begin) {
  const ds4q_kept* window = state->window;
  const ds4q_kept* entries = state->entries;
  // Lane l looks up where key l % 16 lies: an entry, or -1 - the window's slot.
  int own = begin + (int)ds4q_lane() % ATTEND_KEYS, entry = own - sight.rows;
  int slots = state->window_rows, slot = sight.oldest % slots + own;
  int place = -1 - (slot < slots ? slot : slot - slots);
  if (entry >= 0 && entry < sight.entries) place = chosen ? chosen[entry] : entry;
#if DS4Q_KV_TYPE == 0
  DS4Q_ROLLED
  for (int i = 0; i < ATTEND_STAGED; i++) {
    attend_source from = attend_find(window, entries, sight, place, begin, i);
    float* to = keys + 4 * (ds4q_thread() + 256 * i);
    if (from.inside) {
      ds4q_copy16(to, from.row);
    } else {
      ds4q_store4(to, ds4q_quad{});
    }
  }
  ds4q_copy_commit();
#else
  // All loads are asked for before anything is waited for.
  ds4q_kept4 held[ATTEND_STAGED];
  DS4Q_UNROLL
  for (int i = 0; i < ATTEND_STAGED; i++) {
    attend_source from = attend_find(window, entries, sight, place, begin, i);
    held[i] = from.inside ? *(const ds4q_kept4*)from.row : ds4q_kept4{};
  }
  DS4Q_UNROLL
  for (int i = 0; i < ATTEND_STAGED; i++) {
    ds4q_quad quad;
    DS4Q_UNROLL
    for (int j = 0; j < 4; j++) quad.v[j] = ds4q_widened(held[i].v[j]);
    ds4q_store4(keys + 4 * (ds4q_thread() + 256 * i), quad);
  }
#endif
}

// This group's half of its heads' queries; zeros past the last head or column.
DS4Q_FN void attend_load(ds4q_quad (*q)[ATTEND_QUADS], const float* from, int live, int low) {
  DS4Q_UNROLL
  for (int h = 0; h < ATTEND_HEADS; h++) {
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      int column = low + 128 * j + 4 * (int)ds4q_lane();
      bool inside = h < live && column < DS4Q_HEAD_DIM;
      q[h][j] = inside ? ds4q_load4(from + h * DS4Q_HEAD_DIM + column) : ds4q_quad{};
    }
  }
}

// Turns them; sums of their squares go to `squares` [4].
DS4Q_FN void attend_turn(ds4q_quad (*q)[ATTEND_QUADS], int low, int pairs, const float* cos,
                         const float* sin, float* squares) {
  DS4Q_UNROLL
  for (int h = 0; h < ATTEND_HEADS; h++) {
    float sum = 0.0f;
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) sum = ds4q_fma(q[h][j].v[i], q[h][j].v[i], sum);
    }
    sum = ds4q_group_sum(sum);
    if (ds4q_lane() == 0) squares[h] = sum;
  }
  DS4Q_UNROLL
  for (int j = 0; j < ATTEND_QUADS; j++) {
    DS4Q_UNROLL
    for (int i = 0; i < 4; i += 2) {
      int column = low + 128 * j + 4 * (int)ds4q_lane() + i;
      int pair = (column - (DS4Q_HEAD_DIM - 2 * pairs)) / 2;
      if (column < DS4Q_HEAD_DIM - 2 * pairs || column >= DS4Q_HEAD_DIM) continue;
      float c = cos[pair], s = sin[pair];
      DS4Q_UNROLL
      for (int h = 0; h < ATTEND_HEADS; h++) ds4q_turn(q[h][j].v[i], q[h][j].v[i + 1], c, s);
    }
  }
}

// Dot product of four heads with one key, not yet summed over the eight lanes of head lane / 8.
DS4Q_FN float attend_dot(const ds4q_quad (*q)[ATTEND_QUADS], const float* key) {
  float dots[ATTEND_HEADS] = {};
  DS4Q_UNROLL
  for (int j = 0; j < ATTEND_QUADS; j++) {
    ds4q_quad k = ds4q_load4(key + 128 * j + 4 * ds4q_lane());
    DS4Q_UNROLL
    for (int h = 0; h < ATTEND_HEADS; h++) {
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) dots[h] = ds4q_fma(q[h][j].v[i], k.v[i], dots[h]);
    }
  }
  // Folding halves what a lane still sums up: 31 shuffles for eight keys in place of 160.
  return ds4q_fold(ds4q_fold(dots[0], dots[2], 16), ds4q_fold(dots[1], dots[3], 16), 8);
}

// Dot products of four heads with keys 0 .. 7: lane l gets head l / 8, key l % 8.
DS4Q_FN float attend_dots(const ds4q_quad (*q)[ATTEND_QUADS], const float* keys) {
  float even = 0.0f, odd = 0.0f;
  DS4Q_ROLLED
  for (int key = 0; key < 2; key++) {
    const float* at = keys + key * ATTEND_COLUMNS;
    float a = ds4q_fold(attend_dot(q, at), attend_dot(q, at + 4 * ATTEND_COLUMNS), 4);
    at += 2 * ATTEND_COLUMNS;
    float b = ds4q_fold(attend_dot(q, at), attend_dot(q, at + 4 * ATTEND_COLUMNS), 4);
    even = odd;
    odd = ds4q_fold(a, b, 2);
  }
  return ds4q_fold(even, odd, 1);
}

// The softmax weights of a chunk: lane l has those of head l / 8, keys l % 8 and l % 8 + 8.
struct attend_shares {
  float low, high, top, total;
};
DS4Q_FN attend_shares attend_weigh(float low, float high, int left) {
  attend_shares found;
  int key = (int)ds4q_lane() % 8;
  if (key >= left) low = -ds4q_infinity();
  if (key + 8 >= left) high = -ds4q_infinity();
  found.top = ds4q_max(low, high);
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < 8; d *= 2) {
    found.top = ds4q_max(found.top, ds4q_shuffle(found.top, ds4q_lane() ^ d));
  }
  found.low = ds4q_exp(low - found.top);
  found.high = ds4q_exp(high - found.top);
  found.total = found.low + found.high;
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < 8; d *= 2) {
    found.total = found.total + ds4q_shuffle(found.total, ds4q_lane() ^ d);
  }
  return found;
}

// Writes this group's half of the weighted sum over a chunk's keys; `shares` [16][4] by key and
// head.
DS4Q_FN void attend_mix(const float* keys, const float* shares, float* out, int live, int low) {
  ds4q_quad mixed[ATTEND_HEADS][ATTEND_QUADS] = {};
  DS4Q_ROLLED
  for (int first = 0; first < ATTEND_KEYS; first += 4) {
    DS4Q_UNROLL
    for (int key = first; key < first + 4; key++) {
      ds4q_quad w = ds4q_load4(shares + key * ATTEND_HEADS);
      DS4Q_UNROLL
      for (int j = 0; j < ATTEND_QUADS; j++) {
        ds4q_quad k = ds4q_load4(keys + key * ATTEND_COLUMNS + 128 * j + 4 * ds4q_lane());
        DS4Q_UNROLL
        for (int h = 0; h < ATTEND_HEADS; h++) {
          DS4Q_UNROLL
          for (int i = 0; i < 4; i++) {
            mixed[h][j].v[i] = ds4q_fma(w.v[h], k.v[i], mixed[h][j].v[i]);
          }
        }
      }
    }
  }
  DS4Q_UNROLL
  for (int h = 0; h < ATTEND_HEADS; h++) {
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      int column = low + 128 * j + 4 * (int)ds4q_lane();
      if (h < live && column < DS4Q_HEAD_DIM) {
        ds4q_store4(out + h * ATTEND_STRIDE + column, mixed[h][j]);
      }
    }
  }
}

DS4Q_KERNEL(attend, 256,
            (const float* q, const ds4q_layer_state* state, const ds4q_token* tokens,
             const int* chosen, const float* cos, const float* sin, float* partial, int heads,
             int pairs, int reach, int ratio, int topk, int chunks, float eps)) {
  DS4Q_SHARED(float, keys, ATTEND_KEYS * ATTEND_COLUMNS);
  DS4Q_SHARED(float, dots, 8 * 64);  // [group][low or high][lane]
  DS4Q_SHARED(float, shares, 8 * ATTEND_KEYS * ATTEND_HEADS);
  DS4Q_SHARED(float, squares, 8 * ATTEND_HEADS);
  int t = (int)ds4q_block_z(), lane = (int)ds4q_lane(), group = (int)(ds4q_thread() / DS4Q_LANES);
  int head = (4 * (int)ds4q_block_y() + group % 4) * ATTEND_HEADS, half = group / 4 * ATTEND_HALF;
  int live = heads - head < ATTEND_HEADS ? heads - head : ATTEND_HEADS;  // below 1: none
  ds4q_quad queries[ATTEND_HEADS][ATTEND_QUADS];  // asked for first: they wait for nothing
  attend_load(queries, q + ((ds4q_u64)t * heads + head) * DS4Q_HEAD_DIM, live, half);
  ds4q_token token = tokens[t];
  ds4q_sight sight = ds4q_sight_of(token.position, reach, ratio, topk);
  int seen = sight.rows + sight.entries;
  if ((int)ds4q_block_x() * ATTEND_KEYS >= seen) return;
  state += token.states;
  const int* list = chosen ? chosen + (ds4q_u64)t * topk : chosen;
  attend_stage(keys, state, sight, list, (int)ds4q_block_x() * ATTEND_KEYS);
  attend_turn(queries, half, pairs, cos + (ds4q_u64)t * pairs, sin + (ds4q_u64)t * pairs,
              squares + ATTEND_HEADS * group);
  float* own = shares + group * (ATTEND_KEYS * ATTEND_HEADS);
  for (int begin = (int)ds4q_block_x() * ATTEND_KEYS; begin < seen;) {
    ds4q_copy_wait<0>();
    ds4q_barrier();
    float sum = squares[ATTEND_HEADS * (group % 4) + lane / 8] +
                squares[ATTEND_HEADS * (group % 4 + 4) + lane / 8];
    float scale = ds4q_inverse_rms(sum, DS4Q_HEAD_DIM, eps) / ds4q_sqrt((float)DS4Q_HEAD_DIM);
    dots[64 * group + lane] = attend_dots(queries, keys + half);
    dots[64 * group + 32 + lane] = attend_dots(queries, keys + half + 8 * ATTEND_COLUMNS);
    ds4q_barrier();
    // Both groups of a head weigh all keys, each for its own columns.
    const float* first = dots + 64 * (group % 4) + lane;
    attend_shares found = attend_weigh((first[0] + first[256]) * scale,
                                       (first[32] + first[256 + 32]) * scale, seen - begin);
    own[lane % 8 * ATTEND_HEADS + lane / 8] = found.low;
    own[(lane % 8 + 8) * ATTEND_HEADS + lane / 8] = found.high;
    ds4q_group_barrier();
    float* out = partial + (((ds4q_u64)t * chunks + begin / ATTEND_KEYS) * heads + head) *
                               ATTEND_STRIDE;
    attend_mix(keys + half, own, out, live, half);
    if (half == 0 && lane % 8 == 0 && lane / 8 < live) {
      out[lane / 8 * ATTEND_STRIDE + DS4Q_HEAD_DIM] = found.top;
      out[lane / 8 * ATTEND_STRIDE + DS4Q_HEAD_DIM + 1] = found.total;
    }
    begin += ATTEND_KEYS * (int)ds4q_blocks_x();
    if (begin >= seen) break;
    ds4q_barrier();  // keys are read before the next chunk's arrive
    attend_stage(keys, state, sight, list, begin);
  }
}

#define COMBINE_GROUPS 8
#define COMBINE_BATCH 5  // chunks whose loads are under way together

struct combine_parts {  // a batch of a lane's chunks
  ds4q_quad mixed[COMBINE_BATCH];
  float top[COMBINE_BATCH], total[COMBINE_BATCH];
};
DS4Q_FN combine_parts combine_load(const float* from, ds4q_u64 next, int begin, int count,
                                   int column) {
  combine_parts parts;
  DS4Q_UNROLL
  for (int i = 0; i < COMBINE_BATCH; i++) {
    int c = begin + COMBINE_GROUPS * i;
    const float* part = from + c * next;
    parts.top[i] = c < count ? part[DS4Q_HEAD_DIM] : -ds4q_infinity();
    parts.total[i] = c < count ? part[DS4Q_HEAD_DIM + 1] : 0.0f;
    bool inside = c < count && column < DS4Q_HEAD_DIM;
    parts.mixed[i] = inside ? ds4q_load4(part + column) : ds4q_quad{};
  }
  return parts;
}

DS4Q_KERNEL(attend_combine, 256,
            (const float* partial, const float* sink, const ds4q_token* tokens, const float* cos,
             const float* sin, float* out, int heads, int pairs, int reach, int ratio, int topk,
             int chunks)) {
  DS4Q_SHARED(ds4q_quad, sums, COMBINE_GROUPS * DS4Q_LANES);
  DS4Q_SHARED(float, totals, COMBINE_GROUPS * DS4Q_LANES);
  int t = (int)ds4q_block_z(), head = (int)ds4q_block_y();
  int lane = (int)ds4q_lane(), group = (int)(ds4q_thread() / DS4Q_LANES);
  int column = 128 * (int)ds4q_block_x() + 4 * lane;
  ds4q_sight sight = ds4q_sight_of(tokens[t].position, reach, ratio, topk);
  int count = (sight.rows + sight.entries + ATTEND_KEYS - 1) / ATTEND_KEYS;
  const float* from = partial + ((ds4q_u64)t * chunks * heads + head) * ATTEND_STRIDE;
  ds4q_u64 next = (ds4q_u64)heads * ATTEND_STRIDE;
  combine_parts parts = combine_load(from, next, group, count, column);
  float top = sink[head];
  for (int c = lane; c < count; c += DS4Q_LANES) {
    top = ds4q_max(top, from[c * next + DS4Q_HEAD_DIM]);
  }
  top = ds4q_group_max(top);
  ds4q_quad sum = {};
  float total = 0.0f;
  const int stride = COMBINE_BATCH * COMBINE_GROUPS;
  DS4Q_ROLLED
  for (int begin = group; begin < count; begin += stride) {
    if (begin != group) parts = combine_load(from, next, begin, count, column);
    DS4Q_UNROLL
    for (int i = 0; i < COMBINE_BATCH; i++) {
      float factor = ds4q_exp(parts.top[i] - top);
      total = ds4q_fma(parts.total[i], factor, total);
      DS4Q_UNROLL
      for (int j = 0; j < 4; j++) sum.v[j] = ds4q_fma(parts.mixed[i].v[j], factor, sum.v[j]);
    }
  }
  sums[ds4q_thread()] = sum;
  totals[ds4q_thread()] = total;
  ds4q_barrier();
  if (group != 0 || column >= DS4Q_HEAD_DIM) return;
  total = ds4q_exp(sink[head] - top);
  ds4q_quad all = {};
  DS4Q_UNROLL
  for (int g = 0; g < COMBINE_GROUPS; g++) {
    total = total + totals[DS4Q_LANES * g + lane];
    ds4q_quad one = sums[DS4Q_LANES * g + lane];
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) all.v[i] = all.v[i] + one.v[i];
  }
  DS4Q_UNROLL
  for (int i = 0; i < 4; i++) all.v[i] = all.v[i] / total;
  DS4Q_UNROLL
  for (int i = 0; i < 4; i += 2) {
    int pair = (column + i - (DS4Q_HEAD_DIM - 2 * pairs)) / 2;
    if (column + i < DS4Q_HEAD_DIM - 2 * pairs) continue;
    ds4q_turn(all.v[i], all.v[i + 1], cos[(ds4q_u64)t * pairs + pair],
              -sin[(ds4q_u64)t * pairs + pair]);
  }
  ds4q_store4(out + ((ds4q_u64)t * heads + head) * DS4Q_HEAD_DIM + column, all);
}
