// Owns the definition of a row's product with activations, and how a group of 32 lanes forms it.
//
// The sum, for every kernel and target (w weight, x activation, all f32, fma = ds4q_fma):
//   packed formats (3, 21, 100 and above): a tile is 128 weights of a row. Lane l of a group takes
//     tiles l, l + 32, ... in order, the blocks of a tile in order, the weights of a block, or of
//     each half of it where halves have scales of their own, in order: acc = fma(level, x, acc) from
//     0, then total = fma(scale, acc, total) from 0.
//   wide formats (1, 2, 16): lane l takes weights 8 l to 8 l + 7 of each 256 of a row, in order:
//     total = fma(w, x, total) from 0.
//   The lanes' totals are summed as ds4q_group_sum does; then comes one multiplication with the
//   format's factor (the row's scale, or the power of two that UE4M3 scales lack).
// Nothing of it depends on how many rows, tokens or blocks a launch has.
#pragma once
#include "ds4q_unpack.h"

#define DS4Q_TILE 128   // weights of a packed row that a lane takes at once
#define DS4Q_TOKENS 8   // activation rows that share one reading of the weights

template <int DECODER>
inline constexpr bool ds4q_is_wide = DECODER == 1 || DECODER == 2 || DECODER == 16;

template <int DECODER>
DS4Q_FN float ds4q_add_block(const float* level, const float* scale, const float* x, float total) {
  constexpr int SPAN = ds4q_format<DECODER>::HALVES ? DS4Q_BLOCK / 2 : DS4Q_BLOCK;
  DS4Q_UNROLL
  for (int h = 0; h < DS4Q_BLOCK / SPAN; h++) {
    float acc = 0.0f;
    DS4Q_UNROLL
    for (int i = 0; i < SPAN; i++) acc = ds4q_fma(level[SPAN * h + i], x[SPAN * h + i], acc);
    total = ds4q_fma(scale[h], acc, total);
  }
  return total;
}

// Products of one row with `count` <= TOKENS activation rows, in every lane.
template <int DECODER, int TOKENS>
DS4Q_FN void ds4q_row(const ds4q_matrix& w, const ds4q_tables& tables, int row, const float* x,
                      int x_stride, int count, float* y) {
  using format = ds4q_format<DECODER>;
  const ds4q_u8* at = w.data + (ds4q_u64)row * (ds4q_u64)w.row_bytes;
  float totals[TOKENS] = {};
  constexpr bool WIDE = ds4q_is_wide<DECODER>;
  constexpr int SPAN = WIDE ? 8 : DS4Q_BLOCK, LEAP = WIDE ? 8 * DS4Q_LANES : DS4Q_TILE * DS4Q_LANES;
  constexpr int PARTS = WIDE ? 1 : DS4Q_TILE / DS4Q_BLOCK;
  for (int first = (int)ds4q_lane() * SPAN * PARTS; first < w.cols; first += LEAP) {
    for (int c = first; c < w.cols && c < first + SPAN * PARTS; c += SPAN) {
      if constexpr (WIDE) {
        ds4q_u32 words[format::BLOCK_BYTES / 4];
        float level[DS4Q_BLOCK], scale[2];
        for (int i = 0; i < format::BLOCK_BYTES / 16; i++) {
          words[i] = ((const ds4q_u32*)(at + c / 8 * (format::BLOCK_BYTES / 4)))[i];
        }
        format::unpack(words, 0, tables, level, scale);
        for (int t = 0; t < TOKENS && t < count; t++) {
          for (int i = 0; i < 8; i++) totals[t] = ds4q_fma(level[i], x[t * x_stride + c + i], totals[t]);
        }
      } else {
        ds4q_u32 words[(format::BLOCK_BYTES + 3) / 4];
        float level[DS4Q_BLOCK], scale[2];
        ds4q_load_block<format::BLOCK_BYTES>(
            at + format::HEADER + c / DS4Q_BLOCK * format::BLOCK_BYTES, words);
        format::unpack(words, 0, tables, level, scale);
        for (int t = 0; t < TOKENS && t < count; t++) {
          totals[t] = ds4q_add_block<DECODER>(level, scale, x + (ds4q_u64)t * x_stride + c, totals[t]);
        }
      }
    }
  }
  float factor = format::factor(at);
  for (int t = 0; t < TOKENS && t < count; t++) y[t] = ds4q_group_sum(totals[t]) * factor;
}
