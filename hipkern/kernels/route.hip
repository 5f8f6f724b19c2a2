// Owns routing: which experts a token goes to, and with what weights. The gate's product is
// linear.hip's.
//
// route: grid (1, T), block 256, LDS 12416. logits [T][experts], experts <= 1024; bias [experts] or
//   null; by_token [vocabulary][k] or null, looked up by tokens [T]; ids, weights [T][k], k <= 32.
//   score = sqrt(softplus(z)), softplus(z) = max(z, 0) + log1p(exp(-|z|)). ids: by_token's row, or
//   the k greatest of score + bias, best first, the lower id on ties; NaN ranks below every number.
//   weights: score / (1e-20 + the scores in the order of ids) * factor.
//   An expert's place is a count of those before it, first among 32, then among the k best of each
//   32: nothing is sorted, and no count depends on an order.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// route 2.6 us. Nothing here has run on AMD hardware.
#include "ds4q_dense.h"

#define ROUTE_THREADS 256
#define ROUTE_EXPERTS 1024

// How many of the 32 lanes' keys come before this lane's: greater ones, and equal ones of lower
// lanes.
DS4Q_FN int route_place(ds4q_u32 merit) {
  int place = 0;
  DS4Q_ROLLED
  for (ds4q_u32 first = 0; first < DS4Q_LANES; first += 8) {
    DS4Q_UNROLL
    for (ds4q_u32 other = first; other < first + 8; other++) {
      place += ds4q_shuffle_bits(merit, other) >= merit + (other >= ds4q_lane());
    }
  }
  return place;
}

DS4Q_KERNEL(route, ROUTE_THREADS,
            (const float* logits, const float* bias, const int* by_token, const int* tokens,
             int* ids, float* weights, int experts, int k, float factor)) {
  DS4Q_SHARED(float, scores, ROUTE_EXPERTS);
  DS4Q_SHARED(ds4q_u32, merits, ROUTE_EXPERTS);  // the k best of each 32, best first
  DS4Q_SHARED(int, names, ROUTE_EXPERTS);        // whose they are
  DS4Q_SHARED(int, chosen, DS4Q_LANES);
  int t = (int)ds4q_block_y(), lane = (int)ds4q_lane(), thread = (int)ds4q_thread();
  const float* row = logits + (ds4q_u64)t * experts;
  int most = (experts + DS4Q_LANES - 1) / DS4Q_LANES * DS4Q_LANES;
  for (int e = thread; e < most; e += ROUTE_THREADS) {
    ds4q_u32 merit = 0;  // below every expert's
    if (e < experts) {
      float z = row[e];
      float tail = ds4q_log1p(ds4q_exp(z > 0.0f ? -z : z));
      float score = ds4q_sqrt((z > 0.0f ? z : 0.0f) + tail);
      scores[e] = score;
      merit = ds4q_ordered(bias ? score + bias[e] : score);
    }
    int place = route_place(merit);
    if (place >= k) continue;
    merits[e / DS4Q_LANES * k + place] = merit;
    names[e / DS4Q_LANES * k + place] = e;
  }
  int kept = most / DS4Q_LANES * k;
  ds4q_barrier();
  // Those with equal merits stand in order of their ids, inside each 32 and from one to the next.
  for (int c = thread; c < kept && !by_token; c += ROUTE_THREADS) {
    ds4q_u32 merit = merits[c];
    int place = 0;
    for (int other = 0; other < kept; other++) place += merits[other] >= merit + (other >= c);
    if (place < k) chosen[place] = names[c];
  }
  ds4q_barrier();
  if (thread >= DS4Q_LANES) return;
  int id = 0;
  if (lane < k) id = by_token ? by_token[(ds4q_u64)tokens[t] * k + lane] : chosen[lane];
  float score = lane < k ? scores[id] : 0.0f;
  float total = 1e-20f;
  for (int i = 0; i < k; i++) total = total + ds4q_shuffle(score, (ds4q_u32)i);
  if (lane < k) {
    ids[t * k + lane] = id;
    weights[t * k + lane] = score / total * factor;
  }
}
