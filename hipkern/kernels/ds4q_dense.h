// Owns what the kernels on decoded rows share: quads of floats, sums over a block, RMS factors, and
// which keys a token sees. No kernel lives here.
#pragma once

#include "ds4q_dev.h"

#if defined(DS4Q_SIM)
#define DS4Q_ROLLED
#else
#define DS4Q_ROLLED _Pragma("unroll 1")  // where unrolling would only cost registers
#endif

struct alignas(16) ds4q_quad {  // moved by one 128-bit access
  float v[4];
};
DS4Q_FN ds4q_quad ds4q_load4(const float* from) { return *(const ds4q_quad*)from; }
DS4Q_FN void ds4q_store4(float* to, ds4q_quad quad) { *(ds4q_quad*)to = quad; }

// Sum over a block of GROUPS groups, in every thread: ds4q_group_sum inside each group, and once
// more over the groups' sums. `room` is shared memory for GROUPS floats; it may be used again after
// the block's next barrier.
template <ds4q_u32 GROUPS>
DS4Q_FN float ds4q_block_sum(float v, float* room) {
  v = ds4q_group_sum(v);
  if (ds4q_lane() == 0) room[ds4q_thread() / DS4Q_LANES] = v;
  ds4q_barrier();
  return ds4q_group_sum(ds4q_lane() < GROUPS ? room[ds4q_lane()] : 0.0f);
}

// One level of a sum over lanes that each hold several values: a lane keeps `low` or `high` by a
// bit of its number, and adds its partner's share of it. Folding 32 values down to one a lane takes
// 31 shuffles where a tree for each would take 160.
DS4Q_FN float ds4q_fold(float low, float high, ds4q_u32 distance) {
  bool upper = (ds4q_lane() & distance) != 0;
  float given = ds4q_shuffle(upper ? low : high, ds4q_lane() ^ distance);
  return (upper ? high : low) + given;
}

// 1 / sqrt(mean square + eps), of a sum of squares.
DS4Q_FN float ds4q_inverse_rms(float squares, int count, float eps) {
  return 1.0f / ds4q_sqrt(squares / (float)count + eps);
}

// Turns the pair (a, b) by the angle whose cosine and sine are given.
DS4Q_FN void ds4q_turn(float& a, float& b, float cos, float sin) {
  float turned = a * cos - b * sin;
  b = a * sin + b * cos;
  a = turned;
}

// What the token at `position` attends to, in this order: its window's rows from the oldest on,
// then compressed entries, ascending.
struct ds4q_sight {
  int oldest;   // position of the first window row
  int rows;     // window rows
  int entries;  // compressed entries; topk > 0 bounds them
};
DS4Q_FN ds4q_sight ds4q_sight_of(int position, int reach, int ratio, int topk) {
  ds4q_sight sight;
  sight.oldest = position + 1 > reach ? position + 1 - reach : 0;
  sight.rows = position + 1 - sight.oldest;
  sight.entries = ratio ? (position + 1) / ratio : 0;
  if (topk > 0 && sight.entries > topk) sight.entries = topk;
  return sight;
}

// Floats in an order of unsigned integers: NaN lowest of all at 1, then -inf upwards, both zeros
// alike. 0 is below every float.
DS4Q_FN ds4q_u32 ds4q_ordered(float x) {
  if (x != x) return 1u;
  ds4q_u32 bits = ds4q_bits(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The greatest 64-bit key among the 32 lanes, in every lane.
DS4Q_FN ds4q_u64 ds4q_group_top(ds4q_u64 key) {
  DS4Q_UNROLL
  for (ds4q_u32 d = 1; d < DS4Q_LANES; d *= 2) {
    ds4q_u32 lane = ds4q_lane() ^ d;
    ds4q_u64 high = ds4q_shuffle_bits((ds4q_u32)(key >> 32), lane);
    ds4q_u64 other = high << 32 | ds4q_shuffle_bits((ds4q_u32)key, lane);
    key = other > key ? other : key;
  }
  return key;
}
