// Owns the choice of compressed entries at ratio 4: scores of all that a token sees, and the best
// topk of them. What the entries are is compress.hip's; projections are linear.hip's.
//
// Token t of a launch sees count = (position + 1) / ratio entries of its sequence. q [T][heads][width], gates [T][heads], scores [T][stride], chosen [T][topk]; cos, sin
// [T][pairs]. heads <= 64; width <= 128, a multiple of 4. q and entries are 16-byte aligned.
//
// index_scores: grid (X, T) with any X, block 256, LDS 8704. Nothing while count <= topk. Block x
//   takes keys 16 c .. 16 c + 15 for c = x, x + X, ..; eight heads, turned, in each group's
//   registers. score_w = sum over heads of gate / sqrt(width heads) * max(0, q . k_w). Dot
//   products: lane l owns columns 4 l + (0 .. 3), fused, then lanes pairwise at distance 16, 8, 4,
//   2, 1. Heads: 8 g .. 8 g + 7 pairwise at distance 1, 2, 4, then g ascending.
// index_select: grid (1, T), block 512, LDS 1164. The topk greatest, lower index first on ties, NaN
//   below every number; ascending in chosen, -1 past count. Where count <= topk all are chosen.
//   Narrows a range of ordered keys by histograms of 256 bins until all of one bin, or one key, is
//   wanted; counters are integers, so the order in which threads count cannot show. Group g has
//   entries g run .. of a run of whole 128; the first 128 of them stay in registers.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// index_scores 4.3 us (1024 entries, X = 64), index_select 4.3 us; 0.45 ms where a million tokens
// left 262144 entries. Nothing here has run on AMD hardware.
#include "ds4q_state.h"

#define INDEX_KEYS 16
#define INDEX_WIDTH 128
#define INDEX_HEADS 8  // of a group
#define SELECT_THREADS 512
#define SELECT_GROUPS (SELECT_THREADS / DS4Q_LANES)
#define SELECT_BINS 256

// Eight heads of a group, turned; zeros past the last head or column.
DS4Q_FN void index_load(ds4q_quad* q, const float* from, int live, int width, int pairs,
                        const float* cos, const float* sin) {
  int column = 4 * (int)ds4q_lane();
  DS4Q_UNROLL
  for (int h = 0; h < INDEX_HEADS; h++) {
    q[h] = h < live && column < width ? ds4q_load4(from + h * width + column) : ds4q_quad{};
  }
  DS4Q_UNROLL
  for (int i = 0; i < 4; i += 2) {
    int pair = (column + i - (width - 2 * pairs)) / 2;
    if (column + i < width - 2 * pairs || column + i >= width) continue;
    float c = cos[pair], s = sin[pair];
    DS4Q_UNROLL
    for (int h = 0; h < INDEX_HEADS; h++) ds4q_turn(q[h].v[i], q[h].v[i + 1], c, s);
  }
}

// Dot products with one key: eight heads, not yet summed over the four lanes of head lane / 4.
DS4Q_FN float index_dot(const ds4q_quad* q, const float* key) {
  float dots[INDEX_HEADS];
  ds4q_quad k = ds4q_load4(key + 4 * ds4q_lane());
  DS4Q_UNROLL
  for (int h = 0; h < INDEX_HEADS; h++) {
    dots[h] = 0.0f;
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) dots[h] = ds4q_fma(q[h].v[i], k.v[i], dots[h]);
  }
  DS4Q_UNROLL
  for (int h = 0; h < 4; h++) dots[h] = ds4q_fold(dots[h], dots[h + 4], 16);
  return ds4q_fold(ds4q_fold(dots[0], dots[2], 8), ds4q_fold(dots[1], dots[3], 8), 4);
}

