// Owns what a token leaves behind for attention: its row in the window, raw rows of the
// compressors, and the entry of a window that it completes; and the norm of its low-rank query. All
// of it in one launch, the same for one token as for a batch. Products are linear.hip's.
//
// latents: grid (2 at ratio 0, 3 at 128, 4 at 4; T), block 512, LDS 4160.
//   Block 0: query_out [T][query_width] = RMSNorm of query; in place or apart.
//   Block 1: kv [T][D] normed and turned, to the window's ring.
//   Block 2: values, gates [T][C] to their rings, ape [ratio][C] added to gates; where the token is
//     its window's last, the entry: per channel a softmax over the window's gates weighs its
//     values, then norm and turn. At ratio 4, C = 2 D: the tokens of the window before give their
//     first D columns, the others their last D. Block 3: the same for the indexer's width.
//   A step's own raw rows are read from values and gates, older ones from the rings, so blocks do
//   not wait for each other. cos, sin [T][pairs] at the tokens; window_cos, window_sin [T][pairs] at
//   the first token of the window that each completes; anything where it completes none. The tokens
//   may be of several sequences. Window rows and entries are rounded to DS4Q_KV_TYPE, which this is
//   built for. D, index_width <= 1024, multiples of 4. Base pointers 16-byte aligned.
//   Sums: over a window in order of position, fused; before each eight of them what is summed so
//   far is scaled from the old maximum to the new. Squares: a thread's columns in order, fused,
//   then ds4q_block_sum.
// Measured on an NVIDIA H200, Flash shapes, one token, by launch in a graph (an empty one 0.5 us):
// latents 2.2 us; where a window ends 5.4 us at ratio 4, 39 us at 128. Nothing here has run on
// AMD hardware.
#include "ds4q_state.h"

#define LATENT_THREADS 512
#define LATENT_WIDTH 1024
#define LATENT_BATCH 8  // positions whose loads are under way together

// RMSNorm; thread i owns columns i, i + 512, ..
DS4Q_FN void latent_norm(const float* x, const float* weight, float* out, int width, float eps,
                         float* room) {
  float squares = 0.0f;
  for (int c = (int)ds4q_thread(); c < width; c += LATENT_THREADS) {
    squares = ds4q_fma(x[c], x[c], squares);
  }
  squares = ds4q_block_sum<LATENT_THREADS / DS4Q_LANES>(squares, room);
  float r = ds4q_inverse_rms(squares, width, eps);
  for (int c = (int)ds4q_thread(); c < width; c += LATENT_THREADS) out[c] = weight[c] * (x[c] * r);
}

DS4Q_FN void latent_store(float* to, float x) { *to = x; }
#if DS4Q_KV_TYPE != 0
DS4Q_FN void latent_store(ds4q_kept* to, float x) { *to = ds4q_rounded(x); }
#endif

// The normed `row` in shared memory to `out`, its last 2 pairs columns turned.
template <class OUT>
DS4Q_FN void latent_turn(const float* row, OUT* out, int width, int pairs, const float* cos,
                         const float* sin) {
  ds4q_barrier();
  for (int i = (int)ds4q_thread(); i < width / 2; i += LATENT_THREADS) {
    float a = row[2 * i], b = row[2 * i + 1];
    int pair = i - (width / 2 - pairs);
    if (pair >= 0) ds4q_turn(a, b, cos[pair], sin[pair]);
    latent_store(out + 2 * i, a);
    latent_store(out + 2 * i + 1, b);
  }
}

struct latent_rows {  // raw rows by position
  const float *values, *gates, *ape;
  const float *old_values, *old_gates;
  int first, row;  // position of the sequence's first token of the step, and its row in values
  int ratio, columns, slots;
};

