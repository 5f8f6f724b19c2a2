// Owns a layer's experts: gate, up and SwiGLU of the chosen ones and of the shared one, and the
// weighted sum of their downs. Not: who is chosen (route.hip).
//
// Built for the decoders of the routed experts' gate and up (DS4Q_GATE), of their down (DS4Q_DOWN)
// and of the shared expert's three (DS4Q_SHARED_EXPERT); 0: each matrix says its own, with the same
// bits. experts [E][gate, up, down], all of one shape; shared [3] or null; ids [T][k], -1: no expert;
// k <= 31. Activations are 16-byte aligned, rows of weights lie anywhere. Sums as ds4q_dot.h defines.
//
// moe_gate_up: grid (ceil(width / 32), k + 1, T), block 128, LDS 39936. A block shares the width's
//   rows with the others of its slot. hidden [T][k + 1][width] = silu(min(g, limit)) *
//   clamp(u, -limit, limit), zeros where there is no expert; slot k is the shared one, left alone if
//   there is none. silu(g) = g / (1 + ds4q_exp(-g)).
// moe_down: grid (ceil(d / 16), T, 1), block 128, LDS 44032 or 41984 (DS4Q_DOWN 0). Each lane adds up
//   its part of a row over the slots, ascending: sum = fma(weight * factor, total, sum), the shared
//   expert last with weight 1; out [T][d] is ds4q_group_sum of that, and routed [T][d], or null, the
//   same without the shared one.
//
// Measured on an NVIDIA H200 (device copy 4.26 TB/s), top-6 of 256 experts, d 4096, width 2048,
// graph replays over all experts: gate and up 27.3 us in HFP4G32 (46 % of the copy), 32.0 us in 104
// (32 %), 29.8 us in 106 (25 %); down 20.7 us (31 %), 22.4 us (23 %), 20.3 us (18 %); builds of one or
// two edits before. What they issue bounds them, not what they move. Nothing here has run on AMD
// hardware.
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
#define MOE_OUT_ROWS 4  // of moe_down's result that a group gives, at most
#define MOE_SLOTS 32  // experts of a token, the shared one included

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

struct moe_gate_source {  // windows are gate and up in turn
  const float* from;
  const ds4q_u8 *gates, *ups;  // the group's first rows
  int per_window, row_bytes;
  ds4q_tables gate_table, up_table;
  static constexpr int count = 1;

  DS4Q_FN const float* x(int) const { return from; }
  DS4Q_FN const ds4q_u8* at(int, int w) const {
    return (w & 1 ? ups : gates) + (ds4q_u64)(w / 2 * per_window) * row_bytes;
  }
  DS4Q_FN int leap() const { return per_window * row_bytes; }
  DS4Q_FN ds4q_tables tables(int, int side) const { return side ? up_table : gate_table; }
};

