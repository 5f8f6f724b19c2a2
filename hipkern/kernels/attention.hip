// Owns attention of one token at a time over its window rows and compressed entries, with a sink per
// head and the turning back of values. Which entries is index.hip's, what they are compress.hip's.
//
// Built for DS4Q_HEAD_DIM = D, a multiple of 4 (default 512). A token sees n keys: its window's rows
// from the oldest on, then `chosen` [T][topk] or, where that is null (topk 0), the first entries.
// Chunk c is keys 16 c .. 16 c + 15 of that list, so what a token adds up does not depend on its
// neighbours. `chunks` is what partial has room for, >= ceil(n / 16) of every token. Token t of the
// launch stands at step->first + offset + t. Base pointers 16-byte aligned.
//
// attend: grid (X, ceil(heads / 16), T) with any X, block 128, LDS 33792 or 9216.
//   Block x takes chunks x, x + X, ..: keys are staged in shared memory and serve 16 heads, four to a
//   group of lanes. q [T][heads][D] is normed per head (no weight) and turned by cos, sin [T][pairs].
//   partial [T][chunks][heads][D + 4]: sum of w_i k_i, then max_i s_i, sum of w_i, with
//   s_i = q . k_i / sqrt(D), w_i = exp(s_i - max). Lane l owns columns 128 j + 4 l + (0 .. 3); dot
//   products and squares: a lane's columns ascending, fused, then lanes pairwise at distance 16, 8,
//   4, 2, 1 (squares: ds4q_group_sum); sums over keys: k_i ascending, fused; w_i: keys i and i + 8,
//   then pairwise at distance 1, 2, 4.
// attend_combine: grid (ceil(D / 128), heads, T), block 128, LDS 2560. out [T][heads][D] = sum over
//   chunks of exp(max_c - M) partial_c / (exp(sink - M) + the same of the w), M over chunks and sink;
//   turned back. Group g takes chunks g, g + 4, .. in order, fused; then the groups in order.
// Measured: not yet on a device; nothing here has run on AMD hardware.
#include "ds4q_dense.h"
#include "ds4q_state.h"

#ifndef DS4Q_HEAD_DIM
#define DS4Q_HEAD_DIM 512
#endif
#define ATTEND_QUADS ((DS4Q_HEAD_DIM + 127) / 128)  // of a lane
#define ATTEND_COLUMNS (128 * ATTEND_QUADS)         // of a staged key, zeros past D
#define ATTEND_KEYS 16                              // of a chunk
#define ATTEND_HEADS 4                              // of a group of lanes
#define ATTEND_STRIDE (DS4Q_HEAD_DIM + 4)           // floats of a head's partial result

// Stages the keys of one chunk, zeros past the last.
DS4Q_FN void attend_stage(float* keys, const ds4q_layer_state* state, ds4q_sight sight,
                          const int* chosen, int begin) {
  const float* window = state->window;
  const float* entries = state->entries;
  int slots = state->window_rows;
  DS4Q_UNROLL
  for (int i = 0; i < ATTEND_KEYS * ATTEND_QUADS / 4; i++) {
    int quad = (int)ds4q_thread() + 128 * i;
    int key = begin + quad / (ATTEND_COLUMNS / 4), column = 4 * (quad % (ATTEND_COLUMNS / 4));
    float* to = keys + 4 * quad;
    if (key < sight.rows + sight.entries && column < DS4Q_HEAD_DIM) {
      const float* row;
      if (key < sight.rows) {
        row = window + (ds4q_u64)((sight.oldest + key) % slots) * DS4Q_HEAD_DIM;
      } else {
        int entry = key - sight.rows;
        row = entries + (ds4q_u64)(chosen ? chosen[entry] : entry) * DS4Q_HEAD_DIM;
      }
      ds4q_copy16(to, row + column);
    } else {
      ds4q_store4(to, ds4q_quad{});
    }
  }
  ds4q_copy_commit();
}

