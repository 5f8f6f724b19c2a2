// Owns products of packed matrices with rows of activations. Not: experts (moe.hip).
//
// Built once for each decoder. jobs [n_jobs], whose blocks begin at first_block, ascending; a block
// takes job.block_rows rows of one job (a multiple of 6), its six groups an equal share each.
// y[t * y_stride + row] = row . x[t * x_stride ...]; x and its stride are 16-byte aligned, rows of
// weights lie anywhere. Sums as ds4q_dot.h defines, so both kernels give the same bits.
//
// linear: one token. Grid (sum of ceil(rows / block_rows), 1, 1), block 192, LDS 47616 or 0.
// linear_batch: any number. The same grid, block 192, LDS 36864. Weights are decoded once for each 8
//   tokens, whose activations the block's groups share: 32 columns of each lane at a time.
//
// linear measured on an NVIDIA H200 (device copy 4.28 TB/s), graph replays over more than its cache
// holds: BF16 [129280][4096] 242 us (102 % of the copy), [4096][8192] 17.4 us (90 %); Q8F16
// [32768][1024] 13.6 us (61 %), [4096][8192] 15.9 us (52 %). Nothing here has run on AMD hardware.
#include "ds4q_rows.h"

#ifndef DS4Q_DECODER
#define DS4Q_DECODER 21
#endif
#define LINEAR_RESIDENT (ds4q_is_wide<DS4Q_DECODER> ? 3 : 4)  // wide rows lie in registers

struct linear_place {  // what a group computes
  const ds4q_job& job;
  int first, rows;
};
DS4Q_FN linear_place linear_place_of(const ds4q_job* jobs, int n_jobs) {
  int number = 0;
  while (number + 1 < n_jobs && (int)ds4q_block_x() >= jobs[number + 1].first_block) number++;
  const ds4q_job& job = jobs[number];
  int rows = job.block_rows / DS4Q_GROUPS;
  int first = ((int)ds4q_block_x() - job.first_block) * job.block_rows +
              (int)ds4q_thread() / DS4Q_LANES * rows;
  rows = ds4q_least(rows, job.w.rows - first);
  return {job, first, rows > 0 ? rows : 0};
}

DS4Q_KERNEL_OF(LINEAR_RESIDENT, linear, DS4Q_THREADS,
               (const ds4q_job* jobs, int n_jobs, int tokens)) {
  DS4Q_SHARED(ds4q_u8, shared, DS4Q_SHARED_BYTES);
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  float* y = job.y + place.first;
  ds4q_products<DS4Q_DECODER>(job.w, place.first, place.rows, job.x, shared,
                              [&](int r, float sum) { y[r] = sum; });
}

#define BATCH_WINDOWS 2  // that a group multiplies at once: what it reads of x serves both
#define BATCH_RUN (DS4Q_BLOCK + 4)  // floats between lanes' x in shared memory, for the banks' sake
#define BATCH_FLOATS (DS4Q_LANES * BATCH_RUN)  // of a token
#define BATCH_PIECES (DS4Q_BLOCK / 8)  // of a wide lane, 256 columns apart

// How rows lie over the lanes of a group. Short ones share it, where the sum allows.
template <int DECODER>
DS4Q_FN ds4q_shape batch_shape_of(const ds4q_matrix& w) {
  bool shared = !ds4q_is_wide<DECODER> && (w.cols == 512 || w.cols == 1024 || w.cols == 2048);
  return shared ? ds4q_shape_of(w) : ds4q_shape{w.cols, w.row_bytes, DS4Q_LANES, 1};
}

// Column of the first of four, `quad` of 8, that lane `lane` takes of the step at `first`.
template <int DECODER>
DS4Q_FN int batch_column(int first, int lane, int quad) {
  if constexpr (ds4q_is_wide<DECODER>) return first + quad / 2 * 256 + 8 * lane + quad % 2 * 4;
  return first + lane * DS4Q_TILE + 4 * quad;
}

