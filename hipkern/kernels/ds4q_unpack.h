// Owns how packed weights are read: matrices, books of levels, and the 32 weights of a block of
// each tensor type. Sums and loops are the kernels' own (ds4q_dot.h).
//
// A weight's value is level * scale, and all rows of a matrix share one layout:
//
//   decoder                     block     scales                         levels
//   1 F16, 2 F32, 16 BF16       64/128 B  none                           the weights themselves
//   3 Q8F16                     34 B      f16 in bytes 0-1               int8 from byte 2 on
//   19 MQ2G256Lloyd             8 B       none                           2 bits, through four f16
//                                         in front of eight blocks; rotated (ds4q_fwht.h)
//   21 HFP4G32                  17 B      E8M0 in byte 0; times the row's f16 header (16 bytes)
//   100 / 101 ROCmFP4, Fast     18/17 B   UE4M3 in bytes 16, 17 / 16     nibbles j and j + 16
//   102 / 358 ROCmFP6           26 B      UE4M3 in bytes 24, 25          6 bits; 358: code 32 = -32
//   103 ROCmFP8                 33 B      UE4M3 in byte 32               int8
//   104 ROCmFP3 (also 105)      14 B      UE4M3 in bytes 12, 13          3 bits, through books
//   106 ROCmFP2 (107 but affine) 10 B     UE4M3 in bytes 8, 9            2 bits, through books
//   363 ROCmFP2 affine          10 B      code * byte 8 - byte 9         exact in f32
#pragma once
#include "ds4q_dev.h"

struct ds4q_books {  // levels of decoders 104 and 106, bf16
  ds4q_u32 select;   // 1: bit 7 of a scale byte chooses the book; 0: a byte above 0x7e is scale 0
  ds4q_u32 spare;
  ds4q_u16 levels[2][8];
};
struct ds4q_matrix {
  const ds4q_u8* data;  // rows, with >= 3 readable bytes before them and after; null: absent
  const ds4q_books* books;
  int decoder, rows, cols, row_bytes, spare0, spare1;
};
struct ds4q_job {  // y[t * y_stride + row] = row . x[t * x_stride ...]
  ds4q_matrix w;
  const float* x;
  float* y;
  int x_stride, y_stride, first_block, block_rows;
};
static_assert(sizeof(ds4q_books) == 40 && sizeof(ds4q_matrix) == 40 && sizeof(ds4q_job) == 72, "");

#define DS4Q_BLOCK 32  // weights of a block

// ---- words and bytes of a block ------------------------------------------------------------------
#if defined(DS4Q_SIM)
#define DS4Q_ROLLED  // a loop that would crowd the instruction cache
#else
#define DS4Q_ROLLED _Pragma("unroll 1")
#endif

// `BYTES` bytes from any address on. The words that hold them are read whole: up to three bytes
// before the first and after the last, which a matrix has.
template <int BYTES>
DS4Q_FN void ds4q_load_words(const ds4q_u8* at, ds4q_u32* words) {
  int before = (int)((ds4q_u64)at & 3);
  const ds4q_u32* from = (const ds4q_u32*)(at - before);
  ds4q_u32 low = from[0];
  DS4Q_UNROLL
  for (int i = 0; i < (BYTES + 3) / 4; i++) {
    ds4q_u32 high = 4 * (i + 1) < before + BYTES ? from[i + 1] : 0;
    words[i] = (ds4q_u32)(((ds4q_u64)high << 32 | low) >> 8 * before);
    low = high;
  }
}
DS4Q_FN ds4q_u32 ds4q_word(const ds4q_u32* words, int at) {  // the four bytes from byte `at` on
  ds4q_u32 low = words[at / 4], shift = (ds4q_u32)at % 4 * 8;
  return shift == 0 ? low : (low >> shift) | (words[at / 4 + 1] << (32 - shift));
}

// ---- scales --------------------------------------------------------------------------------------
DS4Q_FN float ds4q_e8m0(ds4q_u32 byte) {  // 2^(byte - 127); byte 0 is subnormal, 255 NaN
  return ds4q_float((byte << 23) | (byte == 0 || byte == 255 ? 0x00400000u : 0u));
}
// 2^-7 UE4M3: the byte's bits are those of an f16 of that value. Bytes above 0x7e are invalid: 0.
DS4Q_FN float ds4q_ue4m3(ds4q_u32 byte) {
  return ds4q_half((ds4q_u16)(byte < 0x7f ? byte << 7 : 0));
}
#define DS4Q_UE4M3 128.0f  // what is still to be multiplied