DS4Q_KERNEL(index_scores, 256,
            (const float* q, const float* gates, const ds4q_layer_state* state,
             const ds4q_token* tokens, const float* cos, const float* sin, float* scores,
             int heads, int width, int pairs, int ratio, int topk, int stride)) {
  DS4Q_SHARED(float, keys, INDEX_KEYS * INDEX_WIDTH);
  DS4Q_SHARED(float, sums, 8 * INDEX_KEYS);
  ds4q_token token = tokens[ds4q_block_y()];
  int count = (token.position + 1) / ratio;
  if (count <= topk || (int)ds4q_block_x() * INDEX_KEYS >= count) return;
  ds4q_u64 t = ds4q_block_y();
  int thread = (int)ds4q_thread(), lane = (int)ds4q_lane(), group = thread / DS4Q_LANES;
  int head = INDEX_HEADS * group;
  ds4q_quad queries[INDEX_HEADS];
  index_load(queries, q + (t * heads + head) * width, heads - head, width, pairs, cos + t * pairs,
             sin + t * pairs);
  float gain = 0.0f;
  if (head + lane / 4 < heads) {
    gain = gates[t * heads + head + lane / 4] * (1.0f / ds4q_sqrt((float)(width * heads)));
  }
  const float* entries = state[token.states].index_entries;
  for (int begin = (int)ds4q_block_x() * INDEX_KEYS; begin < count;
       begin += INDEX_KEYS * (int)ds4q_blocks_x()) {
    DS4Q_UNROLL
    for (int i = 0; i < 2; i++) {
      int quad = thread + 256 * i, key = begin + quad / 32, column = 4 * (quad % 32);
      if (key < count && column < width) {
        ds4q_copy16(keys + 4 * quad, entries + (ds4q_u64)key * width + column);
      } else {
        ds4q_store4(keys + 4 * quad, ds4q_quad{});
      }
    }
    ds4q_copy_commit();
    ds4q_copy_wait<0>();
    ds4q_barrier();
    DS4Q_ROLLED
    for (int batch = 0; batch < INDEX_KEYS; batch += 4) {
      const float* at = keys + batch * INDEX_WIDTH;
      float even = ds4q_fold(index_dot(queries, at), index_dot(queries, at + 2 * INDEX_WIDTH), 2);
      at += INDEX_WIDTH;
      float odd = ds4q_fold(index_dot(queries, at), index_dot(queries, at + 2 * INDEX_WIDTH), 2);
      float score = gain * ds4q_max(ds4q_fold(even, odd, 1), 0.0f);  // head lane / 4, key lane % 4
      DS4Q_UNROLL
      for (ds4q_u32 d = 4; d < DS4Q_LANES; d *= 2) {
        score = score + ds4q_shuffle(score, ds4q_lane() ^ d);
      }
      if (lane < 4) sums[group * INDEX_KEYS + batch + lane] = score;
    }
    ds4q_barrier();
    if (thread < INDEX_KEYS && begin + thread < count) {
      float score = 0.0f;
      for (int g = 0; g < 8; g++) score = score + sums[g * INDEX_KEYS + thread];
      scores[t * stride + begin + thread] = score;
    }
  }
}

// Greatest value among the lanes of a group, in every lane.
DS4Q_FN ds4q_u32 select_top(ds4q_u32 v) {
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < DS4Q_LANES; d *= 2) {
    ds4q_u32 other = ds4q_shuffle_bits(v, ds4q_lane() ^ d);
    v = other > v ? other : v;
  }
  return v;
}

// Sum of `v` over this lane and those before it in the group.
DS4Q_FN ds4q_u32 select_scan(ds4q_u32 v) {
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < DS4Q_LANES; d *= 2) {
    ds4q_u32 other = ds4q_shuffle_bits(v, (ds4q_lane() - d) % DS4Q_LANES);
    if (ds4q_lane() >= d) v += other;
  }
  return v;
}

// The keys of a group's run, four to a lane at a time; 0, below every key, past the count.
struct select_keys {
  ds4q_u32 v[4];
};
struct select_run {
  const float* row;
  int begin, steps, count;
  select_keys first;  // of step 0
};
DS4Q_FN select_keys select_load(const select_run& run, int step) {
  int at = run.begin + 128 * step + 4 * (int)ds4q_lane();
  select_keys keys;
  DS4Q_UNROLL
  for (int i = 0; i < 4; i++) keys.v[i] = at + i < run.count ? ds4q_ordered(run.row[at + i]) : 0u;
  return keys;
}
DS4Q_FN select_keys select_step(const select_run& run, int step) {
  return step == 0 ? run.first : select_load(run, step);
}

// The bin, from the top, that holds the `wanted`-th key: to found[0]; how many of that bin are
// wanted and how many it has: to found[1] and found[2]. One group; a lane has eight bins.
DS4Q_FN void select_bin(const ds4q_u32* bins, ds4q_u32 wanted, ds4q_u32* found) {
  ds4q_u32 top = SELECT_BINS - 1 - 8 * ds4q_lane(), own = 0, held[8];
  DS4Q_UNROLL
  for (ds4q_u32 i = 0; i < 8; i++) held[i] = bins[top - i];
  DS4Q_UNROLL
  for (ds4q_u32 i = 0; i < 8; i++) own += held[i];
  ds4q_u32 before = select_scan(own) - own;
  DS4Q_UNROLL
  for (ds4q_u32 i = 0; i < 8; i++) {
    if (before < wanted && before + held[i] >= wanted) {
      found[0] = top - i;
      found[1] = wanted - before;
      found[2] = held[i];
    }
    before += held[i];
  }
}