// Copies x of a step, [count][lanes][32 columns], to shared memory. All threads of the block.
template <int DECODER>
DS4Q_FN void batch_stage(float* shared, const float* x, ds4q_u64 x_stride, int count, int first,
                         const ds4q_shape& s) {
  ds4q_barrier();  // all have read the x before
  for (int i = (int)ds4q_thread(); i < 8 * s.lanes * count; i += DS4Q_THREADS) {
    int token = i / (8 * s.lanes), at = i % (8 * s.lanes);
    // Neighbours copy neighbours: columns go by lanes first where a lane's are far apart.
    int lane = ds4q_is_wide<DECODER> ? at % 64 / 2 : at / 8;
    int quad = ds4q_is_wide<DECODER> ? at / 64 * 2 + at % 2 : at % 8;
    int column = batch_column<DECODER>(first, lane, quad);
    if (column >= s.cols) continue;
    ds4q_copy16(shared + token * BATCH_FLOATS + lane * BATCH_RUN + 4 * quad,
                x + token * x_stride + column);
  }
  ds4q_copy_commit();
  ds4q_copy_wait<0>();
  ds4q_barrier();
}

// BYTES bytes, a multiple of 16, from any address; `whole`: from a multiple of 16.
template <int BYTES>
DS4Q_FN void batch_load(const ds4q_u8* at, bool whole, ds4q_u32* words) {
  if (!whole) return ds4q_load_words<BYTES>(at, words);
  DS4Q_UNROLL
  for (int i = 0; i < BYTES / 16; i++) {
    ds4q_piece piece = ds4q_stream16((const ds4q_piece*)at + i);
    DS4Q_UNROLL
    for (int j = 0; j < 4; j++) words[4 * i + j] = piece.words[j];
  }
}

// A lane's totals of BATCH_WINDOWS rows with `count` tokens. All threads of the block; a group that
// is not `live` only copies.
template <int DECODER>
DS4Q_FN void batch_totals(const ds4q_u8* const* rows, const ds4q_tables& tables, const float* x,
                          ds4q_u64 x_stride, int count, const ds4q_shape& s, bool live,
                          float* shared, float (*totals)[DS4Q_TOKENS]) {
  using format = ds4q_format<DECODER>;
  int lane = (int)ds4q_lane(), tile = lane % s.lanes;
  const float* own = shared + tile * BATCH_RUN;
  if constexpr (ds4q_is_wide<DECODER>) {
    constexpr int BYTES = format::BLOCK_BYTES / 4;  // of eight weights
    bool whole = (((ds4q_u64)rows[0] | (ds4q_u64)s.row_bytes) & 15) == 0;
    for (int first = 0; first < s.cols; first += DS4Q_BLOCK * DS4Q_LANES) {
      ds4q_u32 held[BATCH_PIECES][BATCH_WINDOWS][BYTES / 4];
      DS4Q_UNROLL
      for (int a = 0; a < BATCH_PIECES; a++) {
        int column = batch_column<DECODER>(first, lane, 2 * a);
        if (!live || column >= s.cols) break;
        DS4Q_UNROLL
        for (int i = 0; i < BATCH_WINDOWS; i++) {
          batch_load<BYTES>(rows[i] + (ds4q_u64)(column / 8) * BYTES, whole, held[a][i]);
        }
      }
      batch_stage<DECODER>(shared, x, x_stride, count, first, s);
      DS4Q_UNROLL
      for (int a = 0; a < BATCH_PIECES; a++) {
        if (!live || batch_column<DECODER>(first, lane, 2 * a) >= s.cols) break;
        float level[BATCH_WINDOWS][8];
        DS4Q_UNROLL
        for (int i = 0; i < BATCH_WINDOWS; i++) {
          format::eight(held[a][i], nullptr, tables, 0, level[i]);
        }
        DS4Q_UNROLL
        for (int t = 0; t < DS4Q_TOKENS; t++) {
          if (t >= count) break;
          DS4Q_UNROLL
          for (int c = 0; c < 8; c += 4) {
            ds4q_four four = ds4q_read_four(own + t * BATCH_FLOATS + 8 * a + c);
            DS4Q_UNROLL
            for (int i = 0; i < BATCH_WINDOWS; i++) {
              DS4Q_UNROLL
              for (int j = 0; j < 4; j++) {
                totals[i][t] = ds4q_fma(level[i][c + j], four.x[j], totals[i][t]);
              }
            }
          }
        }
      }
    }
  } else {
    constexpr int HALVES = format::HALVES ? 2 : 1;
    for (int part = 0; part < s.cols; part += DS4Q_PART) {
      DS4Q_ROLLED
      for (int b = 0; b < DS4Q_TILE_BLOCKS; b++) {
        int first = part + b * DS4Q_BLOCK, column = batch_column<DECODER>(first, tile, 0);
        bool there = live && column < s.cols;
        ds4q_codes codes[BATCH_WINDOWS];
        DS4Q_UNROLL
        for (int i = 0; i < BATCH_WINDOWS; i++) {
          if (there) codes[i] = ds4q_load_block<DECODER>(rows[i], column / DS4Q_BLOCK);
        }
        batch_stage<DECODER>(shared, x, x_stride, count, first, s);
        if (!there) continue;
        float acc[BATCH_WINDOWS][DS4Q_TOKENS][HALVES] = {};
        DS4Q_UNROLL
        for (int c = 0; c < DS4Q_BLOCK / 8; c++) {
          float level[BATCH_WINDOWS][8];
          DS4Q_UNROLL
          for (int i = 0; i < BATCH_WINDOWS; i++) {
            format::eight(codes[i].words, codes[i].bytes, tables, c, level[i]);
          }
          DS4Q_UNROLL
          for (int t = 0; t < DS4Q_TOKENS; t++) {
            if (t >= count) break;
            DS4Q_UNROLL
            for (int h = 0; h < 2; h++) {
              int place = ds4q_place<DECODER>(c, h), half = HALVES == 2 ? place / 16 : 0;
              ds4q_four four = ds4q_read_four(own + t * BATCH_FLOATS + place);
              DS4Q_UNROLL
              for (int i = 0; i < BATCH_WINDOWS; i++) {
                DS4Q_UNROLL
                for (int j = 0; j < 4; j++) {
                  acc[i][t][half] = ds4q_fma(level[i][4 * h + j], four.x[j], acc[i][t][half]);
                }
              }
            }
          }
        }
        DS4Q_UNROLL
        for (int i = 0; i < BATCH_WINDOWS; i++) {
          DS4Q_UNROLL
          for (int t = 0; t < DS4Q_TOKENS; t++) {
            DS4Q_UNROLL
            for (int h = 0; h < HALVES; h++) {
              totals[i][t] = ds4q_fma(format::scale(codes[i].bytes, tables, h), acc[i][t][h],
                                      totals[i][t]);
            }
          }
        }
      }
    }
  }
}