// ---- levels --------------------------------------------------------------------------------------
struct ds4q_tables {  // books, their low and their high bytes apart, as ds4q_bytes looks them up
  ds4q_u32 scale_bits;  // of a scale byte that chooses a book
  ds4q_u32 low[2][2], high[2][2];
};
// Instead of books, the high bytes of eight f16, two words.
DS4Q_FN ds4q_tables ds4q_fixed_tables(ds4q_u32 low, ds4q_u32 high) {
  ds4q_tables t = {};
  t.low[0][0] = ds4q_keep(low), t.low[0][1] = high;
  return t;
}
DS4Q_FN ds4q_tables ds4q_load_tables(const ds4q_books* books) {
  ds4q_tables t;
  t.scale_bits = books->select ? 0x7f : 0xff;
  for (int b = 0; b < 2; b++) {
    const ds4q_u32* pairs = (const ds4q_u32*)books->levels[b];
    for (int i = 0; i < 2; i++) {
      t.low[b][i] = ds4q_bytes(pairs[2 * i], pairs[2 * i + 1], 0x6420);
      t.high[b][i] = ds4q_bytes(pairs[2 * i], pairs[2 * i + 1], 0x7531);
    }
  }
  return t;
}

// Two f16 whose high bytes are bytes 0 and 1, or 2 and 3, of `bytes`.
DS4Q_FN void ds4q_half_pair(ds4q_u32 pair, float* a, float* b) {
  *a = ds4q_half((ds4q_u16)pair);
  *b = ds4q_half((ds4q_u16)(pair >> 16));
}
// Eight 4-bit floats, whose magnitudes are f16 of which only the high byte is not zero: those of the
// tables. Nibble i gives value i.
DS4Q_FN void ds4q_fp4(ds4q_u32 word, const ds4q_tables& t, float* value) {
  ds4q_u32 low = t.low[0][0], high = t.low[0][1];
  ds4q_u32 magnitude = word & 0x77777777u;
  ds4q_u32 even = word << 4;  // the signs of even nibbles, on top of their bytes
  ds4q_u32 a = ds4q_bytes(low, high, magnitude);
  a |= ds4q_bytes(even, word, 0x5140) & 0x80808080u;
  ds4q_u32 b = ds4q_bytes(low, high, magnitude >> 16);
  b |= ds4q_bytes(even, word, 0x7362) & 0x80808080u;
  ds4q_half_pair(ds4q_bytes(a, 0, 0x1404), value, value + 1);
  ds4q_half_pair(ds4q_bytes(a, 0, 0x3424), value + 2, value + 3);
  ds4q_half_pair(ds4q_bytes(b, 0, 0x1404), value + 4, value + 5);
  ds4q_half_pair(ds4q_bytes(b, 0, 0x3424), value + 6, value + 7);
}
// Four bf16 levels: nibble i of `codes` chooses value[i]'s from a book.
DS4Q_FN void ds4q_look_up(const ds4q_u32* low, const ds4q_u32* high, ds4q_u32 codes, float* value) {
  ds4q_u32 l = ds4q_bytes(low[0], low[1], codes), h = ds4q_bytes(high[0], high[1], codes);
  ds4q_u32 a = ds4q_bytes(l, h, 0x5140), b = ds4q_bytes(l, h, 0x7362);
  value[0] = ds4q_float(a << 16);
  value[1] = ds4q_float(a & 0xffff0000u);
  value[2] = ds4q_float(b << 16);
  value[3] = ds4q_float(b & 0xffff0000u);
}
// Four signed bytes: a byte plus 128 is the mantissa of a float of 2^23.
DS4Q_FN void ds4q_int8(ds4q_u32 word, float* value) {
  ds4q_u32 shifted = word ^ 0x80808080u;
  DS4Q_UNROLL
  for (int i = 0; i < 4; i++) {
    value[i] = ds4q_float(ds4q_bytes(shifted, 0x4b000000u, 0x7440u + i)) - 8388736.0f;
  }
}

