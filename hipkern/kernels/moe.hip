// Owns a layer's experts: gate, up and SwiGLU of the chosen ones, and the weighted sum of their downs.
#include "ds4q_dot.h"

#ifndef DS4Q_GATE  // decoder of the routed experts' gate and up; 0: looked up for each matrix
#define DS4Q_GATE 21
#endif
#ifndef DS4Q_DOWN
#define DS4Q_DOWN 21
#endif
#ifndef DS4Q_SHARED_EXPERT  // of the shared expert's three
#define DS4Q_SHARED_EXPERT 16
#endif
#define MOE_THREADS 128
#define MOE_ROWS 8  // rows that a block takes

template <int DECODER>
DS4Q_FN float moe_row(const ds4q_matrix& w, int row, const float* x) {
  float y;
  if constexpr (DECODER != 0) {
    ds4q_row<DECODER, 1>(w, ds4q_tables_of<DECODER>(w.books), row, x, 0, 1, &y);
  } else {
    switch (w.decoder) {
      case 1: return moe_row<1>(w, row, x);
      case 2: return moe_row<2>(w, row, x);
      case 3: return moe_row<3>(w, row, x);
      case 16: return moe_row<16>(w, row, x);
      case 21: return moe_row<21>(w, row, x);
      case 100: return moe_row<100>(w, row, x);
      case 101: return moe_row<101>(w, row, x);
      case 102: return moe_row<102>(w, row, x);
      case 103: return moe_row<103>(w, row, x);
      case 104: return moe_row<104>(w, row, x);
      case 106: return moe_row<106>(w, row, x);
      case 358: return moe_row<358>(w, row, x);
      case 363: return moe_row<363>(w, row, x);
    }
    y = ds4q_float(0x7fc00000u);  // no such decoder: NaN, which no caller can miss
  }
  return y;
}

DS4Q_FN float moe_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + ds4q_exp(-gate)) * up;
}

DS4Q_KERNEL(moe_gate_up, MOE_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids, const float* x,
             float* hidden, float limit, int k, int tokens)) {
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  const ds4q_matrix* trio = shared;
  if (slot == k && !shared) return;
  if (slot < k) {
    int id = ids[token * k + slot];
    trio = id < 0 ? nullptr : experts + 3 * (ds4q_u64)id;
  }
  const ds4q_matrix* shape = trio ? trio : experts;
  int width = shape->rows;
  for (int i = (int)ds4q_thread() / DS4Q_LANES; i < MOE_ROWS; i += MOE_THREADS / DS4Q_LANES) {
    int row = (int)ds4q_block_x() * MOE_ROWS + i;
    if (row >= width) break;
    float value = 0.0f;
    if (trio) {
      const float* from = x + (ds4q_u64)token * shape->cols;
      float g = slot < k ? moe_row<DS4Q_GATE>(trio[0], row, from)
                         : moe_row<DS4Q_SHARED_EXPERT>(trio[0], row, from);
      float u = slot < k ? moe_row<DS4Q_GATE>(trio[1], row, from)
                         : moe_row<DS4Q_SHARED_EXPERT>(trio[1], row, from);
      value = moe_swiglu(g, u, limit);
    }
    if (ds4q_lane() == 0) hidden[((ds4q_u64)token * (k + 1) + slot) * width + row] = value;
  }
}

DS4Q_KERNEL(moe_down, MOE_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
             const float* weights, const float* hidden, float* routed, float* out, int k,
             int tokens)) {
  int token = (int)ds4q_block_y();
  int rows = experts[2].rows, width = experts[2].cols;
  for (int i = (int)ds4q_thread() / DS4Q_LANES; i < MOE_ROWS; i += MOE_THREADS / DS4Q_LANES) {
    int row = (int)ds4q_block_x() * MOE_ROWS + i;
    if (row >= rows) break;
    const float* from = hidden + (ds4q_u64)token * (k + 1) * width;
    float sum = 0.0f;
    for (int slot = 0; slot < k; slot++) {
      int id = ids[token * k + slot];
      if (id < 0) continue;
      float y = moe_row<DS4Q_DOWN>(experts[3 * (ds4q_u64)id + 2], row, from + (ds4q_u64)slot * width);
      sum = ds4q_fma(weights[token * k + slot], y, sum);
    }
    float total = sum;
    if (shared) total += moe_row<DS4Q_SHARED_EXPERT>(shared[2], row, from + (ds4q_u64)k * width);
    if (ds4q_lane() == 0) {
      if (routed) routed[(ds4q_u64)token * rows + row] = sum;
      out[(ds4q_u64)token * rows + row] = total;
    }
  }
}
