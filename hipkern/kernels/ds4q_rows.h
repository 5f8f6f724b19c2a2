// Owns how the groups of a block stream rows of common shapes past one row of activations. Sums are
// ds4q_dot.h's; rows of other shapes go through its ds4q_any_row.
//
// Packed rows travel in windows: 2048 columns of one row, or the whole of 2 or 4 rows of 1024 or 512
// columns. While a group multiplies its windows, the next ones are copied into shared memory, 16
// bytes a lane. Wide rows need no decoding: lanes load them straight into registers, one step ahead.
#pragma once
#include "ds4q_dot.h"

#define DS4Q_GROUPS 4  // groups of 32 lanes in a block
#define DS4Q_THREADS 128
#define DS4Q_WINDOWS 8             // of a group at most, where rows take several passes
#define DS4Q_PASS (2 * DS4Q_PART)  // columns of x that shared memory holds
#define DS4Q_RUN (DS4Q_TILE + 4)   // floats between its tiles there, for the banks' sake
#define DS4Q_X_FLOATS (DS4Q_PASS / DS4Q_TILE * DS4Q_RUN)
#define DS4Q_STAGE_BYTES 2304  // of a group's windows
#define DS4Q_WIDE_COLS 8192    // of wide rows at most
#define DS4Q_WIDE_STEP 1024
// x, then two stages of each group, then its lanes' totals between passes.
#define DS4Q_X_BYTES (DS4Q_X_FLOATS * 4)
#define DS4Q_TOTALS_BYTES (DS4Q_WINDOWS * DS4Q_LANES * 4)
#define DS4Q_GROUP_BYTES (2 * DS4Q_STAGE_BYTES + DS4Q_TOTALS_BYTES)
#define DS4Q_SHARED_BYTES (DS4Q_X_BYTES + DS4Q_GROUPS * DS4Q_GROUP_BYTES)

struct ds4q_memory {  // a group's view of the block's shared memory
  float* x;
  ds4q_u8* stage;
  float* totals;  // [window][lane]
};
DS4Q_FN ds4q_memory ds4q_memory_of(ds4q_u8* shared) {
  ds4q_u8* own = shared + DS4Q_X_BYTES + ds4q_thread() / DS4Q_LANES * DS4Q_GROUP_BYTES;
  return {(float*)shared, own, (float*)(own + 2 * DS4Q_STAGE_BYTES)};
}

template <int DECODER>
struct ds4q_window {
  using format = ds4q_format<DECODER>;
  static constexpr int TILE_BYTES = DS4Q_TILE_BLOCKS * format::BLOCK_BYTES;
  static constexpr int PART_BYTES = DS4Q_LANES * TILE_BYTES;
  static constexpr int BYTES = PART_BYTES + 4 * format::HEADER;  // up to 4 rows
  static constexpr int PIECES = (BYTES + 16 * DS4Q_LANES - 1) / (16 * DS4Q_LANES);
  // Two windows at once share what is read of x.
  static constexpr int STREAMS = 2 * BYTES <= DS4Q_STAGE_BYTES ? 2 : 1;
  static_assert(BYTES * STREAMS <= DS4Q_STAGE_BYTES && BYTES % 16 == 0, "");
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
    return w.cols % DS4Q_WIDE_STEP == 0 && w.cols <= DS4Q_WIDE_COLS;
  } else {
    return w.cols == 512 || w.cols == 1024 || w.cols % DS4Q_PART == 0;
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
  return s.cols <= DS4Q_PASS ? windows : ds4q_least(windows, DS4Q_WINDOWS);
}

// Starts to copy a row of activations, by all threads; 16-byte aligned.
DS4Q_FN void ds4q_copy_x(const float* x, int cols, float* to) {
  for (int c = (int)ds4q_thread() * 4; c < cols; c += DS4Q_THREADS * 4) {
    ds4q_copy16(to + c / DS4Q_TILE * DS4Q_RUN + c % DS4Q_TILE, x + c);
  }
}
// The same for wide rows: of the eight values of a lane, the first four and the last four lie in
// two planes, so that consecutive lanes read consecutive 16 bytes.
DS4Q_FN void ds4q_copy_wide_x(const float* x, int cols, float* to) {
  for (int c = (int)ds4q_thread() * 4; c < cols; c += DS4Q_THREADS * 4) {
    ds4q_copy16(to + c / 8 * 4 + c / 4 % 2 * (DS4Q_WIDE_COLS / 2), x + c);
  }
}