// ---- formats -------------------------------------------------------------------------------------
// A format tells: BLOCK_BYTES; HEADER bytes before a row's blocks; in a block CODE_BYTES from byte
// CODES on, and SCALES scale bytes from byte SCALE on; HALVES, whether weights 0-15 and 16-31 are
// summed apart, each with its scale; BOOKS; SIGNED_ZERO, whether a negative zero level is one;
// HEAD bytes of levels in front of each group of eight blocks, which stand behind the codes' words,
// and whose share BLOCK_BYTES includes; ROTATED, whether activations must be rotated.
// `eight` gives eight levels: those of weights 8 c to 8 c + 7, or where SPLIT, of weights 4 c to
// 4 c + 3 and 16 + 4 c to 19 + 4 c. `scale` gives the scale of half h, `factor` what a row's sum is
// still to be multiplied with, from the row's first two bytes.
template <int DECODER>
struct ds4q_format;

struct ds4q_plain {  // what most formats have
  static constexpr int HEADER = 0, CODES = 0;
  static constexpr int HEAD = 0;
  static constexpr bool HALVES = false, BOOKS = false, SIGNED_ZERO = true, SPLIT = false;
  static constexpr bool ROTATED = false;
  static DS4Q_FN float factor(ds4q_u32 head) { return 1.0f; }
  static DS4Q_FN ds4q_tables tables(const ds4q_books* books) { return ds4q_tables{}; }
};
template <int BITS, int SCALE_BYTES>
struct ds4q_rocmfpx : ds4q_plain {  // codes, then scale bytes
  static constexpr int CODE_BYTES = 4 * BITS, SCALE = CODE_BYTES, SCALES = SCALE_BYTES;
  static constexpr int BLOCK_BYTES = CODE_BYTES + SCALES;
  static constexpr bool HALVES = SCALES == 2;
  static DS4Q_FN float factor(ds4q_u32 head) { return DS4Q_UE4M3; }
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) {
    return ds4q_ue4m3(bytes[h]);
  }
};

template <int BYTES>
struct ds4q_wide : ds4q_plain {  // weights are levels alone
  static constexpr int BLOCK_BYTES = 32 * BYTES, CODE_BYTES = BLOCK_BYTES, SCALE = 0, SCALES = 0;
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) { return 1.0f; }
};
template <>
struct ds4q_format<1> : ds4q_wide<2> {  // F16
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) ds4q_half_pair(codes[4 * c + i], level + 2 * i, level + 2 * i + 1);
  }
};
template <>
struct ds4q_format<2> : ds4q_wide<4> {  // F32
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    DS4Q_UNROLL
    for (int i = 0; i < 8; i++) level[i] = ds4q_float(codes[8 * c + i]);
  }
};
template <>
struct ds4q_format<16> : ds4q_wide<2> {  // BF16
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {
      level[2 * i] = ds4q_float(codes[4 * c + i] << 16);
      level[2 * i + 1] = ds4q_float(codes[4 * c + i] & 0xffff0000u);
    }
  }
};
template <>
struct ds4q_format<3> : ds4q_plain {  // Q8F16
  static constexpr int BLOCK_BYTES = 34, CODES = 2, CODE_BYTES = 32, SCALE = 0, SCALES = 2;
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) {
    return ds4q_half((ds4q_u16)(bytes[0] | (bytes[1] << 8)));
  }
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    ds4q_int8(codes[2 * c], level);
    ds4q_int8(codes[2 * c + 1], level + 4);
  }
};
template <>
struct ds4q_format<19> : ds4q_plain {  // MQ2G256Lloyd: words 2 and 3 hold the four levels
  static constexpr int BLOCK_BYTES = 9, CODE_BYTES = 8, SCALE = 0, SCALES = 0, HEAD = 8;
  static constexpr bool ROTATED = true;
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) { return 1.0f; }
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    ds4q_u32 low = ds4q_bytes(codes[2], codes[3], 0x6420);
    ds4q_u32 high = ds4q_bytes(codes[2], codes[3], 0x7531);
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {  // a code and 4 more give both bytes of its level
      ds4q_u32 both = ((codes[c / 2] >> 2 * i) & 0x03030303u) * 0x11u + 0x40404040u;
      ds4q_half_pair(ds4q_bytes(low, high, both >> c % 2 * 16), level + i, level + i + 4);
    }
  }
};
template <>
struct ds4q_format<21> : ds4q_plain {  // HFP4G32
  static constexpr int BLOCK_BYTES = 17, HEADER = 16, CODES = 1, CODE_BYTES = 16;
  static constexpr int SCALE = 0, SCALES = 1;
  static DS4Q_FN float factor(ds4q_u32 head) { return ds4q_half((ds4q_u16)head); }
  static DS4Q_FN ds4q_tables tables(const ds4q_books* books) {
    return ds4q_fixed_tables(0x3e3c3800u, 0x46444240u);
  }
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) {
    return ds4q_e8m0(bytes[0]);
  }
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    ds4q_fp4(codes[c], t, level);
  }
};