// A group's hidden values, `rows` <= 32 of them from row `first` on. Lane r gets the sums of row r.
template <int DECODER>
DS4Q_FN void moe_hidden(const ds4q_matrix& gate, const ds4q_matrix& up, int first, int rows,
                        const float* x, float* hidden, float limit, const ds4q_memory& memory) {
  const ds4q_matrix w = gate;
  ds4q_u64 skip = (ds4q_u64)first * w.row_bytes;
  const ds4q_u8 *gates = w.data + skip, *ups = up.data + skip;
  ds4q_tables gate_table = ds4q_format<DECODER>::tables(w.books);
  ds4q_tables up_table = ds4q_format<DECODER>::tables(up.books);
  float g = 0.0f, u = 0.0f;
  int r = 0, lane = (int)ds4q_lane();
  if (ds4q_streams<DECODER>(w, (ds4q_u64)w.data | (ds4q_u64)up.data)) {
    if constexpr (ds4q_is_wide<DECODER>) {
      r = rows;
      ds4q_u64 apart = (ds4q_u64)ups - (ds4q_u64)gates;  // pointers chosen between cost scratch
      ds4q_wide_rows<DECODER>(
          [&](int i) { return gates + (i & 1) * apart + (ds4q_u64)(i / 2) * w.row_bytes; },
          2 * rows, w.cols, x, memory, [&](int i, float total) {
            float sum = ds4q_group_sum(total);
            g = lane == i / 2 && i % 2 == 0 ? sum : g;
            u = lane == i / 2 && i % 2 == 1 ? sum : u;
          });
    } else {
      constexpr int STREAMS = ds4q_window<DECODER>::STREAMS;
      ds4q_shape s = ds4q_shape_of(w);
      int windows = ds4q_windows(s, rows / s.rows * 2);
      r = windows / 2 * s.rows;
      moe_gate_source source = {x, gates, ups, s.rows, s.row_bytes, gate_table, up_table};
      ds4q_packed_rows<DECODER>(
          source, s, windows, memory,
          [&](int, int w, int number, const float* totals, const float* factors) {
            DS4Q_UNROLL
            for (int i = 0; i < STREAMS; i++) {
              float sum = ds4q_window_sum(s, totals[i]) * factors[i];
              float moved = ds4q_gather(s, sum, w / 2 * s.rows);
              bool here = lane / s.rows == w / 2;
              g = here && (w + i) % 2 == 0 ? moved : g;
              u = here && (w + i) % 2 == 1 ? moved : u;
            }
          });
    }
  }
  for (; r < rows; r++) {  // what is not streamed
    float total;
    const ds4q_u8* row = gates + (ds4q_u64)r * w.row_bytes;
    ds4q_any_row<DECODER, 1>(row, w.cols, gate_table, x, 0, 1, &total);
    float sum = ds4q_group_sum(total) * ds4q_factor<DECODER>(row);
    g = lane == r ? sum : g;
    row = ups + (ds4q_u64)r * w.row_bytes;
    ds4q_any_row<DECODER, 1>(row, w.cols, up_table, x, 0, 1, &total);
    sum = ds4q_group_sum(total) * ds4q_factor<DECODER>(row);
    u = lane == r ? sum : u;
  }
  if (lane < rows) hidden[lane] = moe_swiglu(g, u, limit);
}

DS4Q_KERNEL(moe_gate_up, DS4Q_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids, const float* x,
             float* hidden, float limit, int k, int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  ds4q_memory memory = ds4q_memory_of(lds);
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  int width = experts->rows, id = slot < k ? ids[token * k + slot] : 0;
  if (slot == k && !shared) return;
  moe_run run = moe_run_of(width);
  int first = run.first, rows = run.rows;
  const float* from = x + (ds4q_u64)token * experts->cols;
  float* to = hidden + ((ds4q_u64)token * (k + 1) + slot) * width + first;
  if (id < 0) {
    int lane = (int)ds4q_lane();
    if (lane < rows) to[lane] = 0.0f;
    return;
  }
  const ds4q_matrix* trio = slot < k ? experts + 3 * (ds4q_u64)id : shared;
  auto hers = [&](auto decoder) {
    moe_hidden<decltype(decoder)::value>(trio[0], trio[1], first, rows, from, to, limit, memory);
  };
  if (DS4Q_GATE == DS4Q_SHARED_EXPERT || slot < k) {
    moe_with_decoder<DS4Q_GATE>(trio->decoder, hers);
  } else {
    moe_with_decoder<DS4Q_SHARED_EXPERT>(trio->decoder, hers);
  }
}

