// Owns what a step and a sequence tell the kernels through device memory: the position of the step,
// and where a layer keeps its rows. No arithmetic.
//
// Both structs lie at addresses that never change; their contents are replaced between launches. A
// captured graph therefore holds nothing that a later step, a grown cache or another sequence
// changes.
#pragma once

#include "ds4q_dev.h"

struct ds4q_step {
  int first;   // position of the batch's token 0
  int tokens;  // T
  int spare[2];
};

struct ds4q_layer_state {
  float* window;         // ring [window_rows][D]: the row of position p in slot p % window_rows
  float* values;         // rings [ring_rows][C] by position, C = 2 D at ratio 4, else D
  float* gates;          // with the place's addend in
  float* entries;        // [capacity][D]
  float* index_values;   // the indexer's, alike
  float* index_gates;
  float* index_entries;  // [capacity][index width]
  int window_rows;       // >= reach - 1 + T
  int ring_rows;         // >= ratio + T; >= 2 ratio + T at ratio 4
  int index_ring_rows;
  int capacity;          // entries that fit
};

static_assert(sizeof(ds4q_step) == 16 && sizeof(ds4q_layer_state) == 72, "packed by the host");
