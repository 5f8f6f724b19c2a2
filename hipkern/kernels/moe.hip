// Owns a layer's experts: gate, up and SwiGLU of the chosen ones and of the shared one, and their
// weighted downs. Not: who is chosen (route.hip), and the sum over a token's experts (hyper.hip).
//
// Built for the decoders of the routed experts' gate and up (DS4Q_GATE), of their down (DS4Q_DOWN)
// and of the shared expert's three (DS4Q_SHARED_EXPERT); 0: each matrix says its own, with the same
// bits. experts [E][gate, up, down], all of one shape; shared [3] or null; ids [T][k], -1: no expert,
// less: another launch's, which leaves what it has there; k <= 31. A grid of k in place of k + 1 leaves
// the shared expert's alone, too. Activations are 16-byte aligned, rows of weights lie anywhere. Sums
// as ds4q_dot.h defines.
//
// moe_gate_up: grid (ceil(width / 24), k + 1, T), block 192, LDS 47616 or 0. A block shares the width's
//   rows with the others of its slot. hidden [T][k + 1][width] = silu(min(g, limit)) *
//   clamp(u, -limit, limit), zeros where there is no expert; slot k is the shared one, left alone if
//   there is none. silu(g) = g / (1 + ds4q_exp(-g)).
//   Matrices of a rotated type read `rotated`, what rotate.hip makes of x; else it may be anything.
// moe_down: grid (ceil(d / 48), k + 1, T), block 192, LDS 47616 or 0. parts [T][k + 1][d]: the slots' downs
//   times their weights, the shared expert's times 1; zeros where there is no expert.
//   hyper.hip sums them. rotate.hip has been at the hidden rows of downs of a rotated type.
//
// Measured on an NVIDIA H200 (device copy 4.28 TB/s), top-6 of 256 experts, d 4096, width 2048, no
// shared expert, graph replays over all experts: gate and up 26.9 us in HFP4G32 (47 % of the copy),
// 31.1 us in 104 (33 %), 26.9 us in 106 (27 %); down 15.6, 17.7 and 15.1 us (41, 29 and 24 %); in 19
// 22.7 us (29 %) and 12.8 us (26 %). What they issue bounds them, not what they move. Nothing here
// has run on AMD hardware.
#include "ds4q_rows.h"

#ifndef DS4Q_GATE  // decoder of the routed experts' gate and up; 0: each matrix says its own
#define DS4Q_GATE 21
#endif
#ifndef DS4Q_DOWN
#define DS4Q_DOWN 21
#endif
#ifndef DS4Q_SHARED_EXPERT  // of the shared expert's three
#define DS4Q_SHARED_EXPERT 16
#endif
#define MOE_RESIDENT 4

DS4Q_FN float moe_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + ds4q_exp(-gate)) * up;
}

// Calls `act` with a constant decoder: DECODER, or where that is 0, what the matrix says.
template <int DECODER>
struct moe_constant {
  static constexpr int value = DECODER;
};
template <int DECODER, class ACT>
DS4Q_FN void moe_with_decoder(int decoder, ACT act) {
  if constexpr (DECODER != 0) {
    act(moe_constant<DECODER>());
  } else {
    switch (decoder) {
      case 1: return act(moe_constant<1>());
      case 2: return act(moe_constant<2>());
      case 3: return act(moe_constant<3>());
      case 16: return act(moe_constant<16>());
      case 19: return act(moe_constant<19>());
      case 21: return act(moe_constant<21>());
      case 100: return act(moe_constant<100>());
      case 101: return act(moe_constant<101>());
      case 102: return act(moe_constant<102>());
      case 103: return act(moe_constant<103>());
      case 104: return act(moe_constant<104>());
      case 106: return act(moe_constant<106>());
      case 358: return act(moe_constant<358>());
      case 363: return act(moe_constant<363>());
    }
  }
}

struct moe_run {  // the rows of a group
  int first, rows;
};
DS4Q_FN moe_run moe_run_of(int rows) {  // the grid's blocks share them evenly
  int groups = (int)ds4q_blocks_x() * DS4Q_GROUPS, own = (rows + groups - 1) / groups;
  int first = ((int)ds4q_block_x() * DS4Q_GROUPS + (int)ds4q_thread() / DS4Q_LANES) * own;
  own = ds4q_least(own, rows - first);
  return {first, own > 0 ? own : 0};
}

