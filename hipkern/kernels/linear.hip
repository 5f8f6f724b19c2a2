// Owns products of packed matrices with rows of activations. Not: experts (moe.hip).
//
// Built once for each decoder. jobs [n_jobs], whose blocks begin at first_block, ascending; a block
// takes job.block_rows rows of one job (a multiple of 6), its six groups an equal share each.
// y[t * y_stride + row] = row . x[t * x_stride ...]; x and its stride are 16-byte aligned, rows of
// weights lie anywhere. Sums as ds4q_dot.h defines, so both kernels give the same bits.
//
// linear: one token. Grid (sum of ceil(rows / block_rows), 1, 1), block 192, LDS 47616 or 0.
// linear_batch: any number. The same grid, block 192, LDS 0. Weights are decoded once for each 8
//   tokens.
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

// The first rows of a group, as many as can be streamed; returns their number.
template <int DECODER>
DS4Q_FN int linear_stream(const ds4q_matrix& w, const ds4q_u8* data, int rows, const float* x,
                          float* y, const ds4q_tables& table, ds4q_u8* shared) {
  int lane = (int)ds4q_lane();
  if (!ds4q_streams<DECODER>(w, (ds4q_u64)w.data)) return 0;
  auto row = [&](int r) { return data + (ds4q_u64)r * w.row_bytes; };
  if constexpr (ds4q_is_wide<DECODER>) {
    ds4q_wide_rows<DECODER>(row, rows, w.cols, x, [&](int r, float total) {
      float sum = ds4q_group_sum(total);
      if (lane == 0) y[r] = sum;
    });
    return rows;
  } else {
    constexpr int STREAMS = ds4q_window<DECODER>::STREAMS;
    ds4q_shape s = ds4q_shape_of(w);
    int windows = ds4q_windows(s, rows / (s.rows * STREAMS) * STREAMS);
    ds4q_tables tables[2] = {table, table};
    ds4q_packed_rows<DECODER>(
        [&](int i) { return row(i * s.rows); }, tables, s, windows, x, ds4q_memory_of(shared),
        [&](int i, int number, const float* totals, const float* factors) {
          DS4Q_UNROLL
          for (int j = 0; j < STREAMS; j++) {
            float sum = ds4q_window_sum(s, totals[j]) * factors[j];
            if (lane % s.lanes == 0) y[(i + j) * s.rows + number] = sum;
          }
        });
    return windows * s.rows;
  }
}

DS4Q_KERNEL_OF(LINEAR_RESIDENT, linear, DS4Q_THREADS,
               (const ds4q_job* jobs, int n_jobs, int tokens)) {
  DS4Q_SHARED(ds4q_u8, shared, DS4Q_SHARED_BYTES);
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  const ds4q_matrix w = job.w;
  const ds4q_u8* data = w.data + (ds4q_u64)place.first * w.row_bytes;
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(w.books);
  float* y = job.y + place.first;
  int r = linear_stream<DS4Q_DECODER>(w, data, place.rows, job.x, y, tables, shared);
  for (; r < place.rows; r++) {  // what is not streamed
    const ds4q_u8* row = data + (ds4q_u64)r * w.row_bytes;
    float total;
    ds4q_any_row<DS4Q_DECODER, 1>(row, w.cols, tables, job.x, 0, 1, &total);
    float sum = ds4q_group_sum(total) * ds4q_factor<DS4Q_DECODER>(row);
    if (ds4q_lane() == 0) y[r] = sum;
  }
}

DS4Q_KERNEL(linear_batch, DS4Q_THREADS, (const ds4q_job* jobs, int n_jobs, int tokens)) {
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  ds4q_tables tables = ds4q_format<DS4Q_DECODER>::tables(job.w.books);
  for (int r = place.first; r < place.first + place.rows; r++) {
    const ds4q_u8* row = job.w.data + (ds4q_u64)r * job.w.row_bytes;
    float factor = ds4q_factor<DS4Q_DECODER>(row);
    for (int token = 0; token < tokens; token += DS4Q_TOKENS) {
      int count = ds4q_least(tokens - token, DS4Q_TOKENS);
      float totals[DS4Q_TOKENS];
      ds4q_any_row<DS4Q_DECODER, DS4Q_TOKENS>(row, job.w.cols, tables,
                                              job.x + (ds4q_u64)token * job.x_stride, job.x_stride,
                                              count, totals);
      DS4Q_UNROLL
      for (int t = 0; t < DS4Q_TOKENS; t++) {
        float sum = ds4q_group_sum(totals[t]) * factor;
        if (t < count && ds4q_lane() == 0) job.y[(ds4q_u64)(token + t) * job.y_stride + r] = sum;
      }
    }
  }
}