template <int SCALE_BYTES>
struct ds4q_rocmfp4 : ds4q_rocmfpx<4, SCALE_BYTES> {  // nibbles j and j + 16 share a byte
  static constexpr bool HALVES = true, SIGNED_ZERO = false, SPLIT = true;
  static DS4Q_FN ds4q_tables tables(const ds4q_books* books) {
    return ds4q_fixed_tables(0x42403c00u, 0x49484644u);
  }
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) {
    return ds4q_ue4m3(bytes[SCALE_BYTES == 2 ? h : 0]);
  }
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    float mixed[8];
    ds4q_fp4(codes[c], t, mixed);
    DS4Q_UNROLL
    for (int i = 0; i < 8; i++) level[i] = mixed[i % 4 * 2 + i / 4];
  }
};
template <>
struct ds4q_format<100> : ds4q_rocmfp4<2> {};  // ROCmFP4
template <>
struct ds4q_format<101> : ds4q_rocmfp4<1> {};  // ROCmFP4Fast

// Four codes of 6 bits lie in 24: sign above a magnitude, which is a mantissa of a float of 2^23.
template <bool NEG32>
struct ds4q_rocmfp6 : ds4q_rocmfpx<6, 2> {
  static constexpr bool SIGNED_ZERO = false;
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    DS4Q_UNROLL
    for (int i = 0; i < 2; i++) {
      int at = 6 * c + 3 * i;  // its first byte
      ds4q_u32 four = at % 4 == 1 ? codes[at / 4] >> 8 : ds4q_word(codes, at);
      DS4Q_UNROLL
      for (int j = 0; j < 4; j++) {
        ds4q_u32 code = four >> (6 * j);
        ds4q_u32 sign = (code << 26) & 0x80000000u;
        float magnitude = ds4q_float((code & 31) | 0x4b000000u) - 8388608.0f;
        if (NEG32) magnitude = (code & 63) == 32 ? 32.0f : magnitude;
        level[4 * i + j] = ds4q_float(ds4q_bits(magnitude) | sign);
      }
    }
  }
};
template <>
struct ds4q_format<102> : ds4q_rocmfp6<false> {};  // code 32 is zero
template <>
struct ds4q_format<358> : ds4q_rocmfp6<true> {};  // code 32 is -32
template <>
struct ds4q_format<103> : ds4q_rocmfpx<8, 1> {  // ROCmFP8
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    ds4q_int8(codes[2 * c], level);
    ds4q_int8(codes[2 * c + 1], level + 4);
  }
};