// A group's hidden values, `rows` <= 32 of them from row `first` on. Lane r gets the sums of row r.
template <int DECODER>
DS4Q_FN void moe_hidden(const ds4q_matrix& gate, const ds4q_matrix& up, int first, int rows,
                        const float* x, float* hidden, float limit, ds4q_u8* shared) {
  const ds4q_matrix w = gate;
  ds4q_u64 skip = (ds4q_u64)first * w.row_bytes;
  const ds4q_u8 *gates = w.data + skip, *ups = up.data + skip;
  ds4q_tables tables[2] = {ds4q_format<DECODER>::tables(w.books),
                           ds4q_format<DECODER>::tables(up.books)};
  ds4q_u64 apart = (ds4q_u64)ups - (ds4q_u64)gates;  // pointers chosen between cost scratch
  float g = 0.0f, u = 0.0f;
  int r = 0, lane = (int)ds4q_lane();
  if (ds4q_streams<DECODER>(w, (ds4q_u64)w.data | (ds4q_u64)up.data)) {
    if constexpr (ds4q_is_wide<DECODER>) {
      r = rows;
      ds4q_wide_rows<DECODER>(
          [&](int i) { return gates + (i & 1) * apart + (ds4q_u64)(i / 2) * w.row_bytes; },
          2 * rows, w.cols, x, [&](int i, float total) {
            float sum = ds4q_group_sum(total);
            g = lane == i / 2 && i % 2 == 0 ? sum : g;
            u = lane == i / 2 && i % 2 == 1 ? sum : u;
          });
    } else {
      constexpr int STREAMS = ds4q_window<DECODER>::STREAMS;
      ds4q_shape s = ds4q_shape_of(w);
      int windows = ds4q_windows(s, rows / s.rows * 2);
      r = windows / 2 * s.rows;
      ds4q_packed_rows<DECODER>(
          [&](int i) {
            return gates + (i & 1) * apart + (ds4q_u64)(i / 2 * s.rows) * w.row_bytes;
          },
          tables, s, windows, x, ds4q_memory_of(shared),
          [&](int i, int, const float* totals, const float* factors) {
            DS4Q_UNROLL
            for (int j = 0; j < STREAMS; j++) {
              float sum = ds4q_window_sum(s, totals[j]) * factors[j];
              float moved = ds4q_gather(s, sum, i / 2 * s.rows);
              bool here = lane / s.rows == i / 2;
              g = here && (i + j) % 2 == 0 ? moved : g;
              u = here && (i + j) % 2 == 1 ? moved : u;
            }
          });
    }
  }
  for (; r < rows; r++) {  // what is not streamed
    float total;
    const ds4q_u8* row = gates + (ds4q_u64)r * w.row_bytes;
    ds4q_any_row<DECODER, 1>(row, w.cols, tables[0], x, 0, 1, &total);
    float sum = ds4q_group_sum(total) * ds4q_factor<DECODER>(row);
    g = lane == r ? sum : g;
    row = ups + (ds4q_u64)r * w.row_bytes;
    ds4q_any_row<DECODER, 1>(row, w.cols, tables[1], x, 0, 1, &total);
    sum = ds4q_group_sum(total) * ds4q_factor<DECODER>(row);
    u = lane == r ? sum : u;
  }
  if (lane < rows) hidden[lane] = moe_swiglu(g, u, limit);
}

DS4Q_KERNEL_OF(MOE_RESIDENT, moe_gate_up, DS4Q_THREADS,
               (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
                const float* x, const float* rotated, float* hidden, float limit, int k,
                int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  int width = experts->rows, id = slot < k ? ids[token * k + slot] : 0;
  if ((slot == k && !shared) || id < -1) return;
  moe_run run = moe_run_of(width);
  int first = run.first, rows = run.rows;
  ds4q_u64 row = (ds4q_u64)token * experts->cols;
  float* to = hidden + ((ds4q_u64)token * (k + 1) + slot) * width + first;
  if (id < 0) {
    int lane = (int)ds4q_lane();
    if (lane < rows) to[lane] = 0.0f;
    return;
  }
  const ds4q_matrix* trio = slot < k ? experts + 3 * (ds4q_u64)id : shared;
  auto hers = [&](auto decoder) {
    constexpr int DECODER = decltype(decoder)::value;
    const float* from = (ds4q_format<DECODER>::ROTATED ? rotated : x) + row;
    moe_hidden<DECODER>(trio[0], trio[1], first, rows, from, to, limit, lds);
  };
  if (DS4Q_GATE == DS4Q_SHARED_EXPERT || slot < k) {
    moe_with_decoder<DS4Q_GATE>(trio->decoder, hers);
  } else {
    moe_with_decoder<DS4Q_SHARED_EXPERT>(trio->decoder, hers);
  }
}

DS4Q_KERNEL_OF(MOE_RESIDENT, moe_down, DS4Q_THREADS,
               (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
                const float* weights, const float* hidden, float* parts, int k, int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  int rows = experts[2].rows, cols = experts[2].cols;
  int id = slot < k ? ids[token * k + slot] : shared ? 0 : -1;
  if (id < -1) return;
  moe_run run = moe_run_of(rows);
  ds4q_u64 place = (ds4q_u64)token * (k + 1) + slot;
  float* out = parts + place * rows + run.first;
  if (id < 0) {
    for (int r = (int)ds4q_lane(); r < run.rows; r += DS4Q_LANES) out[r] = 0.0f;
    return;
  }
  const ds4q_matrix& down = slot < k ? experts[3 * (ds4q_u64)id + 2] : shared[2];
  float weight = slot < k ? weights[token * k + slot] : 1.0f;
  auto hers = [&](auto decoder) {
    ds4q_products<decltype(decoder)::value>(down, run.first, run.rows, hidden + place * cols, lds,
                                            [&](int r, float sum) { out[r] = weight * sum; });
  };
  if (DS4Q_DOWN == DS4Q_SHARED_EXPERT || slot < k) {
    moe_with_decoder<DS4Q_DOWN>(down.decoder, hers);
  } else {
    moe_with_decoder<DS4Q_SHARED_EXPERT>(down.decoder, hers);
  }
}