// Products of a group's windows with x, for `source.count` matrices of one shape in turn. A source
// gives, for matrix m, x(m), its row of activations; at(m, w), where window w begins; leap(), bytes
// from there to window w + 2; and tables(m, side), those of even (side 0) and odd windows.
// `done(m, w, number, totals, factors)` is called by all lanes once the rows of windows w to
// w + STREAMS - 1 are complete: a lane that takes part in row `number` of a window has its total. All
// groups of a block call this at once; the number of windows, a multiple of STREAMS, may differ.
template <int DECODER, class SOURCE, class DONE>
DS4Q_FN void ds4q_packed_rows(const SOURCE& source, const ds4q_shape& s, int windows,
                              const ds4q_memory& memory, DONE done) {
  using window = ds4q_window<DECODER>;
  using format = typename window::format;
  constexpr int STREAMS = window::STREAMS, LAST = (window::PIECES - 1) * 16 * DS4Q_LANES;
  int lane = (int)ds4q_lane(), number = lane / s.lanes, tile = lane % s.lanes;
  int parts = s.rows > 1 ? 1 : s.cols / DS4Q_PART, passes = (parts + 1) / 2;
  int bytes = s.rows > 1 ? s.rows * s.row_bytes : format::HEADER + window::PART_BYTES;
  bool two = parts == 1;  // x of the next matrix fits beside that of this one
  int own = number * s.row_bytes + format::HEADER + tile * window::TILE_BYTES;
  // Lanes beyond the end of a window copy its last 16 bytes once more.
  int last = ds4q_least(lane * 16 + LAST, bytes - 16) - lane * 16;

  // What is copied next: it runs one step ahead of what is multiplied.
  int to_m = 0, to_pass = 0, to_w = 0, to_part = 0, to_parts = ds4q_least(parts, 2);
  const ds4q_u8* from[STREAMS];
  auto seek = [&]() {
    DS4Q_UNROLL
    for (int i = 0; i < STREAMS; i++) {
      from[i] = source.at(to_m, to_w + i) + to_pass * 2 * window::PART_BYTES + lane * 16;
    }
  };
  auto copy_windows = [&](ds4q_u8* stage) {
    if (to_m == source.count) return;
    DS4Q_UNROLL
    for (int i = 0; i < STREAMS; i++) {
      ds4q_u8* to = stage + i * window::BYTES + lane * 16;
      DS4Q_UNROLL
      for (int at = 0; at < LAST; at += 16 * DS4Q_LANES) ds4q_copy16(to + at, from[i] + at);
      ds4q_copy16(to + last, from[i] + last);
      from[i] += window::PART_BYTES;
    }
    if (++to_part < to_parts) return;
    to_part = 0;
    to_w += STREAMS;
    if (STREAMS == 2 && to_w < windows) {
      ds4q_u64 leap = source.leap() - to_parts * window::PART_BYTES;
      DS4Q_UNROLL
      for (int i = 0; i < STREAMS; i++) from[i] += leap;
      return;
    }
    if (to_w == windows) {
      to_w = 0;
      if (++to_pass == passes) to_pass = 0, to_m++;
      to_parts = ds4q_least(parts - 2 * to_pass, 2);
    }
    if (to_m < source.count) seek();
  };
  auto x_of = [&](int m) { return memory.x + (two && (m & 1) ? DS4Q_X_FLOATS / 2 : 0); };
  auto copy_x = [&](int m, int pass) {
    int first = pass * DS4Q_PASS;
    ds4q_copy_x(source.x(m) + first, ds4q_least(s.cols - first, DS4Q_PASS), x_of(m));
  };

  copy_x(0, 0);
  if (windows == 0) to_m = source.count;
  if (windows) seek();
  copy_windows(memory.stage);
  ds4q_copy_commit();
  int turn = 0;  // bytes to the stage of this step
  for (int m = 0; m < source.count; m++) {
    ds4q_tables tables[2] = {source.tables(m, 0), source.tables(m, 1)};
    for (int pass = 0; pass < passes; pass++) {
      if ((m || pass) && !two) {
        ds4q_barrier();  // all have read the x before
        copy_x(m, pass);
        ds4q_copy_commit();
      }
      ds4q_copy_wait<0>();
      ds4q_barrier();
      if (two && m + 1 < source.count) copy_x(m + 1, 0);
      int pass_parts = ds4q_least(parts - 2 * pass, 2);
      const float* x = x_of(m) + tile * DS4Q_RUN;
      for (int w = 0; w < windows; w += STREAMS) {
        float totals[STREAMS], factors[STREAMS];
        DS4Q_UNROLL
        for (int i = 0; i < STREAMS; i++) {
          totals[i] = pass ? memory.totals[(w + i) * DS4Q_LANES + lane] : 0.0f;
        }
        DS4Q_ROLLED
        for (int part = 0; part < pass_parts; part++) {
          const ds4q_u8* stage = memory.stage + turn;
          turn = DS4Q_STAGE_BYTES - turn;
          ds4q_copy_wait<0>();
          ds4q_group_barrier();
          copy_windows(memory.stage + turn);
          ds4q_copy_commit();
          if (part == 0) {
            DS4Q_UNROLL
            for (int i = 0; i < STREAMS; i++) {
              const ds4q_u8* row = stage + i * window::BYTES + number * s.row_bytes;
              factors[i] = format::factor(*(const ds4q_u16*)row);
            }
          }
          DS4Q_UNROLL
          for (int b = 0; b < DS4Q_TILE_BLOCKS; b++) {
            ds4q_codes codes[STREAMS];
            DS4Q_UNROLL
            for (int i = 0; i < STREAMS; i++) {
              codes[i] = ds4q_read_block<DECODER>(stage + i * window::BYTES,
                                                  own + b * format::BLOCK_BYTES);
            }
            const float* place = x + part * DS4Q_LANES * DS4Q_RUN + b * DS4Q_BLOCK;
            ds4q_add_blocks<DECODER, STREAMS>(codes, tables, place, totals);
          }
        }
        if (pass + 1 < passes) {
          DS4Q_UNROLL
          for (int i = 0; i < STREAMS; i++) memory.totals[(w + i) * DS4Q_LANES + lane] = totals[i];
        } else {
          DS4Q_UNROLL
          for (int i = 0; i < STREAMS; i++) {
            if (pass) factors[i] = ds4q_factor<DECODER>(source.at(m, w + i));
          }
          done(m, w, number, totals, factors);
        }
      }
    }
  }
}

