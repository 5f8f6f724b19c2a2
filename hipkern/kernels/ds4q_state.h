// Owns what a step and its sequences tell the kernels through device memory: where each token
// stands, and where a layer keeps the rows of its sequence. No arithmetic but rounding rows that are
// kept.
//
// All of it lies at addresses that never change; the contents are replaced between launches. A
// captured graph therefore holds nothing that a later step, a grown cache or another sequence
// changes. The tokens of a step may be those of several sequences, each sequence's in one run.
#pragma once

#include "ds4q_dense.h"

#ifndef DS4Q_KV_TYPE  // how window rows and compressed entries are kept: 0 f32, 1 f16, 2 bf16
#define DS4Q_KV_TYPE 0
#endif

#if DS4Q_KV_TYPE == 0
typedef float ds4q_kept;
DS4Q_FN ds4q_kept ds4q_rounded(float x) { return x; }
#else
typedef ds4q_u16 ds4q_kept;
DS4Q_FN ds4q_kept ds4q_rounded(float x) {  // to nearest, ties to even
#if DS4Q_KV_TYPE == 1
  return ds4q_to_half(x);
#else
  ds4q_u32 bits = ds4q_bits(x);
  if (x != x) return (ds4q_u16)(bits >> 16 | 0x40);  // stays NaN
  return (ds4q_u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
DS4Q_FN float ds4q_widened(ds4q_kept bits) {
#if DS4Q_KV_TYPE == 1
  return ds4q_half(bits);
#else
  return ds4q_float((ds4q_u32)bits << 16);
#endif
}
struct alignas(8) ds4q_kept4 {  // moved by one 64-bit access
  ds4q_kept v[4];
};
#endif

struct ds4q_token {  // one of a step
  int position;  // in its sequence
  int row;       // in the step, of the first token of its sequence
  int states;    // from a pointer to the first sequence's layer state to that of this one's
  int spare;
};

struct ds4q_layer_state {
  ds4q_kept* window;     // ring [window_rows][D]: the row of position p in slot p % window_rows
  float* values;         // rings [ring_rows][C] by position, C = 2 D at ratio 4, else D
  float* gates;          // with the place's addend in
  ds4q_kept* entries;    // [capacity][D]
  float* index_values;   // the indexer's, alike
  float* index_gates;
  float* index_entries;  // [capacity][index width]
  int window_rows;       // >= reach - 1 + T
  int ring_rows;         // >= ratio + T; >= 2 ratio + T at ratio 4
  int index_ring_rows;
  int capacity;          // entries that fit
};

static_assert(sizeof(ds4q_token) == 16 && sizeof(ds4q_layer_state) == 72, "packed by the host");