// Writes, ascending, the entries whose keys lie above low .. high and the first `wanted` of those
// in it. All groups.
DS4Q_FN void select_write(const select_run& run, ds4q_u32 low, ds4q_u32 high, ds4q_u32 wanted,
                          ds4q_u32* room, int* out) {
  int group = (int)(ds4q_thread() / DS4Q_LANES), lane = (int)ds4q_lane();
  ds4q_u32 above = 0, within = 0;
  for (int s = 0; s < run.steps; s++) {
    select_keys keys = select_step(run, s);
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {
      above += keys.v[i] > high;
      within += keys.v[i] >= low && keys.v[i] <= high;
    }
  }
  above = select_scan(above), within = select_scan(within);
  ds4q_barrier();  // room is free again
  if (lane == DS4Q_LANES - 1) room[group] = above, room[SELECT_GROUPS + group] = within;
  ds4q_barrier();
  above = select_scan(lane < group ? room[lane] : 0u);
  within = select_scan(lane < group ? room[SELECT_GROUPS + lane] : 0u);
  above = ds4q_shuffle_bits(above, DS4Q_LANES - 1);
  within = ds4q_shuffle_bits(within, DS4Q_LANES - 1);
  for (int s = 0; s < run.steps; s++) {
    select_keys keys = select_step(run, s);
    ds4q_u32 own = 0;  // above in the low half, within in the high one; 128 at most
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {
      own += (keys.v[i] > high) + ((ds4q_u32)(keys.v[i] >= low && keys.v[i] <= high) << 16);
    }
    ds4q_u32 through = select_scan(own), before = through - own;
    ds4q_u32 over = above + (before & 0xffffu), inside = within + (before >> 16);
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {
      bool in = keys.v[i] >= low && keys.v[i] <= high, takes = keys.v[i] > high;
      ds4q_u32 place = over + (inside < wanted ? inside : wanted);
      if (takes || (in && inside < wanted)) {
        out[place] = run.begin + 128 * s + 4 * lane + i;
      }
      over += takes, inside += in;
    }
    through = ds4q_shuffle_bits(through, DS4Q_LANES - 1);
    above += through & 0xffffu, within += through >> 16;
  }
}

DS4Q_KERNEL(index_select, SELECT_THREADS,
            (const float* scores, const ds4q_token* tokens, int* chosen, int ratio, int topk,
             int stride)) {
  DS4Q_SHARED(ds4q_u32, bins, SELECT_BINS);
  DS4Q_SHARED(ds4q_u32, room, 2 * SELECT_GROUPS);
  DS4Q_SHARED(ds4q_u32, found, 3);
  int count = (tokens[ds4q_block_y()].position + 1) / ratio, thread = (int)ds4q_thread();
  int* out = chosen + (ds4q_u64)ds4q_block_y() * topk;
  if (count <= topk) {
    for (int i = thread; i < topk; i += SELECT_THREADS) out[i] = i < count ? i : -1;
    return;
  }
  int group = thread / DS4Q_LANES, lane = (int)ds4q_lane();
  select_run run = {scores + (ds4q_u64)ds4q_block_y() * stride, 0, 0, count, {}};
  run.steps = (count + 128 * SELECT_GROUPS - 1) / (128 * SELECT_GROUPS);
  run.begin = 128 * run.steps * group;
  run.first = select_load(run, 0);
  ds4q_u32 low = ~0u, high = 0;
  for (int s = 0; s < run.steps; s++) {
    select_keys keys = select_step(run, s);
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {
      low = keys.v[i] - 1 < low ? keys.v[i] - 1 : low;  // nothing, at 0, turns into the greatest
      high = keys.v[i] > high ? keys.v[i] : high;
    }
  }
  low = ~select_top(~low);
  high = select_top(high);
  if (lane == 0) room[group] = low, room[SELECT_GROUPS + group] = high;
  ds4q_barrier();
  low = ~select_top(lane < SELECT_GROUPS ? ~room[lane] : 0u) + 1;
  high = select_top(lane < SELECT_GROUPS ? room[SELECT_GROUPS + lane] : 0u);

  // The topk-th greatest key lies in low .. high, as the wanted-th greatest of those there.
  ds4q_u32 wanted = (ds4q_u32)topk, there = (ds4q_u32)count;
  while (low < high && wanted < there) {
    // The range's exponent, or one more: it shifts to less than 256 bins.
    int shift = (int)(ds4q_bits((float)(high - low)) >> 23) - 127 - 7;
    if (shift < 0) shift = 0;
    if (thread < SELECT_BINS) bins[thread] = 0;
    ds4q_barrier();
    for (int s = 0; s < run.steps; s++) {
      select_keys keys = select_step(run, s);
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) {
        ds4q_u32 place = keys.v[i] - low;
        if (keys.v[i] >= low && keys.v[i] <= high) ds4q_count(&bins[place >> shift], 1);
      }
    }
    ds4q_barrier();
    if (group == 0) select_bin(bins, wanted, found);
    ds4q_barrier();
    low += found[0] << shift;
    ds4q_u32 span = (1u << shift) - 1;
    high = high - low > span ? low + span : high;
    wanted = found[1], there = found[2];
  }

  select_write(run, low, high, wanted, room, out);
}