struct moe_entry {  // an expert of a token
  const ds4q_u8* data;
  const ds4q_matrix* down;
  float weight;
  int slot;
  ds4q_tables tables;
};
DS4Q_FN moe_entry moe_entry_of(const ds4q_matrix* down, float weight, int slot) {
  moe_entry entry = {down->data, down, weight, slot, ds4q_fixed_tables(0, 0)};
  if (down->books) {
    entry.tables = ds4q_load_tables(down->books);
  } else if (down->decoder == 21) {
    entry.tables = ds4q_format<21>::tables(nullptr);
  } else if (down->decoder == 100 || down->decoder == 101) {
    entry.tables = ds4q_format<100>::tables(nullptr);
  }
  return entry;
}
struct moe_many {  // those of one decoder, in shared memory
  const moe_entry* entries;
  int count;
  DS4Q_FN const moe_entry& operator[](int m) const { return entries[m]; }
};
struct moe_one {
  moe_entry entry;
  static constexpr int count = 1;
  DS4Q_FN const moe_entry& operator[](int) const { return entry; }
};

template <class ENTRIES>
struct moe_down_source {  // the downs of experts
  const ENTRIES& entries;
  const float* hidden;
  int count, cols, first, per_window, row_bytes;

  DS4Q_FN const float* x(int m) const { return hidden + (ds4q_u64)entries[m].slot * cols; }
  DS4Q_FN const ds4q_u8* at(int m, int w) const {
    return entries[m].data + (ds4q_u64)(first + w * per_window) * row_bytes;
  }
  DS4Q_FN int leap() const { return 2 * per_window * row_bytes; }
  DS4Q_FN ds4q_tables tables(int m, int) const { return entries[m].tables; }
};

// What the lanes have of the downs of experts goes, in order and weighted, to their sums
// [row][lane] of a group's rows.
struct moe_sums {
  float* sums;
  DS4Q_FN void add(const moe_entry& entry, int r, float total, float factor) const {
    float* sum = sums + r * DS4Q_LANES + ds4q_lane();
    *sum = ds4q_fma(entry.weight * factor, total, *sum);
  }
};

// The first rows of a group, as many as can be streamed; returns their number.
template <int DECODER, class ENTRIES>
DS4Q_FN int moe_stream_downs(const ENTRIES& entries, const ds4q_matrix& w, moe_run run,
                             const float* hidden, moe_sums sums, const ds4q_memory& memory) {
  ds4q_u64 places = 0;
  for (int m = 0; m < entries.count; m++) places |= (ds4q_u64)entries[m].data;
  if (!ds4q_streams<DECODER>(w, places)) return 0;
  if constexpr (ds4q_is_wide<DECODER>) {
    int rows = run.rows / 2 * 2;
    for (int m = 0; m < entries.count; m++) {
      ds4q_barrier();  // all have read what x is copied over
      const ds4q_u8* data = entries[m].data + (ds4q_u64)run.first * w.row_bytes;
      ds4q_wide_rows<DECODER>([&](int r) { return data + (ds4q_u64)r * w.row_bytes; }, rows, w.cols,
                              hidden + (ds4q_u64)entries[m].slot * w.cols, memory,
                              [&](int r, float total) { sums.add(entries[m], r, total, 1.0f); });
    }
    return rows;
  } else {
    constexpr int STREAMS = ds4q_window<DECODER>::STREAMS;
    ds4q_shape s = ds4q_shape_of(w);
    int windows = ds4q_windows(s, run.rows / (s.rows * STREAMS) * STREAMS);
    moe_down_source<ENTRIES> source = {entries, hidden,    entries.count, w.cols,
                                       run.first, s.rows, s.row_bytes};
    ds4q_barrier();
    ds4q_packed_rows<DECODER>(
        source, s, windows, memory,
        [&](int m, int w, int number, const float* totals, const float* factors) {
          DS4Q_UNROLL
          for (int i = 0; i < STREAMS; i++) {
            sums.add(entries[m], (w + i) * s.rows + number, totals[i], factors[i]);
          }
        });
    return windows * s.rows;
  }
}

