// Owns the definition of a row's product with activations, and the parts that kernels build it of.
//
// The sum, for every kernel and target (w weight, x activation, all f32, fma = ds4q_fma):
//   packed formats (3, 19, 21, 100 and above): a tile is 128 weights of a row. Lane l of a group takes
//     tiles l, l + 32, ... in order, the blocks of a tile in order, the weights of a block, or of
//     each half of it where the format has halves, in order: acc = fma(level, x, acc) from 0; then
//     total = fma(scale, acc, total) from 0.
//   wide formats (1, 2, 16): lane l takes weights 8 l to 8 l + 7 of each 256 of a row, in order:
//     total = fma(w, x, total) from 0.
//   The lanes' totals are summed as ds4q_group_sum does; then comes one multiplication with the
//   format's factor (the row's scale, or the power of two that UE4M3 scales lack).
// Where the format is ROTATED, x is what rotate.hip has made of the activations.
// Nothing of it depends on how many rows, tokens or blocks a launch has. Short rows share a group:
// the steps of the sum that they leave out would add zeros.
#pragma once
#include "ds4q_unpack.h"

#define DS4Q_TILE 128  // weights that a lane takes at once
#define DS4Q_TILE_BLOCKS (DS4Q_TILE / DS4Q_BLOCK)
#define DS4Q_PART (DS4Q_TILE * DS4Q_LANES)  // columns that a group takes at once
#define DS4Q_TOKENS 8                       // rows of activations that share reading the weights

template <int DECODER>
inline constexpr bool ds4q_is_wide = DECODER == 1 || DECODER == 2 || DECODER == 16;

DS4Q_FN int ds4q_least(int a, int b) { return a < b ? a : b; }

// ---- products ------------------------------------------------------------------------------------
DS4Q_FN ds4q_four ds4q_read_four(const float* at) { return *(const ds4q_four*)at; }

// Block b of tile `number` of a row whose blocks begin at `row`: a multiple of eight bytes, or of
// four where a block has an odd number of them.
template <int DECODER>
DS4Q_FN ds4q_codes ds4q_read_block(const ds4q_u8* row, int number, int b) {
  using format = ds4q_format<DECODER>;
  ds4q_codes codes;
  if constexpr (format::HEAD != 0) {  // all of it lies on eight bytes
    const ds4q_u8* group = row + number / 2 * (8 * format::BLOCK_BYTES);
    const ds4q_u8* own = group + format::HEAD + number % 2 * DS4Q_TILE_BLOCKS * format::CODE_BYTES;
    ds4q_u64 chosen = *(const ds4q_u64*)(own + b * format::CODE_BYTES);
    ds4q_u64 levels = *(const ds4q_u64*)group;
    codes.words[0] = (ds4q_u32)chosen, codes.words[1] = (ds4q_u32)(chosen >> 32);
    codes.words[2] = (ds4q_u32)levels, codes.words[3] = (ds4q_u32)(levels >> 32);
  } else {
    const ds4q_u8* tile = row + number * DS4Q_TILE_BLOCKS * format::BLOCK_BYTES;
    // Tiles of an even number of words share banks with their neighbours, word by word; pairs do
    // not.
    constexpr int STEP = format::BLOCK_BYTES % 2 == 0 ? 8 : 4;
    constexpr int MOST = (format::BLOCK_BYTES + STEP - 2) / STEP + 1;
    int first = b * format::BLOCK_BYTES, before = first % STEP, end = before + format::BLOCK_BYTES;
    ds4q_u32 words[MOST * STEP / 4];
    DS4Q_UNROLL
    for (int i = 0; i < MOST; i++) {
      if (i * STEP >= end) break;
      if constexpr (STEP == 8) {
        ds4q_u64 pair = *(const ds4q_u64*)(tile + first - before + 8 * i);
        words[2 * i] = (ds4q_u32)pair, words[2 * i + 1] = (ds4q_u32)(pair >> 32);
      } else {
        words[i] = *(const ds4q_u32*)(tile + first - before + 4 * i);
      }
    }
    DS4Q_UNROLL
    for (int i = 0; i < format::CODE_BYTES / 4; i++) {
      codes.words[i] = ds4q_word(words, before + format::CODES + 4 * i);
    }
    DS4Q_UNROLL
    for (int i = 0; i < format::SCALES; i++) {
      int at = before + format::SCALE + i;
      codes.bytes[i] = (words[at / 4] >> at % 4 * 8) & 255;
    }
  }
  return codes;
}

