// Owns the hyper-connections: the mixing of streams after a sub-block, their collapse before the
// next one, and its RMSNorm. Products of packed matrices are linear.hip's.
//
// Built for DS4Q_STREAMS = n streams (default 4, at most 5). Streams x [T][n][d], d a multiple of 4
// and at most 8192; base pointers 16-byte aligned. S = ceil(d / 32) slices.
//
// hc_mix: grid (S, T), block 256, LDS 0. Slice s owns columns 32 s .. 32 s + 31 of all streams of a
//   token: no other block reads or writes them, so they are mixed in place. With y the sum of
//   parts [T][n_parts][d], ascending, post [T][n] and comb [T][n][n]:
//   x[k] = post[k] y + comb[0][k] x[0] + .. + comb[n-1][k] x[n-1], fused from the left. n_parts 0: x
//   stays. Then partial [T][rows + 1][S]: rows of fn [rows][n d]
//   times the slice's values, and last their sum of squares; lane c fuses column c of the streams
//   in ascending order, lanes as ds4q_group_sum.
// hc_sum: grid (ceil(d / 128), T, 1), block 128, LDS 0. As hc_mix sums them: all [T][d] = the sum of
//   parts, most [T][d] = that of all but the last. For a step that shows them; n_parts >= 2.
// hc_collapse: grid (2, T), block 1024, LDS 272. scale [3], base [(2 + n) n], norm [d]. Block 0:
//   collapsed [T][d] (or null) = sum over j of pre[j] x[j], fused ascending; normed [T][d]. Block
//   1: post [T][n], comb [T][n][n] after Sinkhorn, one matrix in one group: row and column sums are
//   eps plus the elements ascending. Apart from each other because Sinkhorn is one long chain.
// hc_head: grid (1, T), block 1024, LDS 272. As block 0 of hc_collapse, with scale [1] and base
//   [n]. Both sum partials: lane l takes slices l, l + 32, .. in order, lanes as ds4q_group_sum;
//   squares of the collapsed: a thread's columns in order, then ds4q_block_sum.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// hc_mix 2.6 us, hc_collapse 4.3 us. Nothing here has run on AMD hardware.
#include "ds4q_dense.h"

#ifndef DS4Q_STREAMS
#define DS4Q_STREAMS 4
#endif
#define HC_COLUMNS 32  // of a slice: one lane each
#define HC_ROUNDS (((2 + DS4Q_STREAMS) * DS4Q_STREAMS + 8) / 8)  // 8 rows of fn and the squares
#define HC_PARTS 6     // parts that are loaded at once
#define HC_SUM_THREADS 128
#define HC_QUADS 2     // of a thread that collapses: 1024 threads cover 8192 columns

DS4Q_KERNEL(hc_mix, 256,
            (float* x, const float* parts, const float* post, const float* comb, const float* fn,
             float* partial, int n_parts, int d, int rows)) {
  ds4q_u32 t = ds4q_block_y(), slices = ds4q_blocks_x();
  int column = (int)(ds4q_block_x() * HC_COLUMNS + ds4q_lane());
  bool live = column < d;
  float* at = x + (ds4q_u64)t * DS4Q_STREAMS * (ds4q_u32)d + (ds4q_u32)column;
  // All loads are asked for before anything is waited for.
  float v[DS4Q_STREAMS], weights[HC_ROUNDS][DS4Q_STREAMS];
  DS4Q_UNROLL
  for (int j = 0; j < DS4Q_STREAMS; j++) v[j] = live ? at[(ds4q_u64)j * (ds4q_u32)d] : 0.0f;
  DS4Q_UNROLL
  for (int i = 0; i < HC_ROUNDS; i++) {
    int r = (int)(ds4q_thread() / DS4Q_LANES) + 8 * i;
    DS4Q_UNROLL
    for (int j = 0; j < DS4Q_STREAMS; j++) {
      ds4q_u64 place = (ds4q_u64)(r * DS4Q_STREAMS + j) * (ds4q_u32)d + (ds4q_u32)column;
      weights[i][j] = live && r < rows ? fn[place] : 0.0f;
    }
  }
  // Every group mixes for itself, so that the products below need no shared memory; one stores.
  if (n_parts) {
    const float* part = parts + (ds4q_u64)t * (ds4q_u32)n_parts * (ds4q_u32)d + (ds4q_u32)column;
    float added = live ? part[0] : 0.0f;
    for (int first = 1; first < n_parts; first += HC_PARTS) {
      float more[HC_PARTS];
      DS4Q_UNROLL
      for (int i = 0; i < HC_PARTS; i++) {
        bool there = live && first + i < n_parts;
        more[i] = there ? part[(ds4q_u64)(first + i) * (ds4q_u32)d] : 0.0f;
      }
      DS4Q_UNROLL
      for (int i = 0; i < HC_PARTS; i++) added = first + i < n_parts ? added + more[i] : added;
    }
    float old[DS4Q_STREAMS];
    DS4Q_UNROLL
    for (int j = 0; j < DS4Q_STREAMS; j++) old[j] = v[j];
    DS4Q_UNROLL
    for (int k = 0; k < DS4Q_STREAMS; k++) {
      v[k] = post[t * DS4Q_STREAMS + k] * added;
      DS4Q_UNROLL
      for (int j = 0; j < DS4Q_STREAMS; j++) {
        v[k] = ds4q_fma(comb[(t * DS4Q_STREAMS + j) * DS4Q_STREAMS + k], old[j], v[k]);
      }
    }
    ds4q_barrier();  // all groups have read before one writes
    if (live && ds4q_thread() < DS4Q_LANES) {
      DS4Q_UNROLL
      for (int j = 0; j < DS4Q_STREAMS; j++) at[(ds4q_u64)j * (ds4q_u32)d] = v[j];
    }
  }
  float* sums = partial + (ds4q_u64)t * (rows + 1) * slices + ds4q_block_x();
  DS4Q_UNROLL
  for (int i = 0; i < HC_ROUNDS; i++) {
    int r = (int)(ds4q_thread() / DS4Q_LANES) + 8 * i;
    float sum = 0.0f;
    DS4Q_UNROLL
    for (int j = 0; j < DS4Q_STREAMS; j++) {
      sum = ds4q_fma(r < rows ? weights[i][j] : v[j], v[j], sum);
    }
    sum = ds4q_group_sum(sum);
    if (r <= rows && ds4q_lane() == 0) sums[(ds4q_u64)r * slices] = sum;
  }
}