// Products of `rows` wide rows, an even number or none, with x; `row(r)` is where row r begins.
// `done(r, total)` is called by all lanes with their totals, rows in order. All groups of a block
// call this at once.
template <int DECODER, class ROW, class DONE>
DS4Q_FN void ds4q_wide_rows(ROW row, int rows, int cols, const float* x, const ds4q_memory& memory,
                            DONE done) {
  using format = ds4q_format<DECODER>;
  constexpr int ROWS = 2, PIECES = format::BLOCK_BYTES / 64, AHEAD = 4 / PIECES;
  constexpr int LEAP = 8 * DS4Q_LANES;
  struct step {
    ds4q_piece held[AHEAD][ROWS][PIECES];
  };
  int lane = 8 * (int)ds4q_lane();
  int to_row = 0, to_c = 0;  // what is loaded next
  const ds4q_piece* from[ROWS];
  auto seek = [&]() {
    DS4Q_UNROLL
    for (int r = 0; r < ROWS; r++) {
      from[r] = (const ds4q_piece*)row(to_row + r) + lane / 8 * PIECES;
    }
  };
  auto load = [&](step& s) {
    if (to_row == rows) return;
    DS4Q_UNROLL
    for (int a = 0; a < AHEAD; a++) {
      DS4Q_UNROLL
      for (int r = 0; r < ROWS; r++) {
        DS4Q_UNROLL
        for (int i = 0; i < PIECES; i++) s.held[a][r][i] = from[r][a * DS4Q_LANES * PIECES + i];
      }
    }
    DS4Q_UNROLL
    for (int r = 0; r < ROWS; r++) from[r] += AHEAD * DS4Q_LANES * PIECES;
    if ((to_c += AHEAD * LEAP) < cols) return;
    to_c = 0;
    if ((to_row += ROWS) < rows) seek();
  };
  auto add = [&](const step& s, int c, float* totals) {
    DS4Q_UNROLL
    for (int a = 0; a < AHEAD; a++) {
      const float* place = memory.x + (c + lane + a * LEAP) / 2;
      ds4q_four first = ds4q_read_four(place), last = ds4q_read_four(place + DS4Q_WIDE_COLS / 2);
      DS4Q_UNROLL
      for (int r = 0; r < ROWS; r++) {
        ds4q_u32 words[4 * PIECES];
        DS4Q_UNROLL
        for (int i = 0; i < 4 * PIECES; i++) words[i] = s.held[a][r][i / 4].words[i % 4];
        float level[8];
        format::eight(words, nullptr, ds4q_fixed_tables(0, 0), 0, level);
        DS4Q_UNROLL
        for (int i = 0; i < 8; i++) {
          totals[r] = ds4q_fma(level[i], i < 4 ? first.x[i] : last.x[i - 4], totals[r]);
        }
      }
    }
  };
  step even, odd;
  if (rows) seek();
  load(even);
  ds4q_copy_wide_x(x, cols, memory.x);
  ds4q_copy_commit();
  ds4q_copy_wait<0>();
  ds4q_barrier();
  int r = 0, c = 0;
  float totals[ROWS] = {};
  auto advance = [&](const step& s) {
    add(s, c, totals);
    if ((c += AHEAD * LEAP) < cols) return;
    DS4Q_UNROLL
    for (int i = 0; i < ROWS; i++) {
      done(r + i, totals[i]);
      totals[i] = 0.0f;
    }
    c = 0, r += ROWS;
  };
  while (r < rows) {
    load(odd);
    advance(even);
    if (r == rows) break;
    load(even);
    advance(odd);
  }
}