// Adds one block of each of STREAMS rows, whose columns' activations begin at x, to totals.
template <int DECODER, int STREAMS>
DS4Q_FN void ds4q_add_blocks(const ds4q_codes* codes, const ds4q_tables* tables, const float* x,
                             float* totals) {
  using format = ds4q_format<DECODER>;
  float acc[STREAMS][2] = {};
  DS4Q_UNROLL
  for (int c = 0; c < DS4Q_BLOCK / 8; c++) {
    DS4Q_UNROLL
    for (int i = 0; i < 2; i++) {
      int place = ds4q_place<DECODER>(c, i), half = format::HALVES ? place / 16 : 0;
      ds4q_four four = ds4q_read_four(x + place);
      DS4Q_UNROLL
      for (int s = 0; s < STREAMS; s++) {
        float level[8];
        format::eight(codes[s].words, codes[s].bytes, tables[s], c, level);
        DS4Q_UNROLL
        for (int j = 0; j < 4; j++) {
          acc[s][half] = ds4q_fma(level[4 * i + j], four.x[j], acc[s][half]);
        }
      }
    }
  }
  DS4Q_UNROLL
  for (int s = 0; s < STREAMS; s++) {
    DS4Q_UNROLL
    for (int h = 0; h <= (int)format::HALVES; h++) {
      totals[s] = ds4q_fma(format::scale(codes[s].bytes, tables[s], h), acc[s][h], totals[s]);
    }
  }
}

// The lanes of a row give its sum to all of them.
DS4Q_FN float ds4q_row_sum(float total, int lanes) {
  DS4Q_UNROLL
  for (int d = 1; d < DS4Q_LANES; d *= 2) {
    float other = ds4q_shuffle(total, ds4q_lane() ^ (ds4q_u32)d);
    total = total + (d < lanes ? other : 0.0f);
  }
  return total;
}

// A lane's totals of one row, which may lie at any address and have any number of blocks, with
// `count` <= TOKENS rows of activations. Reads straight from device memory.
template <int DECODER, int TOKENS>
DS4Q_FN void ds4q_any_row(const ds4q_u8* row, int cols, const ds4q_tables& tables, const float* x,
                          ds4q_u64 x_stride, int count, float* totals) {
  using format = ds4q_format<DECODER>;
  constexpr bool WIDE = ds4q_is_wide<DECODER>;
  constexpr int SPAN = WIDE ? 8 : DS4Q_TILE;  // columns of a lane, one after the other
  DS4Q_UNROLL
  for (int t = 0; t < TOKENS; t++) totals[t] = 0.0f;
  DS4Q_ROLLED
  for (int first = (int)ds4q_lane() * SPAN; first < cols; first += SPAN * DS4Q_LANES) {
    if constexpr (WIDE) {
      constexpr int BYTES = format::BLOCK_BYTES / 4;
      ds4q_u32 words[BYTES / 4];
      ds4q_load_words<BYTES>(row + first / 8 * BYTES, words);
      float level[8];
      format::eight(words, nullptr, tables, 0, level);
      DS4Q_UNROLL
      for (int t = 0; t < TOKENS; t++) {
        if (t >= count) break;
        DS4Q_UNROLL
        for (int i = 0; i < 8; i++) {
          totals[t] = ds4q_fma(level[i], x[t * x_stride + first + i], totals[t]);
        }
      }
    } else {
      DS4Q_ROLLED
      for (int c = first; c < ds4q_least(first + SPAN, cols); c += DS4Q_BLOCK) {
        ds4q_codes codes = ds4q_load_block<DECODER>(row, c / DS4Q_BLOCK);
        float level[DS4Q_BLOCK];
        ds4q_levels<DECODER>(codes, tables, level);
        DS4Q_UNROLL
        for (int t = 0; t < TOKENS; t++) {
          if (t >= count) break;
          const float* from = x + t * x_stride + c;
          DS4Q_UNROLL
          for (int h = 0; h <= (int)format::HALVES; h++) {
            float acc = 0.0f;
            DS4Q_UNROLL
            for (int i = h * 16; i < (format::HALVES ? h * 16 + 16 : DS4Q_BLOCK); i++) {
              acc = ds4q_fma(level[i], from[i], acc);
            }
            totals[t] = ds4q_fma(format::scale(codes.bytes, tables, h), acc, totals[t]);
          }
        }
      }
    }
  }
}
