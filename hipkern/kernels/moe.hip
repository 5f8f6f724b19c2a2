// Owns a layer's experts: gate, up and SwiGLU of the chosen ones, and the weighted sum of their
// downs.
//
// moe_gate_up: grid (ceil(width / 32), k + 1, T), 128 threads, LDS 39936. A block takes 32 rows
//   of one expert of one token, each group of 32 lanes 8 of them: gate and up in turn. Slot k is
//   the shared expert. hidden [T][k + 1][width] = silu(min(gate, limit)) * clamp(up, -limit,
//   limit), silu(g) = g / (1 + exp(-g)); an id below 0 gives zeros; without a shared expert slot
//   k is not written.
// moe_down: grid (ceil(d / 16), T, 1), 128 threads, LDS 44032 or 4096, the latter for mixed
//   downs on CDNA. A block takes 16 rows of out [T][d]. Each lane adds fma(weight * factor, total, sum)
//   over the chosen experts in the order of ids, with its own part of each row; then the lanes'
//   sums are added as ds4q_group_sum does: routed, where it is not null. The shared expert's part
//   (weight 1) is added before the lanes' sums are, which gives out. Ids below 0 contribute
//   nothing.
//
// experts [E][3] and shared [3]: gate, up, down; ids, weights [T][k]; k < 32; x [T][cols of
// gate]. x and hidden are 16-byte aligned. A row's product is that of ds4q_dot.h. Hashes compared
// on an NVIDIA H200 and on the CPU; nothing here has run on AMD hardware.
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
#define MOE_HIDDEN_ROWS 32  // of moe_gate_up's result that a block gives
#define MOE_OUT_ROWS 16     // of moe_down's
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
  DS4Q_FN ds4q_tables tables(int, int side) const { return side ? up_table : gate_table; }
};

// A group's hidden values, `rows` of them from row `first` on.
template <int DECODER>
DS4Q_FN void moe_hidden(const ds4q_matrix& gate, const ds4q_matrix& up, int first, int rows,
                        bool whole, const float* x, float* hidden, float limit,
                        const ds4q_memory& memory) {
  const ds4q_matrix w = gate;
  ds4q_u64 skip = (ds4q_u64)first * w.row_bytes;
  const ds4q_u8 *gates = w.data + skip, *ups = up.data + skip;
  ds4q_tables tables[2] = {ds4q_tables_of<DECODER>(w.books), ds4q_tables_of<DECODER>(up.books)};
  if (!whole || !ds4q_streams<DECODER>(w, (ds4q_u64)w.data | (ds4q_u64)up.data, 2 * rows)) {
    rows = ds4q_least(rows, w.rows - first);
    for (int r = 0; r < rows; r++) {
      float sums[2];
      DS4Q_UNROLL
      for (int i = 0; i < 2; i++) {
        const ds4q_u8* row = (i ? ups : gates) + (ds4q_u64)r * w.row_bytes;
        float total;
        ds4q_any_row<DECODER, 1>(row, w.cols, tables[i], x, 0, 1, &total);
        float sum = ds4q_group_sum(total) * ds4q_format<DECODER>::factor(row);
        sums[i] = sum;
      }
      if (ds4q_lane() == 0) hidden[r] = moe_swiglu(sums[0], sums[1], limit);
    }
    return;
  }
  float previous = 0.0f;  // the gate that waits for its up
  if constexpr (ds4q_is_wide<DECODER>) {
    // A choice between two captured pointers would put the capture into scratch memory.
    int row_bytes = w.row_bytes;
    ds4q_u64 apart = (ds4q_u64)ups - (ds4q_u64)gates;
    ds4q_wide_rows<DECODER>(
        [=](int r) {
          return gates + (ds4q_u64)(r & 1) * apart + (ds4q_u64)(r / 2) * row_bytes;
        },
        2 * rows,
        w.cols, x, memory, [&](int r, float total) {
          float sum = ds4q_group_sum(total);
          if ((r & 1) && ds4q_lane() == 0) hidden[r / 2] = moe_swiglu(previous, sum, limit);
          previous = sum;
        });
  } else {
    ds4q_shape s = ds4q_shape_of(w);
    moe_gate_source source = {x, gates, ups, s.rows, s.row_bytes, tables[0], tables[1]};
    ds4q_packed_rows<DECODER>(
        source, s, 2 * rows / s.rows, memory,
        [&](int, int w, int number, float total, float factor) {
          float sum = ds4q_row_sum(total, s.lanes) * factor;
          if ((w & 1) && ds4q_lane() % s.lanes == 0) {
            hidden[w / 2 * s.rows + number] = moe_swiglu(previous, sum, limit);
          }
          previous = sum;
        });
  }
}

