// A pass as raw pointers: its plan (kernels/plan.py), the shape of its packed heads and the arena.
#pragma once

#include <cstdint>

#include "team.h"

namespace outrider {

// Mirrored by `PassStruct` in ops.py. Strides count elements of the arena.
struct Pass {
    Team* team;
    int64_t head_stride, slot_stride;
    int32_t row_size, num_heads, num_kv_heads, head_dim;
    int32_t page_size, num_tokens, num_page_columns, unused;
    const int32_t *positions, *slots, *seq, *visible, *pages;
    // Null when every token lies on a chain.
    const int32_t *extra_offsets, *extra_slots;

    int num_extra(int n) const {
        return extra_offsets == nullptr ? 0 : extra_offsets[n + 1] - extra_offsets[n];
    }
    int num_keys(int n) const { return visible[n] + num_extra(n); }
};

// How a layer attends: AttentionKind of plan.py. Mirrored by `LookStruct` in ops.py. A window or a
// cap of 0 is none; sinks, one for each query head, may be null.
struct Look {
    float scale, cap;
    int32_t window, unused;
    const float* sinks;

    // The first of `num_keys` that a token sees.
    int first_key(int num_keys) const {
        return window > 0 && num_keys > window ? num_keys - window : 0;
    }
};

// One layer's keys and values.
template <class T>
struct Arena {
    Arena(const Pass& pass, T* keys, T* values)
        : keys(keys),
          values(values),
          head_stride(pass.head_stride),
          slot_stride(pass.slot_stride) {}

    T* key(int head, int64_t slot) const { return keys + head * head_stride + slot * slot_stride; }
    T* value(int head, int64_t slot) const {
        return values + head * head_stride + slot * slot_stride;
    }

    T *keys, *values;
    int64_t head_stride, slot_stride;
};

}  // namespace outrider