DS4Q_KERNEL(linear_batch, DS4Q_THREADS, (const ds4q_job* jobs, int n_jobs, int tokens)) {
  DS4Q_SHARED(float, shared, DS4Q_TOKENS * BATCH_FLOATS);
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  const ds4q_matrix w = job.w;
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(w.books);
  ds4q_shape s = batch_shape_of<DS4Q_DECODER>(w);
  int lane = (int)ds4q_lane(), number = lane / s.lanes;
  int most = job.block_rows / DS4Q_GROUPS;  // the same for all groups: they meet at barriers
  for (int begin = 0; begin < most; begin += BATCH_WINDOWS * s.rows) {
    bool live = begin < place.rows;
    const ds4q_u8* rows[BATCH_WINDOWS];
    DS4Q_UNROLL
    for (int i = 0; i < BATCH_WINDOWS; i++) {  // past the end the last row once more
      int r = ds4q_least(begin + i * s.rows + number, place.rows - 1);
      rows[i] = w.data + (ds4q_u64)(place.first + r) * w.row_bytes;
    }
    for (int token = 0; token < tokens; token += DS4Q_TOKENS) {
      int count = ds4q_least(tokens - token, DS4Q_TOKENS);
      float totals[BATCH_WINDOWS][DS4Q_TOKENS] = {};
      batch_totals<DS4Q_DECODER>(rows, tables, job.x + (ds4q_u64)token * job.x_stride,
                                     job.x_stride, count, s, live, shared, totals);
      if (!live) continue;
      DS4Q_UNROLL
      for (int i = 0; i < BATCH_WINDOWS; i++) {
        int r = begin + i * s.rows + number;
        float factor = ds4q_factor<DS4Q_DECODER>(rows[i]);
        DS4Q_UNROLL
        for (int t = 0; t < DS4Q_TOKENS; t++) {
          if (t >= count) break;
          float sum = ds4q_window_sum(s, totals[i][t]) * factor;
          if (r < place.rows && lane % s.lanes == 0) {
            job.y[(ds4q_u64)(token + t) * job.y_stride + place.first + r] = sum;
          }
        }
      }
    }
  }
}