DS4Q_KERNEL(moe_gate_up, DS4Q_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids, const float* x,
             float* hidden, float limit, int k, int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  ds4q_memory memory = ds4q_memory_of(lds);
  constexpr int ROWS = MOE_HIDDEN_ROWS / DS4Q_GROUPS;
  int slot = (int)ds4q_block_y(), token = (int)ds4q_block_z();
  int block = (int)ds4q_block_x() * MOE_HIDDEN_ROWS;
  int first = block + (int)ds4q_thread() / DS4Q_LANES * ROWS;
  int width = experts->rows, id = slot < k ? ids[token * k + slot] : 0;
  if (slot == k && !shared) return;
  const float* from = x + (ds4q_u64)token * experts->cols;
  bool whole = block + MOE_HIDDEN_ROWS <= width;
  float* to = hidden + ((ds4q_u64)token * (k + 1) + slot) * width + first;
  if (id < 0) {
    int lane = (int)ds4q_lane();
    if (lane < ROWS && first + lane < width) to[lane] = 0.0f;
  } else if (slot < k) {
    const ds4q_matrix* trio = experts + 3 * (ds4q_u64)id;
    moe_with_decoder<DS4Q_GATE>(trio->decoder, [&](auto decoder) {
      moe_hidden<decltype(decoder)::value>(trio[0], trio[1], first, ROWS, whole, from, to, limit,
                                           memory);
    });
  } else {
    moe_with_decoder<DS4Q_SHARED_EXPERT>(shared->decoder, [&](auto decoder) {
      moe_hidden<decltype(decoder)::value>(shared[0], shared[1], first, ROWS, whole, from, to, limit,
                                           memory);
    });
  }
}

struct moe_entry {  // an expert of a token
  const ds4q_u8* data;
  const ds4q_matrix* down;
  float weight;
  int slot;
  ds4q_tables tables;
};
struct moe_down_source {  // the downs of experts
  const moe_entry* entries;
  const float* hidden;
  int count, cols, first, per_window, row_bytes;

  DS4Q_FN const float* x(int m) const { return hidden + (ds4q_u64)entries[m].slot * cols; }
  DS4Q_FN const ds4q_u8* at(int m, int w) const {
    return entries[m].data + (ds4q_u64)(first + w * per_window) * row_bytes;
  }
  DS4Q_FN ds4q_tables tables(int m, int) const { return entries[m].tables; }
};

// Adds what the lanes have of the downs of `count` experts, in order and weighted, to their sums
// [row][lane] of a group's rows: sum = fma(weight * factor, total, sum).
template <int DECODER, bool STREAM>
DS4Q_FN void moe_add_downs(const moe_entry* entries, int count, int first, int rows, bool whole,
                           const float* hidden, float* sums, const ds4q_memory& memory) {
  const ds4q_matrix w = *entries[0].down;
  int lane = (int)ds4q_lane();
  ds4q_u64 places = 0;
  for (int m = 0; m < count; m++) places |= (ds4q_u64)entries[m].data;
  auto add = [&](int m, int r, float total, float factor) {
    float* sum = sums + r * DS4Q_LANES + lane;
    *sum = ds4q_fma(entries[m].weight * factor, total, *sum);
  };
  if (!STREAM || !whole || !ds4q_streams<DECODER>(w, places, rows)) {
    rows = ds4q_least(rows, w.rows - first);
    for (int m = 0; m < count; m++) {
      const float* x = hidden + (ds4q_u64)entries[m].slot * w.cols;
      for (int r = 0; r < rows; r++) {
        const ds4q_u8* row = entries[m].data + (ds4q_u64)(first + r) * w.row_bytes;
        float total;
        ds4q_any_row<DECODER, 1>(row, w.cols, entries[m].tables, x, 0, 1, &total);
        add(m, r, total, ds4q_format<DECODER>::factor(row));
      }
    }
    return;
  }
  ds4q_barrier();  // all have read what x is copied over
  if constexpr (!STREAM) {
    return;
  } else if constexpr (ds4q_is_wide<DECODER>) {
    for (int m = 0; m < count; m++) {
      if (m) ds4q_barrier();
      const ds4q_u8* data = entries[m].data + (ds4q_u64)first * w.row_bytes;
      ds4q_wide_rows<DECODER>([&](int r) { return data + (ds4q_u64)r * w.row_bytes; }, rows, w.cols,
                              hidden + (ds4q_u64)entries[m].slot * w.cols, memory,
                              [&](int r, float total) { add(m, r, total, 1.0f); });
    }
  } else {
    ds4q_shape s = ds4q_shape_of(w);
    moe_down_source source = {entries, hidden, count, w.cols, first, s.rows, s.row_bytes};
    ds4q_packed_rows<DECODER>(source, s, rows / s.rows, memory,
                              [&](int m, int w, int number, float total, float factor) {
                                add(m, w * s.rows + number, total, factor);
                              });
  }
}

