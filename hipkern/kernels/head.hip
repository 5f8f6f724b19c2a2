// Owns the greedy choice of a token from logits. The head's matrix product is linear.hip's, the
// collapse before it hyper.hip's.
//
// argmax_parts: grid (P, T) with any P, block 256, LDS 64. Block p scans ids p * 256 + thread on,
//   in steps of 256 P; its best becomes parts[t][p], a key: the logit in ds4q_ordered's order above
//   the complement of the id, so that the greater key is the greater logit and, on ties, the lower
//   id.
// argmax: grid (1, T), block 32, LDS 0. ids[t] from the greatest of parts[t][0 .. count - 1].
//   logits [T][n], ids [T]. A logit that is not finite beats all others, and the id is then -1:
//   there is no largest. The maximum of distinct keys does not depend on any order.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// argmax_parts 1.9 us (P = 128), argmax 1.1 us. Nothing here has run on AMD hardware.
#include "ds4q_dense.h"

#define HEAD_NOT_FINITE 0xffffffffu  // above every float in ds4q_ordered's order

DS4Q_KERNEL(argmax_parts, 256, (const float* logits, ds4q_u64* parts, int n)) {
  DS4Q_SHARED(ds4q_u64, room, 8);
  const float* row = logits + (ds4q_u64)ds4q_block_y() * (ds4q_u32)n;
  ds4q_u64 best = 0;
  for (ds4q_u32 id = ds4q_block_x() * 256 + ds4q_thread(); id < (ds4q_u32)n;
       id += 256 * ds4q_blocks_x()) {
    float logit = row[id];
    bool finite = (ds4q_bits(logit) & 0x7f800000u) != 0x7f800000u;
    ds4q_u64 key = (ds4q_u64)(finite ? ds4q_ordered(logit) : HEAD_NOT_FINITE) << 32 | ~id;
    best = key > best ? key : best;
  }
  best = ds4q_group_top(best);
  if (ds4q_lane() == 0) room[ds4q_thread() / DS4Q_LANES] = best;
  ds4q_barrier();
  if (ds4q_thread() != 0) return;
  for (int g = 1; g < 8; g++) best = room[g] > best ? room[g] : best;
  parts[(ds4q_u64)ds4q_block_y() * ds4q_blocks_x() + ds4q_block_x()] = best;
}

DS4Q_KERNEL(argmax, 32, (const ds4q_u64* parts, int* ids, int count)) {
  const ds4q_u64* row = parts + (ds4q_u64)ds4q_block_y() * (ds4q_u32)count;
  ds4q_u64 best = 0;
  for (int p = (int)ds4q_thread(); p < count; p += DS4Q_LANES) best = row[p] > best ? row[p] : best;
  best = ds4q_group_top(best);
  if (ds4q_thread() != 0) return;
  ids[ds4q_block_y()] = (ds4q_u32)(best >> 32) == HEAD_NOT_FINITE ? -1 : (int)~(ds4q_u32)best;
}
