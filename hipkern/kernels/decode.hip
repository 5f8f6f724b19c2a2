// Owns values of packed matrices: whole ones in f32 or f16, and embedding rows. Not: products.
//
// decode_f32: grid (ceil(rows * cols / 32 / 128), 1, 1), block 128, LDS 0. Thread i gives the 32
//   values of block i, with the bits of the CPU codecs. Of a rotated type it reads the 256 that
//   they were rotated with.
// decode_f16: the same grid, block 128, LDS 0. Those values rounded to nearest even, subnormals
//   kept, infinite beyond f16's range.
// embed: grid (ceil(cols / 32 / 128), tokens, 1), block 128, LDS 0. Copies of row ids[t]
//   fill streams [tokens][n_streams][cols].
//
// Built once for each decoder. Rows lie anywhere, with three readable bytes around them; `out` and
// `streams` are aligned to their elements. Ran on an NVIDIA H200; nothing here has run on AMD
// hardware.
#include "ds4q_fwht.h"
#include "ds4q_unpack.h"

#ifndef DS4Q_DECODER
#define DS4Q_DECODER 21
#endif
#define DECODE_THREADS 128

// One block's values of a rotated type: strides of 32 and more as far as this block has part in
// them, the others whole.
template <int DECODER>
DS4Q_FN void decode_rotated(const ds4q_u8* row, int block, const ds4q_tables& tables,
                            float* value) {
  int own = block % 8;
  ds4q_u32 apart[3] = {(ds4q_u32)(own & 4) << 29, (ds4q_u32)(own & 2) << 30,
                       (ds4q_u32)(own & 1) << 31};  // which take differences, by stride
  ds4q_codes codes[8];
  DS4Q_UNROLL
  for (int j = 0; j < 8; j++) codes[j] = ds4q_load_block<DECODER>(row, block - own + j);
  DS4Q_UNROLL
  for (int c = 0; c < DS4Q_BLOCK / 8; c++) {
    float part[8][8];
    DS4Q_UNROLL
    for (int j = 0; j < 8; j++) {
      ds4q_format<DECODER>::eight(codes[j].words, codes[j].bytes, tables, c, part[j]);
    }
    DS4Q_UNROLL
    for (int i = 0; i < 8; i++) {
      DS4Q_UNROLL
      for (int j = 0; j < 8; j++) part[j][i] = ds4q_signed(part[j][i], ds4q_signs_after(j), 8 * c + i);
      DS4Q_UNROLL
      for (int s = 0; s < 3; s++) {
        DS4Q_UNROLL
        for (int j = 0; j < 4 >> s; j++) {
          part[j][i] = part[j][i] + ds4q_float(ds4q_bits(part[j + (4 >> s)][i]) ^ apart[s]);
        }
      }
      value[8 * c + i] = part[0][i];
    }
  }
  DS4Q_UNROLL
  for (int stride = DS4Q_BLOCK / 2; stride > 0; stride /= 2) {
    DS4Q_UNROLL
    for (int i = 0; i < DS4Q_BLOCK; i++) {
      if (!(i & stride)) ds4q_butterfly(value[i], value[i + stride]);
    }
  }
  ds4q_u32 signs = ds4q_signs_before(own);
  DS4Q_UNROLL
  for (int i = 0; i < DS4Q_BLOCK; i++) {
    value[i] = ds4q_signed(value[i] * DS4Q_TURN_SCALE, signs, i);
  }
}

// One block's values. Each is one correctly rounded product, as in the codecs.
DS4Q_FN void decode_block(const ds4q_u8* row, int block, const ds4q_tables& tables, float* value) {
  using format = ds4q_format<DS4Q_DECODER>;
  if constexpr (format::ROTATED) return decode_rotated<DS4Q_DECODER>(row, block, tables, value);
  ds4q_codes codes = ds4q_load_block<DS4Q_DECODER>(row, block);
  float factor = ds4q_factor<DS4Q_DECODER>(row), level[DS4Q_BLOCK];
  ds4q_levels<DS4Q_DECODER>(codes, tables, level);
  DS4Q_UNROLL
  for (int i = 0; i < DS4Q_BLOCK; i++) {
    float scale = format::scale(codes.bytes, tables, format::HALVES ? i / 16 : 0);
    // A zero with a sign is +0 where the codec looks it up among whole numbers.
    float exact = format::SIGNED_ZERO ? level[i] : level[i] + 0.0f;
    // Exact but for the last product: a row's factor goes with a level, a type's with a scale, since
    // a book may hold levels at the end of the range.
    value[i] = format::HEADER ? exact * factor * scale : exact * (scale * factor);
  }
}

struct decode_place {  // which block a thread decodes
  const ds4q_u8* row;
  int block;
  ds4q_u64 first;  // the number of its first value
  bool inside;
};
DS4Q_FN decode_place decode_place_of(const ds4q_u8* data, int rows, int cols, int row_bytes) {
  ds4q_u64 blocks = (ds4q_u64)cols / DS4Q_BLOCK;
  ds4q_u64 number = (ds4q_u64)ds4q_block_x() * DECODE_THREADS + ds4q_thread();
  ds4q_u64 row = number / blocks;
  decode_place at = {data + row * (ds4q_u64)row_bytes, (int)(number % blocks), number * DS4Q_BLOCK,
                     row < (ds4q_u64)rows};
  return at;
}

DS4Q_KERNEL(decode_f32, DECODE_THREADS,
            (const ds4q_u8* data, const ds4q_books* books, float* out, int rows, int cols,
             int row_bytes)) {
  decode_place at = decode_place_of(data, rows, cols, row_bytes);
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(books);
  if (!at.inside) return;
  float value[DS4Q_BLOCK];
  decode_block(at.row, at.block, tables, value);
  DS4Q_UNROLL
  for (int i = 0; i < DS4Q_BLOCK; i++) out[at.first + i] = value[i];
}

DS4Q_KERNEL(decode_f16, DECODE_THREADS,
            (const ds4q_u8* data, const ds4q_books* books, ds4q_u16* out, int rows, int cols,
             int row_bytes)) {
  decode_place at = decode_place_of(data, rows, cols, row_bytes);
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(books);
  if (!at.inside) return;
  float value[DS4Q_BLOCK];
  decode_block(at.row, at.block, tables, value);
  DS4Q_UNROLL
  for (int i = 0; i < DS4Q_BLOCK; i++) out[at.first + i] = ds4q_to_half(value[i]);
}

DS4Q_KERNEL(embed, DECODE_THREADS,
            (const ds4q_matrix* m, const int* ids, float* streams, int n_streams)) {
  int block = (int)(ds4q_block_x() * DECODE_THREADS + ds4q_thread()), token = (int)ds4q_block_y();
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(m->books);
  if (block >= m->cols / DS4Q_BLOCK) return;
  float value[DS4Q_BLOCK];
  decode_block(m->data + (ds4q_u64)ids[token] * (ds4q_u64)m->row_bytes, block,
               tables, value);
  for (int s = 0; s < n_streams; s++) {
    float* to = streams + ((ds4q_u64)token * n_streams + s) * m->cols + (ds4q_u64)block * DS4Q_BLOCK;
    DS4Q_UNROLL
    for (int i = 0; i < DS4Q_BLOCK; i++) to[i] = value[i];
  }
}