// The window whose last token is `last`, pooled to `entry` [width].
DS4Q_FN void latent_pool(const latent_rows& rows, int last, int width, float* entry) {
  int own = last + 1 - rows.ratio;
  int start = rows.columns > width && own > 0 ? own - rows.ratio : own;
  for (int c = (int)ds4q_thread(); c < width; c += LATENT_THREADS) {
    float top = -ds4q_infinity(), total = 0.0f, sum = 0.0f;
    DS4Q_ROLLED
    for (int begin = start; begin <= last; begin += LATENT_BATCH) {
      float gate[LATENT_BATCH], value[LATENT_BATCH];
      DS4Q_UNROLL
      for (int i = 0; i < LATENT_BATCH; i++) {  // loads first: a window's rows lie far apart
        int p = begin + i, column = p < own ? c : c + rows.columns - width;
        bool old = p < rows.first;
        ds4q_u64 at = (ds4q_u64)(old ? p % rows.slots : p - rows.first + rows.row) * rows.columns + column;
        gate[i] = p <= last ? (old ? rows.old_gates : rows.gates)[at] : -ds4q_infinity();
        value[i] = p <= last ? (old ? rows.old_values : rows.values)[at] : 0.0f;
        if (p <= last && !old) gate[i] = gate[i] + rows.ape[p % rows.ratio * rows.columns + column];
      }
      float before = top;
      DS4Q_UNROLL
      for (int i = 0; i < LATENT_BATCH; i++) top = ds4q_max(gate[i], top);
      float fade = ds4q_exp(before - top);  // 0 at first
      total = total * fade;
      sum = sum * fade;
      DS4Q_UNROLL
      for (int i = 0; i < LATENT_BATCH; i++) {
        float weight = ds4q_exp(gate[i] - top);
        total = total + weight;
        sum = ds4q_fma(weight, value[i], sum);
      }
    }
    entry[c] = sum / total;
  }
}

// Stores the token's raw rows; whether it completes a window, whose entry is then in `row`, normed.
DS4Q_FN bool latent_compress(const float* values, const float* gates, const float* ape,
                             const float* norm, float* value_ring, float* gate_ring, int slots,
                             int width, ds4q_token token, int ratio, float eps, float* row,
                             float* room) {
  int columns = ratio == 4 ? 2 * width : width, t = (int)ds4q_block_y();
  int position = token.position, first = position - (t - token.row);
  ds4q_u64 from = (ds4q_u64)t * columns, to = (ds4q_u64)(position % slots) * columns;
  for (int c = (int)ds4q_thread(); c < columns; c += LATENT_THREADS) {
    value_ring[to + c] = values[from + c];
    gate_ring[to + c] = gates[from + c] + ape[position % ratio * columns + c];
  }
  if ((position + 1) % ratio != 0) return false;
  latent_rows rows = {values, gates,     ape,   value_ring, gate_ring,
                      first,  token.row, ratio, columns,    slots};
  latent_pool(rows, position, width, row);
  latent_norm(row, norm, row, width, eps, room);
  return true;
}

DS4Q_KERNEL(latents, LATENT_THREADS,
            (const float* query, const float* query_norm, float* query_out, int query_width,
             const float* kv, const float* kv_norm, const float* values, const float* gates,
             const float* ape, const float* entry_norm, const float* index_values,
             const float* index_gates, const float* index_ape, const float* index_norm,
             const float* cos, const float* sin, const float* window_cos, const float* window_sin,
             const ds4q_layer_state* states, const ds4q_token* tokens, int D, int index_width,
             int pairs, int ratio, float eps)) {
  DS4Q_SHARED(float, row, LATENT_WIDTH);
  DS4Q_SHARED(float, room, LATENT_THREADS / DS4Q_LANES);
  ds4q_u64 t = ds4q_block_y(), turn = t * pairs;
  ds4q_token token = tokens[t];
  const ds4q_layer_state* state = states + token.states;
  if (ds4q_block_x() == 0) {
    latent_norm(query + t * query_width, query_norm, query_out + t * query_width, query_width, eps,
                room);
  } else if (ds4q_block_x() == 1) {
    latent_norm(kv + t * D, kv_norm, row, D, eps, room);
    ds4q_u64 slot = (ds4q_u64)token.position % (ds4q_u32)state->window_rows;
    latent_turn(row, state->window + slot * D, D, pairs, cos + turn, sin + turn);
  } else {
    bool index = ds4q_block_x() == 3;
    int width = index ? index_width : D;
    if (!latent_compress(index ? index_values : values, index ? index_gates : gates,
                         index ? index_ape : ape, index ? index_norm : entry_norm,
                         index ? state->index_values : state->values,
                         index ? state->index_gates : state->gates,
                         index ? state->index_ring_rows : state->ring_rows, width, token, ratio,
                         eps, row, room)) {
      return;
    }
    ds4q_u64 entry = (ds4q_u64)(token.position / ratio) * width;
    const float *turn_cos = window_cos + turn, *turn_sin = window_sin + turn;
    if (index) {
      latent_turn(row, state->index_entries + entry, width, pairs, turn_cos, turn_sin);
    } else {
      latent_turn(row, state->entries + entry, width, pairs, turn_cos, turn_sin);
    }
  }
}
