// Owns how the groups of a block stream rows of common shapes past one row of activations. Sums are
// ds4q_dot.h's; rows of other shapes go through its ds4q_any_row.
//
// Packed rows travel in windows: 4096 columns of one row, or the whole of 2, 4 or 8 rows of 2048,
// 1024 or 512 columns. A group copies windows into its shared memory, 16 bytes a lane, multiplies
// them, and copies the next ones; the other groups of a multiprocessor fill its waits. Wide rows need
// no decoding: lanes load them straight into registers, and find x in the cache.
#pragma once
#include "ds4q_dot.h"

#define DS4Q_GROUPS 6  // groups of 32 lanes in a block
#define DS4Q_THREADS 192
#define DS4Q_WINDOWS 4            // of a group at most, where rows take several parts
#define DS4Q_RUN (DS4Q_TILE + 4)  // floats between tiles of x in shared memory, for the banks' sake
#define DS4Q_STAGE_BYTES 4608     // of a group's windows
#define DS4Q_WIDE_STEP 1024
// A part of x, then a stage of each group and its lanes' totals between parts.
#define DS4Q_X_BYTES (DS4Q_LANES * DS4Q_RUN * 4)
#define DS4Q_GROUP_BYTES (DS4Q_STAGE_BYTES + DS4Q_WINDOWS * DS4Q_LANES * 4)
#define DS4Q_SHARED_BYTES (DS4Q_X_BYTES + DS4Q_GROUPS * DS4Q_GROUP_BYTES)

struct ds4q_memory {  // a group's view of the block's shared memory
  float* x;
  ds4q_u8* stage;
  float* totals;  // [window][lane]
};
DS4Q_FN ds4q_memory ds4q_memory_of(ds4q_u8* shared) {
  ds4q_u8* own = shared + DS4Q_X_BYTES + ds4q_thread() / DS4Q_LANES * DS4Q_GROUP_BYTES;
  return {(float*)shared, own, (float*)(own + DS4Q_STAGE_BYTES)};
}

template <int DECODER>
struct ds4q_window {
  using format = ds4q_format<DECODER>;
  static constexpr int TILE_BYTES = DS4Q_TILE_BLOCKS * format::BLOCK_BYTES;
  static constexpr int PART_BYTES = DS4Q_LANES * TILE_BYTES;
  static constexpr int BYTES = PART_BYTES + 8 * format::HEADER;  // up to 8 rows
  static constexpr int PIECES = (BYTES + 16 * DS4Q_LANES - 1) / (16 * DS4Q_LANES);
  // Two windows at once share what is read of x.
  static constexpr int STREAMS = 2 * BYTES <= DS4Q_STAGE_BYTES ? 2 : 1;
  static_assert(BYTES * STREAMS <= DS4Q_STAGE_BYTES && BYTES % 16 == 0, "");
  static_assert(STREAMS == 2 || !format::BOOKS, "odd windows need tables of their own");
};

struct ds4q_shape {
  int cols, row_bytes;
  int lanes, rows;  // that a row takes of a group, and rows of a window
};
DS4Q_FN ds4q_shape ds4q_shape_of(const ds4q_matrix& w) {
  int lanes = ds4q_least(w.cols / DS4Q_TILE, DS4Q_LANES);
  return {w.cols, w.row_bytes, lanes, DS4Q_LANES / lanes};
}
// Whether rows of this length can be streamed that begin at `places`, addresses or-ed together.
template <int DECODER>
DS4Q_FN bool ds4q_streams(const ds4q_matrix& w, ds4q_u64 places) {
  if (((places | (ds4q_u64)w.row_bytes) & 15) != 0) return false;
  if constexpr (ds4q_is_wide<DECODER>) {
    return w.cols % DS4Q_WIDE_STEP == 0;
  } else {
    return w.cols == 512 || w.cols == 1024 || w.cols == 2048 || w.cols % DS4Q_PART == 0;
  }
}

// Sums of a window's rows, each in all lanes of its row.
DS4Q_FN float ds4q_window_sum(const ds4q_shape& s, float total) {
  return s.rows == 1 ? ds4q_group_sum(total) : ds4q_row_sum(total, s.lanes);
}
// Of a window's rows, whose values are in the lanes of each: the value of row i in lane first + i.
DS4Q_FN float ds4q_gather(const ds4q_shape& s, float value, int first) {
  if (s.rows == 1) return value;
  return ds4q_shuffle(value, (ds4q_u32)(((int)ds4q_lane() - first) * s.lanes) % DS4Q_LANES);
}

// Of `windows` windows as many as one call can take.
DS4Q_FN int ds4q_windows(const ds4q_shape& s, int windows) {
  return s.cols <= DS4Q_PART ? windows : ds4q_least(windows, DS4Q_WINDOWS);
}

