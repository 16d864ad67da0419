// Recurrences of hybrids: a layer's weights, and the runs of a pass (kernels/reference/delta.py).
#pragma once

#include <cstdint>

#include "team.h"

namespace outrider {

// One layer's weights and sizes: see DeltaWeights and StateShape.
struct DeltaLayer {
    const float *conv, *rate, *dt_bias, *conv_bias, *skip;
    int32_t taps, channels, key_heads, heads, key_dim, value_dim;

    // Mamba-2's channels are values, keys and queries, those of the delta rule the reverse.
    bool scans() const { return skip != nullptr; }
    int num_keys() const { return key_heads * key_dim; }
    int query_at() const { return scans() ? heads * value_dim + num_keys() : 0; }
    int key_at() const { return scans() ? heads * value_dim : num_keys(); }
    int value_at() const { return scans() ? 0 : 2 * num_keys(); }
};

// A pass's runs, and where cells are: addresses of a state cell's two tensors, and of an input
// cell's four. Absent cells are -1.
struct DeltaPass {
    Team* team;
    const int32_t* runs;  // first, stop, source, fold, first replayed, end of replayed
    const int32_t *states, *inputs, *replayed;
    const int64_t *state_cells, *input_cells;
    int32_t num_runs;
};

}  // namespace outrider

extern "C" void outrider_delta(const outrider::DeltaPass* pass, const outrider::DeltaLayer* layer,
                               const float* rows, int row_size, int gates, int index, float* out);