// Sums of partial over the slices, to `mix` [rows + 1] in shared memory; returns what fn's products
// are to be multiplied by. 32 groups.
DS4Q_FN float hc_sums(const float* partial, float* mix, int rows, int d, int slices, float eps) {
  const float* sums = partial + (ds4q_u64)ds4q_block_y() * (rows + 1) * (ds4q_u32)slices;
  for (int r = (int)(ds4q_thread() / DS4Q_LANES); r <= rows; r += 1024 / DS4Q_LANES) {
    float sum = 0.0f;
    for (int s = (int)ds4q_lane(); s < slices; s += DS4Q_LANES) sum = sum + sums[r * slices + s];
    sum = ds4q_group_sum(sum);
    if (ds4q_lane() == 0) mix[r] = sum;
  }
  ds4q_barrier();
  return ds4q_inverse_rms(mix[rows], DS4Q_STREAMS * d, eps);
}

DS4Q_FN void hc_weigh(const float* x, const float* partial, const float* scale, const float* base,
                      const float* norm, float* collapsed, float* normed, float* mix, float* room,
                      int rows, int d, int slices, float hc_eps, float norm_eps) {
  ds4q_u64 t = ds4q_block_y();
  const float* streams = x + t * DS4Q_STREAMS * (ds4q_u32)d;
  // All loads are asked for before anything is waited for.
  ds4q_quad v[HC_QUADS][DS4Q_STREAMS], weights[HC_QUADS];
  DS4Q_UNROLL
  for (int q = 0; q < HC_QUADS; q++) {
    int column = 4 * (int)(ds4q_thread() + 1024 * q);
    weights[q] = column < d ? ds4q_load4(norm + column) : ds4q_quad{};
    DS4Q_UNROLL
    for (int j = 0; j < DS4Q_STREAMS; j++) {
      v[q][j] = column < d ? ds4q_load4(streams + (ds4q_u64)j * d + column) : ds4q_quad{};
    }
  }
  float factor = hc_sums(partial, mix, rows, d, slices, norm_eps);
  int own = (int)ds4q_lane() < DS4Q_STREAMS ? (int)ds4q_lane() : 0;
  float pre = ds4q_sigmoid(mix[own] * factor * scale[0] + base[own]) + hc_eps;
  ds4q_quad sum[HC_QUADS] = {};
  DS4Q_UNROLL
  for (int j = 0; j < DS4Q_STREAMS; j++) {
    float weight = ds4q_shuffle(pre, (ds4q_u32)j);
    DS4Q_UNROLL
    for (int q = 0; q < HC_QUADS; q++) {
      DS4Q_UNROLL
      for (int i = 0; i < 4; i++) sum[q].v[i] = ds4q_fma(weight, v[q][j].v[i], sum[q].v[i]);
    }
  }
  float squares = 0.0f;
  DS4Q_UNROLL
  for (int q = 0; q < HC_QUADS; q++) {
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) squares = ds4q_fma(sum[q].v[i], sum[q].v[i], squares);
  }
  float r = ds4q_inverse_rms(ds4q_block_sum<32>(squares, room), d, norm_eps);
  DS4Q_UNROLL
  for (int q = 0; q < HC_QUADS; q++) {
    int column = 4 * (int)(ds4q_thread() + 1024 * q);
    if (column >= d) continue;
    if (collapsed) ds4q_store4(collapsed + t * (ds4q_u32)d + column, sum[q]);
    DS4Q_UNROLL
    for (int i = 0; i < 4; i++) sum[q].v[i] = weights[q].v[i] * (sum[q].v[i] * r);
    ds4q_store4(normed + t * (ds4q_u32)d + column, sum[q]);
  }
}