// Queries of this group's heads, normed and turned; zeros past the last head.
DS4Q_FN void attend_load(ds4q_quad (*q)[ATTEND_QUADS], const float* from, int live, int pairs,
                         const float* cos, const float* sin, float eps) {
  DS4Q_UNROLL
  for (int h = 0; h < ATTEND_HEADS; h++) {
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      int column = 128 * j + 4 * (int)ds4q_lane();
      bool inside = h < live && column < DS4Q_HEAD_DIM;
      q[h][j] = inside ? ds4q_load4(from + h * DS4Q_HEAD_DIM + column) : ds4q_quad{};
    }
  }
  DS4Q_UNROLL
  for (int h = 0; h < ATTEND_HEADS; h++) {
    float squares = 0.0f;
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) squares = ds4q_fma(q[h][j].v[i], q[h][j].v[i], squares);
    }
    float r = ds4q_inverse_rms(ds4q_group_sum(squares), DS4Q_HEAD_DIM, eps);
    DS4Q_UNROLL
    for (int j = 0; j < ATTEND_QUADS; j++) {
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) q[h][j].v[i] = q[h][j].v[i] * r;
    }
  }
  DS4Q_UNROLL
  for (int j = 0; j < ATTEND_QUADS; j++) {
    DS4Q_UNROLL
    for (int i = 0; i < 4; i += 2) {
      int column = 128 * j + 4 * (int)ds4q_lane() + i;
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

DS4Q_KERNEL(attend, 128,
            (const float* q, const ds4q_layer_state* state, const ds4q_step* step,
             const int* chosen, const float* cos, const float* sin, float* partial, int heads,
             int pairs, int reach, int ratio, int topk, int chunks, int offset, float eps)) {
  DS4Q_SHARED(float, keys, ATTEND_KEYS * ATTEND_COLUMNS);
  DS4Q_SHARED(float, shares, 4 * ATTEND_KEYS * ATTEND_HEADS);
  int t = (int)ds4q_block_z(), lane = (int)ds4q_lane(), group = (int)(ds4q_thread() / DS4Q_LANES);
  ds4q_sight sight = ds4q_sight_of(step->first + offset + t, reach, ratio, topk);
  int seen = sight.rows + sight.entries;
  int head = (4 * (int)ds4q_block_y() + group) * ATTEND_HEADS;
  int live = heads - head < ATTEND_HEADS ? heads - head : ATTEND_HEADS;  // below 1: nothing to do
  const int* list = chosen ? chosen + (ds4q_u64)t * topk : chosen;
  float scale = 1.0f / ds4q_sqrt((float)DS4Q_HEAD_DIM);
  ds4q_quad queries[ATTEND_HEADS][ATTEND_QUADS];
  bool loaded = false;
  for (int begin = (int)ds4q_block_x() * ATTEND_KEYS; begin < seen;
       begin += ATTEND_KEYS * (int)ds4q_blocks_x()) {
    attend_stage(keys, state, sight, list, begin);
    if (!loaded) {
      attend_load(queries, q + ((ds4q_u64)t * heads + head) * DS4Q_HEAD_DIM, live, pairs,
                  cos + (ds4q_u64)t * pairs, sin + (ds4q_u64)t * pairs, eps);
      loaded = true;
    }
    ds4q_copy_wait<0>();
    ds4q_barrier();
    // Lane l: head l / 8, keys l % 8 and l % 8 + 8 of the chunk.
    float low = attend_dots(queries, keys) * scale;
    float high = attend_dots(queries, keys + 8 * ATTEND_COLUMNS) * scale;
    if (begin + lane % 8 >= seen) low = -ds4q_infinity();
    if (begin + lane % 8 + 8 >= seen) high = -ds4q_infinity();
    float top = ds4q_max(low, high);
    DS4Q_UNROLL
    for (ds4q_u32 d = 1; d < 8; d *= 2) top = ds4q_max(top, ds4q_shuffle(top, ds4q_lane() ^ d));
    low = ds4q_exp(low - top);
    high = ds4q_exp(high - top);
    float total = low + high;
    DS4Q_UNROLL
    for (ds4q_u32 d = 1; d < 8; d *= 2) total = total + ds4q_shuffle(total, ds4q_lane() ^ d);
    float* own = shares + group * (ATTEND_KEYS * ATTEND_HEADS);
    own[lane % 8 * ATTEND_HEADS + lane / 8] = low;
    own[(lane % 8 + 8) * ATTEND_HEADS + lane / 8] = high;
    ds4q_group_barrier();

    ds4q_quad mixed[ATTEND_HEADS][ATTEND_QUADS] = {};
    DS4Q_ROLLED
    for (int key = 0; key < ATTEND_KEYS; key++) {
      ds4q_quad w = ds4q_load4(own + key * ATTEND_HEADS);
      DS4Q_UNROLL
      for (int j = 0; j < ATTEND_QUADS; j++) {
        ds4q_quad k = ds4q_load4(keys + key * ATTEND_COLUMNS + 128 * j + 4 * lane);
        DS4Q_UNROLL
        for (int h = 0; h < ATTEND_HEADS; h++) {
          DS4Q_UNROLL
          for (int i = 0; i < 4; i++) {
            mixed[h][j].v[i] = ds4q_fma(w.v[h], k.v[i], mixed[h][j].v[i]);
          }
        }
      }
    }
    float* out = partial + (((ds4q_u64)t * chunks + begin / ATTEND_KEYS) * heads + head) *
                               ATTEND_STRIDE;
    DS4Q_UNROLL
    for (int h = 0; h < ATTEND_HEADS; h++) {
      if (h >= live) continue;
      DS4Q_UNROLL
      for (int j = 0; j < ATTEND_QUADS; j++) {
        int column = 128 * j + 4 * lane;
        if (column < DS4Q_HEAD_DIM) ds4q_store4(out + h * ATTEND_STRIDE + column, mixed[h][j]);
      }
    }
    if (lane % 8 == 0 && lane / 8 < live) {
      out[lane / 8 * ATTEND_STRIDE + DS4Q_HEAD_DIM] = top;
      out[lane / 8 * ATTEND_STRIDE + DS4Q_HEAD_DIM + 1] = total;
    }
    ds4q_barrier();  // keys are read before the next chunk's arrive
  }
}

DS4Q_KERNEL(attend_combine, 128,
            (const float* partial, const float* sink, const ds4q_step* step, const float* cos,
             const float* sin, float* out, int heads, int pairs, int reach, int ratio, int topk,
             int chunks, int offset)) {
  DS4Q_SHARED(ds4q_quad, sums, 4 * DS4Q_LANES);
  DS4Q_SHARED(float, totals, 4 * DS4Q_LANES);
  int t = (int)ds4q_block_z(), head = (int)ds4q_block_y();
  int lane = (int)ds4q_lane(), group = (int)(ds4q_thread() / DS4Q_LANES);
  int column = 128 * (int)ds4q_block_x() + 4 * lane;
  ds4q_sight sight = ds4q_sight_of(step->first + offset + t, reach, ratio, topk);
  int count = (sight.rows + sight.entries + ATTEND_KEYS - 1) / ATTEND_KEYS;
  const float* from = partial + ((ds4q_u64)t * chunks * heads + head) * ATTEND_STRIDE;
  ds4q_u64 step_floats = (ds4q_u64)heads * ATTEND_STRIDE;
  float top = sink[head];
  for (int c = lane; c < count; c += DS4Q_LANES) {
    top = ds4q_max(top, from[c * step_floats + DS4Q_HEAD_DIM]);
  }
  top = ds4q_group_max(top);
  ds4q_quad sum = {};
  float total = 0.0f;
  for (int c = group; c < count; c += 4) {
    const float* part = from + c * step_floats;
    float factor = ds4q_exp(part[DS4Q_HEAD_DIM] - top);
    total = ds4q_fma(part[DS4Q_HEAD_DIM + 1], factor, total);
    ds4q_quad mixed = column < DS4Q_HEAD_DIM ? ds4q_load4(part + column) : ds4q_quad{};
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) sum.v[i] = ds4q_fma(mixed.v[i], factor, sum.v[i]);
  }
  sums[ds4q_thread()] = sum;
  totals[ds4q_thread()] = total;
  ds4q_barrier();
  if (group != 0 || column >= DS4Q_HEAD_DIM) return;
  total = ds4q_exp(sink[head] - top);
  ds4q_quad all = {};
  for (int g = 0; g < 4; g++) {
    total = total + totals[DS4Q_LANES * g + lane];
    for (int i = 0; i < 4; i++) all.v[i] = all.v[i] + sums[DS4Q_LANES * g + lane].v[i];
  }
  for (int i = 0; i < 4; i++) all.v[i] = all.v[i] / total;
  for (int i = 0; i < 4; i += 2) {
    int pair = (column + i - (DS4Q_HEAD_DIM - 2 * pairs)) / 2;
    if (column + i < DS4Q_HEAD_DIM - 2 * pairs) continue;
    ds4q_turn(all.v[i], all.v[i + 1], cos[(ds4q_u64)t * pairs + pair],
              -sin[(ds4q_u64)t * pairs + pair]);
  }
  ds4q_store4(out + ((ds4q_u64)t * heads + head) * DS4Q_HEAD_DIM + column, all);
}
