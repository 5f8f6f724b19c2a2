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

DS4Q_KERNEL_OF(LINEAR_RESIDENT, linear, DS4Q_THREADS,
               (const ds4q_job* jobs, int n_jobs, int tokens)) {
  DS4Q_SHARED(ds4q_u8, shared, DS4Q_SHARED_BYTES);
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  float* y = job.y + place.first;
  ds4q_products<DS4Q_DECODER>(job.w, place.first, place.rows, job.x, shared,
                              [&](int r, float sum) { y[r] = sum; });
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