// `c` of lane j n + k over eps plus the sum of its row j, or of its column k.
DS4Q_FN float hc_over_row(float c, ds4q_u32 element, float eps) {
  float total = eps;
  DS4Q_UNROLL
  for (ds4q_u32 k = 0; k < DS4Q_STREAMS; k++) {
    total = total + ds4q_shuffle(c, element / DS4Q_STREAMS * DS4Q_STREAMS + k);
  }
  return c / total;
}
DS4Q_FN float hc_over_column(float c, ds4q_u32 element, float eps) {
  float total = eps;
  DS4Q_UNROLL
  for (ds4q_u32 j = 0; j < DS4Q_STREAMS; j++) {
    total = total + ds4q_shuffle(c, j * DS4Q_STREAMS + element % DS4Q_STREAMS);
  }
  return c / total;
}

DS4Q_KERNEL(hc_collapse, 1024,
            (const float* x, const float* partial, const float* scale, const float* base,
             const float* norm, float* collapsed, float* normed, float* post, float* comb, int d,
             int slices, int iterations, float hc_eps, float norm_eps)) {
  DS4Q_SHARED(float, mix, 32 + 4);
  DS4Q_SHARED(float, room, 32);
  const int n = DS4Q_STREAMS, rows = (2 + n) * n;
  if (ds4q_block_x() == 0) {
    hc_weigh(x, partial, scale, base, norm, collapsed, normed, mix, room, rows, d, slices, hc_eps,
             norm_eps);
    return;
  }
  float factor = hc_sums(partial, mix, rows, d, slices, norm_eps);
  if (ds4q_thread() >= DS4Q_LANES) return;
  ds4q_u32 t = ds4q_block_y(), lane = ds4q_lane();
  if (lane < n) {
    float gate = mix[n + lane] * factor * scale[1] + base[n + lane];
    post[t * n + lane] = 2.0f * ds4q_sigmoid(gate);
  }
  ds4q_u32 element = lane % (n * n);
  float c = mix[2 * n + element] * factor * scale[2] + base[2 * n + element];
  float top = c;
  DS4Q_UNROLL
  for (ds4q_u32 k = 0; k < n; k++) top = ds4q_max(top, ds4q_shuffle(c, element / n * n + k));
  c = hc_over_row(ds4q_exp(c - top), element, 0.0f) + hc_eps;
  c = hc_over_column(c, element, hc_eps);
  for (int i = 1; i < iterations; i++) {
    c = hc_over_row(c, element, hc_eps);
    c = hc_over_column(c, element, hc_eps);
  }
  if (lane < n * n) comb[t * (n * n) + lane] = c;
}

DS4Q_KERNEL(hc_head, 1024,
            (const float* x, const float* partial, const float* scale, const float* base,
             const float* norm, float* collapsed, float* normed, int d, int slices, float hc_eps,
             float norm_eps)) {
  DS4Q_SHARED(float, mix, 32 + 4);
  DS4Q_SHARED(float, room, 32);
  hc_weigh(x, partial, scale, base, norm, collapsed, normed, mix, room, DS4Q_STREAMS, d, slices,
           hc_eps, norm_eps);
}

DS4Q_KERNEL(hc_sum, HC_SUM_THREADS, (const float* parts, float* most, float* all, int n_parts, int d)) {
  int column = (int)(ds4q_block_x() * HC_SUM_THREADS + ds4q_thread()), token = (int)ds4q_block_y();
  if (column >= d) return;
  const float* part = parts + (ds4q_u64)token * n_parts * d + column;
  float sum = part[0];
  for (int i = 1; i < n_parts - 1; i++) sum = sum + part[(ds4q_u64)i * d];
  ds4q_u64 place = (ds4q_u64)token * d + column;
  most[place] = sum;
  all[place] = sum + part[(ds4q_u64)(n_parts - 1) * d];
}