// Products of a group's windows with x, 16-byte aligned: `at(w)` is where window w begins, `tables`
// those of even and of odd windows. `done(w, number, totals, factors)` is called by all lanes once
// the rows of windows w to w + STREAMS - 1 are complete: a lane that takes part in row `number` of a
// window has its total. All groups of a block call this at once; the number of windows, a multiple of
// STREAMS, may differ.
template <int DECODER, class AT, class DONE>
DS4Q_FN void ds4q_packed_rows(AT at, const ds4q_tables* tables, const ds4q_shape& s, int windows,
                              const float* x, const ds4q_memory& memory, DONE done) {
  using window = ds4q_window<DECODER>;
  using format = typename window::format;
  constexpr int STREAMS = window::STREAMS, LAST = (window::PIECES - 1) * 16 * DS4Q_LANES;
  int lane = (int)ds4q_lane(), number = lane / s.lanes, tile = lane % s.lanes;
  int parts = s.rows > 1 ? 1 : s.cols / DS4Q_PART;
  int bytes = s.rows > 1 ? s.rows * s.row_bytes : format::HEADER + window::PART_BYTES;
  int own = number * s.row_bytes + format::HEADER;
  // Lanes beyond the end of a window copy its last 16 bytes once more.
  int last = ds4q_least(lane * 16 + LAST, bytes - 16);

  auto copy_windows = [&](int w, int part) {
    DS4Q_UNROLL
    for (int i = 0; i < STREAMS; i++) {
      const ds4q_u8* from = at(w + i) + (ds4q_u64)part * window::PART_BYTES;
      ds4q_u8* to = memory.stage + i * window::BYTES;
      DS4Q_UNROLL
      for (int b = 0; b < LAST; b += 16 * DS4Q_LANES) {
        ds4q_copy16(to + b + lane * 16, from + b + lane * 16);
      }
      ds4q_copy16(to + last, from + last);
    }
  };
  if (windows) copy_windows(0, 0);
  for (int part = 0; part < parts; part++) {
    if (part) ds4q_barrier();  // all have read the x before
    int first = part * DS4Q_PART, count = ds4q_least(s.cols - first, DS4Q_PART);
    for (int c = (int)ds4q_thread() * 4; c < count; c += DS4Q_THREADS * 4) {
      ds4q_copy16(memory.x + c / DS4Q_TILE * DS4Q_RUN + c % DS4Q_TILE, x + first + c);
    }
    ds4q_copy_commit();
    ds4q_copy_wait<0>();
    ds4q_barrier();
    for (int w = 0; w < windows; w += STREAMS) {
      if (w) {
        ds4q_copy_wait<0>();
        ds4q_group_barrier();
      }
      float totals[STREAMS], factors[STREAMS];
      DS4Q_UNROLL
      for (int i = 0; i < STREAMS; i++) {
        const ds4q_u8* stage = memory.stage + i * window::BYTES;
        factors[i] = format::factor(*(const ds4q_u16*)(stage + number * s.row_bytes));
        totals[i] = part ? memory.totals[(w + i) * DS4Q_LANES + lane] : 0.0f;
      }
      DS4Q_UNROLL
      for (int b = 0; b < DS4Q_TILE_BLOCKS; b++) {
        ds4q_codes codes[STREAMS];
        DS4Q_UNROLL
        for (int i = 0; i < STREAMS; i++) {
          codes[i] = ds4q_read_block<DECODER>(memory.stage + i * window::BYTES + own, tile, b);
        }
        ds4q_add_blocks<DECODER, STREAMS>(codes, tables, memory.x + tile * DS4Q_RUN + b * DS4Q_BLOCK,
                                          totals);
        DS4Q_UNROLL
        for (int i = 0; i < STREAMS; i++) totals[i] = ds4q_now(totals[i]);
      }
      ds4q_group_barrier();
      if (w + STREAMS < windows) {
        copy_windows(w + STREAMS, part);
      } else if (part + 1 < parts) {
        copy_windows(0, part + 1);
      }
      ds4q_copy_commit();
      if (part + 1 < parts) {
        DS4Q_UNROLL
        for (int i = 0; i < STREAMS; i++) memory.totals[(w + i) * DS4Q_LANES + lane] = totals[i];
      } else {
        DS4Q_UNROLL
        for (int i = 0; i < STREAMS; i++) {
          if (part) factors[i] = ds4q_factor<DECODER>(at(w + i));
        }
        done(w, number, totals, factors);
      }
    }
  }
}

