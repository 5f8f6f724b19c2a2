// Owns products of packed matrices with rows of activations. Not: experts (moe.hip).
//
// linear: grid (sum over jobs of ceil(rows / block_rows), 1, 1), 128 threads, LDS 39936; one
//   token. A block takes block_rows rows of one job, each group of 32 lanes a fourth of them.
// linear_batch: the same grid, 128 threads, no LDS; any number of tokens, eight of which share
//   what is read of the weights.
//
// y[t * y_stride + row] = w[row] . x[t * x_stride ...]. first_block of a job is the number of
// blocks of those before it. x is 16-byte aligned, its stride a multiple of 4; rows of weights
// lie at any byte, and 16 readable bytes follow the last. A product is that of ds4q_dot.h and
// depends neither on kernel nor on jobs or tokens. Compiled once for each decoder. Hashes
// compared on an NVIDIA H200 and on the CPU; nothing here has run on AMD hardware.
#include "ds4q_rows.h"

#ifndef DS4Q_DECODER
#define DS4Q_DECODER 21
#endif

struct linear_source {
  const float* from;
  const ds4q_u8* data;  // the group's first row
  int per_window, row_bytes;
  ds4q_tables table;
  static constexpr int count = 1;

  DS4Q_FN const float* x(int) const { return from; }
  DS4Q_FN const ds4q_u8* at(int, int w) const {
    return data + (ds4q_u64)(w * per_window) * row_bytes;
  }
  DS4Q_FN ds4q_tables tables(int, int) const { return table; }
};

struct linear_place {  // what a group computes
  const ds4q_job& job;
  int first, rows;
  bool whole;  // all groups of the block have that many rows
};
DS4Q_FN linear_place linear_place_of(const ds4q_job* jobs, int n_jobs) {
  int number = 0;
  while (number + 1 < n_jobs && (int)ds4q_block_x() >= jobs[number + 1].first_block) number++;
  const ds4q_job& job = jobs[number];
  int rows = job.block_rows / DS4Q_GROUPS;
  int block = ((int)ds4q_block_x() - job.first_block) * job.block_rows;
  int first = block + (int)ds4q_thread() / DS4Q_LANES * rows;
  return {job, first, ds4q_least(rows, job.w.rows - first), block + job.block_rows <= job.w.rows};
}

DS4Q_KERNEL(linear, DS4Q_THREADS, (const ds4q_job* jobs, int n_jobs, int tokens)) {
  DS4Q_SHARED(ds4q_u8, shared, DS4Q_SHARED_BYTES);
  ds4q_memory memory = ds4q_memory_of(shared);
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  const ds4q_matrix w = job.w;
  const ds4q_u8* data = w.data + (ds4q_u64)place.first * w.row_bytes;
  ds4q_tables tables = ds4q_tables_of<DS4Q_DECODER>(w.books);
  float* y = job.y + place.first;
  if (!place.whole || !ds4q_streams<DS4Q_DECODER>(w, (ds4q_u64)w.data, place.rows)) {
    for (int r = 0; r < place.rows; r++) {
      const ds4q_u8* row = data + (ds4q_u64)r * w.row_bytes;
      float total;
      ds4q_any_row<DS4Q_DECODER, 1>(row, w.cols, tables, job.x, 0, 1, &total);
      float sum = ds4q_group_sum(total) * ds4q_format<DS4Q_DECODER>::factor(row);
      if (ds4q_lane() == 0) y[r] = sum;
    }
  } else if constexpr (ds4q_is_wide<DS4Q_DECODER>) {
    ds4q_wide_rows<DS4Q_DECODER>([&](int r) { return data + (ds4q_u64)r * w.row_bytes; }, place.rows,
                                 w.cols, job.x, memory, [&](int r, float total) {
                                   float sum = ds4q_group_sum(total);
                                   if (ds4q_lane() == 0) y[r] = sum;
                                 });
  } else {
    ds4q_shape s = ds4q_shape_of(w);
    linear_source source = {job.x, data, s.rows, s.row_bytes, tables};
    ds4q_packed_rows<DS4Q_DECODER>(
        source, s, place.rows / s.rows, memory,
        [&](int, int w, int number, float total, float factor) {
          float sum = ds4q_row_sum(total, s.lanes) * factor;
          if (ds4q_lane() % s.lanes == 0) y[w * s.rows + number] = sum;
        });
  }
}

DS4Q_KERNEL(linear_batch, DS4Q_THREADS, (const ds4q_job* jobs, int n_jobs, int tokens)) {
  linear_place place = linear_place_of(jobs, n_jobs);
  const ds4q_job& job = place.job;
  ds4q_tables tables = ds4q_tables_of<DS4Q_DECODER>(job.w.books);
  for (int r = place.first; r < place.first + place.rows; r++) {
    const ds4q_u8* row = job.w.data + (ds4q_u64)r * job.w.row_bytes;
    float factor = ds4q_format<DS4Q_DECODER>::factor(row);
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
