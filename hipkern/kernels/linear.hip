// Owns products of packed matrices with rows of activations. Not: experts (moe.hip).
#include "ds4q_dot.h"

#ifndef DS4Q_DECODER
#define DS4Q_DECODER 21
#endif
#define LINEAR_THREADS 128
#define LINEAR_ROWS 8  // rows of a job that a block takes

DS4Q_KERNEL(linear, LINEAR_THREADS, (const ds4q_job* jobs, int n_jobs, int tokens)) {
  int number = 0;
  while (number + 1 < n_jobs && (int)ds4q_block_x() >= jobs[number + 1].first_block) number++;
  const ds4q_job& job = jobs[number];
  ds4q_tables tables = ds4q_tables_of<DS4Q_DECODER>(job.w.books);
  int first = ((int)ds4q_block_x() - job.first_block) * LINEAR_ROWS;
  for (int i = (int)ds4q_thread() / DS4Q_LANES; i < LINEAR_ROWS; i += LINEAR_THREADS / DS4Q_LANES) {
    int row = first + i;
    if (row >= job.w.rows) break;
    for (int t = 0; t < tokens; t += DS4Q_TOKENS) {
      float y[DS4Q_TOKENS];
      int count = tokens - t < DS4Q_TOKENS ? tokens - t : DS4Q_TOKENS;
      ds4q_row<DS4Q_DECODER, DS4Q_TOKENS>(job.w, tables, row, job.x + (ds4q_u64)t * job.x_stride,
                                          job.x_stride, count, y);
      if (ds4q_lane() == 0) {
        for (int i = 0; i < count; i++) job.y[(ds4q_u64)(t + i) * job.y_stride + row] = y[i];
      }
    }
  }
}
