// Owns rotating activations as weights of decoder 19 are stored, before they are multiplied. The
// products are linear.hip's and moe.hip's.
//
// rotate: grid (cols / 256, T, 1), block 32, LDS 0. to [T][cols] = from [T][cols], each 256 of a row
//   rotated; cols a multiple of 256. Both may be the same.
// rotate_hidden: grid (width / 256, k + 1, T), block 32, LDS 0. Rows of hidden [T][k + 1][width],
//   as moe_gate_up leaves them, in place: those whose down, of experts [E][gate, up, down] by ids
//   [T][k], or of shared, has decoder 19. Others stay, as does what has no expert. A grid of k in
//   place of k + 1 leaves the shared expert's alone.
//
// A lane holds values lane, lane + 32, ..: strides of 32 and more are in its registers, lesser ones
// between lanes. Both kernels together took 3.1 us on an NVIDIA H200, one token, cols 4096, six rows
// of width 2048, in a graph. Nothing here has run on AMD hardware.
#include "ds4q_fwht.h"
#include "ds4q_unpack.h"

DS4Q_FN void rotate_group(const float* from, float* to) {
  int lane = (int)ds4q_lane();
  float value[8];
  DS4Q_UNROLL
  for (int j = 0; j < 8; j++) {
    value[j] = ds4q_signed(from[32 * j + lane], ds4q_signs_before(j), lane);
  }
  DS4Q_UNROLL
  for (int stride = 4; stride > 0; stride /= 2) {
    DS4Q_UNROLL
    for (int j = 0; j < 8; j++) {
      if (!(j & stride)) ds4q_butterfly(value[j], value[j + stride]);
    }
  }
  DS4Q_UNROLL
  for (int stride = 16; stride > 0; stride /= 2) {
    DS4Q_UNROLL
    for (int j = 0; j < 8; j++) {
      float other = ds4q_shuffle(value[j], ds4q_lane() ^ (ds4q_u32)stride);
      value[j] = lane & stride ? other - value[j] : value[j] + other;
    }
  }
  DS4Q_UNROLL
  for (int j = 0; j < 8; j++) {
    to[32 * j + lane] = ds4q_signed(value[j] * DS4Q_TURN_SCALE, ds4q_signs_after(j), lane);
  }
}

DS4Q_KERNEL(rotate, DS4Q_LANES, (const float* from, float* to, int cols)) {
  ds4q_u64 at = (ds4q_u64)ds4q_block_y() * cols + (ds4q_u64)ds4q_block_x() * DS4Q_TURN;
  rotate_group(from + at, to + at);
}

DS4Q_KERNEL(rotate_hidden, DS4Q_LANES,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids, float* hidden,
             int width, int k)) {
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  int id = slot < k ? ids[token * k + slot] : shared ? 0 : -1;
  if (id < 0) return;
  const ds4q_matrix& down = slot < k ? experts[3 * (ds4q_u64)id + 2] : shared[2];
  if (!ds4q_is_rotated(down.decoder)) return;
  ds4q_u64 row = ((ds4q_u64)token * (k + 1) + slot) * width;
  float* at = hidden + row + (ds4q_u64)ds4q_block_x() * DS4Q_TURN;
  rotate_group(at, at);
}