// A lane's totals of ROWS wide rows, which begin at rows.
template <int DECODER, int ROWS>
DS4Q_FN void ds4q_wide_totals(const ds4q_u8* const* rows, int cols, const float* x, float* totals) {
  using format = ds4q_format<DECODER>;
  constexpr int PIECES = format::BLOCK_BYTES / 64, AHEAD = 4 / PIECES, LEAP = 8 * DS4Q_LANES;
  int lane = (int)ds4q_lane();
  const ds4q_piece* from[ROWS];
  DS4Q_UNROLL
  for (int r = 0; r < ROWS; r++) {
    from[r] = (const ds4q_piece*)rows[r] + lane * PIECES;
    totals[r] = 0.0f;
  }
  x += 8 * lane;
  for (int c = 0; c < cols; c += AHEAD * LEAP) {
    ds4q_piece held[AHEAD][ROWS][PIECES];  // all loads are asked for before one is waited for
    DS4Q_UNROLL
    for (int a = 0; a < AHEAD; a++) {
      DS4Q_UNROLL
      for (int r = 0; r < ROWS; r++) {
        DS4Q_UNROLL
        for (int i = 0; i < PIECES; i++) {
          held[a][r][i] = ds4q_stream16(from[r] + a * DS4Q_LANES * PIECES + i);
        }
      }
    }
    DS4Q_UNROLL
    for (int a = 0; a < AHEAD; a++) {
      ds4q_four near[2] = {ds4q_near4(x + a * LEAP), ds4q_near4(x + a * LEAP + 4)};
      DS4Q_UNROLL
      for (int r = 0; r < ROWS; r++) {
        ds4q_u32 words[4 * PIECES];
        DS4Q_UNROLL
        for (int i = 0; i < 4 * PIECES; i++) words[i] = held[a][r][i / 4].words[i % 4];
        float level[8];
        format::eight(words, nullptr, ds4q_tables{}, 0, level);
        DS4Q_UNROLL
        for (int i = 0; i < 8; i++) totals[r] = ds4q_fma(level[i], near[i / 4].x[i % 4], totals[r]);
      }
    }
    DS4Q_UNROLL
    for (int r = 0; r < ROWS; r++) from[r] += AHEAD * DS4Q_LANES * PIECES;
    x += AHEAD * LEAP;
  }
}

// Products of `rows` wide rows with x, 16-byte aligned; `row(r)` is where row r begins.
// `done(r, total)` is called by all lanes with their totals, rows in order.
template <int DECODER, class ROW, class DONE>
DS4Q_FN void ds4q_wide_rows(ROW row, int rows, int cols, const float* x, DONE done) {
  int r = 0;
  float totals[2];
  for (; r + 1 < rows; r += 2) {
    const ds4q_u8* two[2] = {row(r), row(r + 1)};
    ds4q_wide_totals<DECODER, 2>(two, cols, x, totals);
    done(r, totals[0]);
    done(r + 1, totals[1]);
  }
  if (r < rows) {
    const ds4q_u8* one = row(r);
    ds4q_wide_totals<DECODER, 1>(&one, cols, x, totals);
    done(r, totals[0]);
  }
}

// Products of a group's rows with x: the sum of each, by one lane, to `put(r, sum)`; r counts from
// row `first` of w on. What cannot be streamed goes through ds4q_any_row. All groups call this.
template <int DECODER, class PUT>
DS4Q_FN void ds4q_products(const ds4q_matrix& of, int first, int rows, const float* x,
                           ds4q_u8* shared, PUT put) {
  const ds4q_matrix w = of;
  const ds4q_u8* data = w.data + (ds4q_u64)first * w.row_bytes;
  auto row = [&](int r) { return data + (ds4q_u64)r * w.row_bytes; };
  ds4q_tables table = ds4q_format<DECODER>::tables(w.books);
  int r = 0, lane = (int)ds4q_lane();
  if (ds4q_streams<DECODER>(w, (ds4q_u64)w.data)) {
    if constexpr (ds4q_is_wide<DECODER>) {
      r = rows;
      ds4q_wide_rows<DECODER>(row, rows, w.cols, x, [&](int i, float total) {
        float sum = ds4q_group_sum(total);
        if (lane == 0) put(i, sum);
      });
    } else {
      constexpr int STREAMS = ds4q_window<DECODER>::STREAMS;
      ds4q_shape s = ds4q_shape_of(w);
      int windows = ds4q_windows(s, rows / (s.rows * STREAMS) * STREAMS);
      r = windows * s.rows;
      ds4q_tables tables[2] = {table, table};
      ds4q_packed_rows<DECODER>(
          [&](int i) { return row(i * s.rows); }, tables, s, windows, x, ds4q_memory_of(shared),
          [&](int i, int number, const float* totals, const float* factors) {
            DS4Q_UNROLL
            for (int j = 0; j < STREAMS; j++) {
              float sum = ds4q_window_sum(s, totals[j]) * factors[j];
              if (lane % s.lanes == 0) put((i + j) * s.rows + number, sum);
            }
          });
    }
  }
  for (; r < rows; r++) {
    float total;
    ds4q_any_row<DECODER, 1>(row(r), w.cols, table, x, 0, 1, &total);
    float sum = ds4q_group_sum(total) * ds4q_factor<DECODER>(row(r));
    if (lane == 0) put(r, sum);
  }
}