// The downs of `entries`, which share a decoder. All decoders in one kernel leave no registers to
// stream with.
template <int DECODER, bool STREAM, class ENTRIES>
DS4Q_FN void moe_add_downs(const ENTRIES& entries, moe_run run, const float* hidden, moe_sums sums,
                           const ds4q_memory& memory) {
  const ds4q_matrix w = *entries[0].down;
  int r = 0;
  if constexpr (STREAM) r = moe_stream_downs<DECODER>(entries, w, run, hidden, {sums}, memory);
  for (; r < run.rows; r++) {  // what is not streamed
    for (int m = 0; m < entries.count; m++) {
      const ds4q_u8* row = entries[m].data + (ds4q_u64)(run.first + r) * w.row_bytes;
      float total;
      ds4q_any_row<DECODER, 1>(row, w.cols, entries[m].tables,
                               hidden + (ds4q_u64)entries[m].slot * w.cols, 0, 1, &total);
      sums.add(entries[m], r, total, ds4q_factor<DECODER>(row));
    }
  }
}

// The experts of a token that are there, in order; returns their number.
DS4Q_FN int moe_entries(const ds4q_matrix* experts, const int* ids, const float* weights, int k,
                        moe_entry* entries) {
  int slot = (int)ds4q_thread(), before = 0, count = 0;
  for (int j = 0; j < k; j++) {
    if (ids[j] < 0) continue;
    before += j < slot;
    count++;
  }
  if (slot < k && ids[slot] >= 0) {
    entries[before] = moe_entry_of(experts + 3 * (ds4q_u64)ids[slot] + 2, weights[slot], slot);
  }
  return count;
}

DS4Q_KERNEL(moe_down, DS4Q_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
             const float* weights, const float* hidden, float* routed, float* out, int k,
             int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  DS4Q_SHARED(moe_entry, entries, MOE_SLOTS);
  DS4Q_SHARED(float, all_sums, DS4Q_GROUPS * MOE_OUT_ROWS * DS4Q_LANES);
  ds4q_memory memory = ds4q_memory_of(lds);
  int token = (int)ds4q_block_y(), rows = experts[2].rows, lane = (int)ds4q_lane();
  moe_run run = moe_run_of(rows);
  float* sums = all_sums + ds4q_thread() / DS4Q_LANES * MOE_OUT_ROWS * DS4Q_LANES;
  for (int r = 0; r < run.rows; r++) sums[r * DS4Q_LANES + lane] = 0.0f;
  ids += token * k, weights += token * k;
  hidden += (ds4q_u64)token * (k + 1) * experts[2].cols;
  if constexpr (DS4Q_DOWN != 0) {
    int count = moe_entries(experts, ids, weights, k, entries);
    ds4q_barrier();
    moe_many many = {entries, count};
    if (count) moe_add_downs<DS4Q_DOWN, true>(many, run, hidden, {sums}, memory);
  } else {
    for (int slot = 0; slot < k; slot++) {
      if (ids[slot] < 0) continue;
      moe_one one = {moe_entry_of(experts + 3 * (ds4q_u64)ids[slot] + 2, weights[slot], slot)};
      moe_with_decoder<0>(one.entry.down->decoder, [&](auto decoder) {
        moe_add_downs<decltype(decoder)::value, false>(one, run, hidden, {sums}, memory);
      });
    }
  }
  auto write = [&](float* to) {
    for (int r = 0; r < run.rows; r++) {
      float sum = ds4q_group_sum(sums[r * DS4Q_LANES + lane]);
      if (lane == 0) to[(ds4q_u64)token * rows + run.first + r] = sum;
    }
  };
  if (routed) write(routed);
  if (shared) {
    moe_one one = {moe_entry_of(shared + 2, 1.0f, k)};
    moe_with_decoder<DS4Q_SHARED_EXPERT>(shared[2].decoder, [&](auto decoder) {
      constexpr bool STREAM = DS4Q_SHARED_EXPERT != 0;
      moe_add_downs<decltype(decoder)::value, STREAM>(one, run, hidden, {sums}, memory);
    });
  }
  write(out);
}