template <int BITS>
struct ds4q_booked : ds4q_rocmfpx<BITS, 2> {  // bit 7 of a scale byte chooses the book
  static constexpr bool BOOKS = true;
  static DS4Q_FN ds4q_tables tables(const ds4q_books* books) { return ds4q_load_tables(books); }
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) {
    return ds4q_ue4m3(bytes[h] & t.scale_bits);
  }
};
// Codes of 3 bits, four in 12 bits of each half of `fields`, brought to nibbles.
DS4Q_FN ds4q_u32 ds4q_spread3(ds4q_u32 fields) {
  ds4q_u32 pairs = (fields & 0x0fc00fc0u) * 4 + (fields & 0x003f003fu);
  return pairs + (pairs & 0x38383838u);
}
template <>
struct ds4q_format<104> : ds4q_booked<3> {  // ROCmFP3, ROCmFP3Mix
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    int h = c / 2, shift = c % 2 * 16;
    bool upper = bytes[h] & 0x80;
    ds4q_u32 low[2] = {upper ? t.low[1][0] : t.low[0][0], upper ? t.low[1][1] : t.low[0][1]};
    ds4q_u32 high[2] = {upper ? t.high[1][0] : t.high[0][0], upper ? t.high[1][1] : t.high[0][1]};
    // Bits 0 and 24 of a half begin codes 0 and 8; bits 12 and 36, codes 4 and 12.
    ds4q_u32 even = ds4q_bytes(codes[h], codes[h + 1], h ? 0x6532 : 0x4310);
    ds4q_u32 odd = ds4q_bytes(codes[h], codes[h + 1], h ? 0x7643 : 0x5421) >> 4;
    ds4q_look_up(low, high, ds4q_spread3(even) >> shift, level);
    ds4q_look_up(low, high, ds4q_spread3(odd) >> shift, level + 4);
  }
};
template <>
struct ds4q_format<106> : ds4q_booked<2> {  // ROCmFP2Mix, ROCmFP2 dual, s40 and sign
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    int h = c / 2, shift = c % 2 * 16;
    bool upper = bytes[h] & 0x80;
    ds4q_u32 low = upper ? t.low[1][0] : t.low[0][0], high = upper ? t.high[1][0] : t.high[0][0];
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) {  // a code and 4 more give both bytes of its level
      ds4q_u32 both = ((codes[h] >> 2 * i) & 0x03030303u) * 0x11u + 0x40404040u;
      ds4q_u32 pair = ds4q_bytes(low, high, both >> shift);  // of codes i and i + 4
      level[i] = ds4q_float(pair << 16);
      level[i + 4] = ds4q_float(pair & 0xffff0000u);
    }
  }
};
template <>
struct ds4q_format<363> : ds4q_rocmfpx<2, 2> {  // ROCmFP2 affine: levels are the values
  static constexpr bool HALVES = false;
  static DS4Q_FN float factor(ds4q_u32 head) { return 1.0f; }
  static DS4Q_FN float scale(const ds4q_u32* bytes, const ds4q_tables& t, int h) { return 1.0f; }
  static DS4Q_FN void eight(const ds4q_u32* codes, const ds4q_u32* bytes, const ds4q_tables& t,
                            int c, float* level) {
    float step = ds4q_ue4m3(bytes[0]) * DS4Q_UE4M3, offset = ds4q_ue4m3(bytes[1]) * DS4Q_UE4M3;
    DS4Q_UNROLL
    for (int i = 0; i < 8; i++) {
      ds4q_u32 code = (codes[c / 2] >> (c % 2 * 16 + 2 * i)) & 3;
      level[i] = (ds4q_float(code | 0x4b000000u) - 8388608.0f) * step - offset;
    }
  }
};

// Where weight 4 i of eight levels c stands in its block.
template <int DECODER>
DS4Q_FN int ds4q_place(int c, int i) {
  return ds4q_format<DECODER>::SPLIT ? 4 * c + 16 * i : 8 * c + 4 * i;
}

DS4Q_FN bool ds4q_is_rotated(int decoder) { return decoder == 19; }
static_assert(ds4q_format<19>::ROTATED, "");

struct ds4q_codes {  // a block in registers
  ds4q_u32 words[32], bytes[2];
};
// Block `number` of a row at any address.
template <int DECODER>
DS4Q_FN ds4q_codes ds4q_load_block(const ds4q_u8* row, int number) {
  using format = ds4q_format<DECODER>;
  ds4q_codes codes;
  if constexpr (format::HEAD != 0) {
    const ds4q_u8* group = row + (ds4q_u64)(number / 8) * (8 * format::BLOCK_BYTES);
    ds4q_load_words<format::CODE_BYTES>(group + format::HEAD + number % 8 * format::CODE_BYTES,
                                        codes.words);
    ds4q_load_words<format::HEAD>(group, codes.words + format::CODE_BYTES / 4);
  } else {
    const ds4q_u8* block = row + format::HEADER + (ds4q_u64)number * format::BLOCK_BYTES;
    ds4q_load_words<format::CODE_BYTES>(block + format::CODES, codes.words);
    DS4Q_UNROLL
    for (int i = 0; i < format::SCALES; i++) codes.bytes[i] = block[format::SCALE + i];
  }
  return codes;
}

// The 32 levels of a block, in order.
template <int DECODER>
DS4Q_FN void ds4q_levels(const ds4q_codes& codes, const ds4q_tables& tables, float* level) {
  DS4Q_UNROLL
  for (int c = 0; c < DS4Q_BLOCK / 8; c++) {
    float eight[8];
    ds4q_format<DECODER>::eight(codes.words, codes.bytes, tables, c, eight);
    DS4Q_UNROLL
    for (int i = 0; i < 8; i++) level[ds4q_place<DECODER>(c, i / 4) + i % 4] = eight[i];
  }
}

// What a row's sum is still to be multiplied with. The row may begin anywhere.
template <int DECODER>
DS4Q_FN float ds4q_factor(const ds4q_u8* row) {
  ds4q_u32 head = 0;
  if constexpr (ds4q_format<DECODER>::HEADER != 0) head = row[0] | (row[1] << 8);
  return ds4q_format<DECODER>::factor(head);
}