// The experts of a token that are there, and last the shared one. Returns their number without it.
DS4Q_FN int moe_entries(const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
                        const float* weights, int k, moe_entry* entries) {
  int slot = (int)ds4q_thread(), before = 0, count = 0;
  for (int j = 0; j < k; j++) {
    if (ids[j] < 0) continue;
    before += j < slot;
    count++;
  }
  if (slot < k ? ids[slot] >= 0 : slot == k && shared) {
    const ds4q_matrix* down = slot < k ? experts + 3 * (ds4q_u64)ids[slot] + 2 : shared + 2;
    moe_entry entry = {down->data, down, slot < k ? weights[slot] : 1.0f, slot,
                       down->books ? ds4q_load_tables(down->books) : ds4q_no_tables()};
    entries[before] = entry;
  }
  return count;
}

DS4Q_KERNEL(moe_down, DS4Q_THREADS,
            (const ds4q_matrix* experts, const ds4q_matrix* shared, const int* ids,
             const float* weights, const float* hidden, float* routed, float* out, int k,
             int tokens)) {
  DS4Q_SHARED(ds4q_u8, lds, DS4Q_SHARED_BYTES);
  DS4Q_SHARED(moe_entry, entries, MOE_SLOTS);
  DS4Q_SHARED(float, all_sums, MOE_OUT_ROWS * DS4Q_LANES);
  constexpr int ROWS = MOE_OUT_ROWS / DS4Q_GROUPS;
  ds4q_memory memory = ds4q_memory_of(lds);
  int token = (int)ds4q_block_y(), rows = experts[2].rows, lane = (int)ds4q_lane();
  int group = (int)ds4q_thread() / DS4Q_LANES, row = (int)ds4q_block_x() * MOE_OUT_ROWS + group * ROWS;
  bool whole = (int)(ds4q_block_x() + 1) * MOE_OUT_ROWS <= rows;
  float* sums = all_sums + group * ROWS * DS4Q_LANES;
  for (int r = 0; r < ROWS; r++) sums[r * DS4Q_LANES + lane] = 0.0f;
  int count = moe_entries(experts, shared, ids + token * k, weights + token * k, k, entries);
  hidden += (ds4q_u64)token * (k + 1) * experts[2].cols;
  ds4q_barrier();
  constexpr bool MIXED = DS4Q_DOWN == 0, STREAM = !(MIXED && DS4Q_FEW_SCALARS);
  for (int m = 0; m < count; m += MIXED ? 1 : count) {
    moe_with_decoder<DS4Q_DOWN>(entries[m].down->decoder, [&](auto decoder) {
      moe_add_downs<decltype(decoder)::value, STREAM>(entries + m, MIXED ? 1 : count, row, ROWS,
                                                      whole, hidden, sums, memory);
    });
  }
  auto write = [&](float* to) {
    DS4Q_UNROLL
    for (int r = 0; r < ROWS; r++) {
      float sum = ds4q_group_sum(sums[r * DS4Q_LANES + lane]);
      if (lane == 0 && row + r < rows) to[(ds4q_u64)token * rows + row + r] = sum;
    }
  };
  if (routed) write(routed);
  if (shared) {
    moe_with_decoder<DS4Q_SHARED_EXPERT>(shared[2].decoder, [&](auto decoder) {
      moe_add_downs<decltype(decoder)::value, STREAM>(entries + count, 1, row, ROWS, whole, hidden,
                                                      sums, memory);
    });
  }
  write(out);
}
