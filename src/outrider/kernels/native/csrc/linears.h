// A packed matrix with the function that multiplies by it; mixtures of experts and attention over
// latents, which are made of such.
#pragma once

#include <cstdint>

#include "team.h"
#include "vectors.h"

namespace outrider {

// Mirrored by `LinearStruct` in ops.py. A bias may be null.
struct Linear {
    void (*call)(const void* weights, const float* x, float* out, int num_rows, int accumulate);
    const void* weights;
    const float* bias;

    void operator()(const float* x, float* out, int num_rows, int size, bool accumulate) const {
        call(weights, x, out, num_rows, accumulate);
        if (bias == nullptr) return;
        for (int n = 0; n < num_rows; ++n, out += size)
            for (int i = 0; i < size; i += LANES)
                store_some(out + i, load_some(out + i, size - i) + load_some(bias + i, size - i),
                           size - i);
    }
};

// One feed-forward net; without a call there is none.
struct Net {
    Linear gate_up, down;
};

// In the order of `_GATINGS` in kernels/native/layers.py.
enum Gating { SILU, GELU, CLAMPED, SQUARED };

// Mirrored by `_Mixture` in kernels/native/layers.py. The router scores `num_experts` and, behind them, the net
// that all tokens share.
struct Mixture {
    Team* team;
    Linear router;
    const Net* experts;
    Net shared;
    // Added to shares where experts are chosen, and to nothing else; may be null.
    const float* choice_bias;
    float alpha, limit, scale;
    int32_t hidden_size, num_experts, num_chosen, ffn_size, shared_ffn_size, normalise, gating;
    int32_t num_scores, has_sigmoids, gates_shared;
    // Experts are chosen from the `top_groups` of `num_groups` whose `group_best` best ones sum to
    // the most.
    int32_t num_groups, top_groups, group_best;
};

// Mirrored by `_Latent` in kernels/native/layers.py. Without a query rank, the first product gives the queries
// themselves. `keys` and `values` have a matrix for each head.
struct Latent {
    Team* team;
    const float *query_norm, *norm;
    Linear queries;
    const Linear *keys, *values;
    float eps;
    int32_t num_heads, rank, turning, still, value_dim, query_rank, interleaved;
};

// Writes the queries of all heads and the key of rows `x` to `qkv`, whose rows have `row_size`
// numbers. `first` gives a row's query vector or queries, its latent and its key, in this order.
void latent_queries(const Latent& latent, const Linear& first, const float* x, float* qkv,
                    int num_rows, int64_t row_size);
// Values of all heads, from what they attended to: memory of this thread, until it asks again.
const float* latent_values(const Latent& latent, const float* attended, int num_rows);

// What the mixture gives for rows of `x`: memory of this thread, until it asks again.
float* mixed(const Mixture& mixture, const float* x, int num_rows);

}  // namespace outrider
