// Owns routing: which experts a token goes to, and with what weights. The gate's product is
// linear.hip's.
//
// route: grid (1, T), block 32, LDS 8192. logits [T][experts], experts <= 1024; bias [experts] or
//   null; by_token [vocabulary][k] or null, looked up by tokens [T]; ids, weights [T][k], k <= 32.
//   score = sqrt(softplus(z)), softplus(z) = max(z, 0) + log1p(exp(-|z|)). ids: by_token's row, or
//   the k greatest of score + bias, best first, the lower id on ties; NaN ranks below every number.
//   weights: score / (1e-20 + the scores in the order of ids) * factor.
// Measured: not yet on a device; nothing here has run on AMD hardware.
#include "ds4q_dense.h"

DS4Q_KERNEL(route, 32,
            (const float* logits, const float* bias, const int* by_token, const int* tokens,
             int* ids, float* weights, int experts, int k, float factor)) {
  DS4Q_SHARED(float, scores, 1024);
  DS4Q_SHARED(ds4q_u32, merits, 1024);
  ds4q_u32 t = ds4q_block_y(), lane = ds4q_lane();
  const float* row = logits + (ds4q_u64)t * (ds4q_u32)experts;
  for (ds4q_u32 e = lane; e < (ds4q_u32)experts; e += DS4Q_LANES) {
    float z = row[e];
    float tail = ds4q_log1p(ds4q_exp(z > 0.0f ? -z : z));
    float score = ds4q_sqrt((z > 0.0f ? z : 0.0f) + tail);
    scores[e] = score;
    merits[e] = ds4q_ordered(bias ? score + bias[e] : score);
  }
  ds4q_barrier();

  int chosen = 0;  // lane i keeps the i-th
  if (by_token) {
    if ((int)lane < k) chosen = by_token[(ds4q_u64)(ds4q_u32)tokens[t] * (ds4q_u32)k + lane];
  } else {
    for (int i = 0; i < k; i++) {
      ds4q_u64 best = 0;
      for (ds4q_u32 e = lane; e < (ds4q_u32)experts; e += DS4Q_LANES) {
        ds4q_u64 key = (ds4q_u64)merits[e] << 32 | ~e;
        best = key > best ? key : best;
      }
      best = ds4q_group_top(best);
      ds4q_u32 winner = ~(ds4q_u32)best;
      if ((int)lane == i) chosen = (int)winner;
      if (lane == winner % DS4Q_LANES) merits[winner] = 0;  // its own lane's: no other reads it
    }
  }
  float score = (int)lane < k ? scores[chosen] : 0.0f;
  float total = 1e-20f;
  for (int i = 0; i < k; i++) total = total + ds4q_shuffle(score, (ds4q_u32)i);
  if ((int)lane < k) {
    ids[t * (ds4q_u32)k + lane] = chosen;
    weights[t * (ds4q_u32)k + lane] = score / total * factor;
  }
}
