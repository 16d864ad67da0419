// Rows of activations as integers of -127 to 127; kernels/reference/linear.py says what they mean.
#pragma once

#include <algorithm>

#include "team.h"
#include "vectors.h"

namespace outrider {

constexpr int GROUP = 32;
// A row whose largest magnitude is below this is all zeros: 127 over it would be infinite.
constexpr float TINY = 1e-30f;
// Below this many inputs a second thread costs more than it saves.
constexpr int MIN_SPLIT_INPUTS = 1 << 15;

struct Floats {
    const float* x;
    int num_rows, num_in;
};

// How far unsigned weights lie above signed ones.
constexpr int OFFSET = 128;

// The integers, zero-padded to whole groups. A row's sums start from `below`: what the weights'
// offset adds to them, negated, modulo 2^32.
struct Rows {
    int8_t* values;
    uint32_t* below;
    float* scales;
    int num_groups;
    int64_t stride;

    int8_t* values_of(int row) const { return values + row * stride; }
    uint32_t* below_of(int row) const { return below + row; }
};

// Keeps the compiler from fusing a product into the addition that follows.
inline Vec rounded(Vec product) {
    asm volatile("" : "+m"(product));
    return product;
}

inline int sum_of_lanes(IntVec vec) {
    int sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += vec[lane];
    return sum;
}

// NaN counts as the largest of all.
inline float largest_magnitude(const float* x, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i)
        largest = std::max(largest, cast<uint32_t>(x[i]) & 0x7fffffffu);
    return cast<float>(largest);
}

// Ties round to even; a row with a NaN or an infinity gets the scale NaN.
inline void quantise_row(const float* x, int num_in, const Rows& rows, int row) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float largest = largest_magnitude(x, num_in);
    const bool is_finite = largest < __builtin_inff();
    const float inverse = is_finite && largest >= TINY ? 127.0f / largest : 0.0f;
    rows.scales[row] = is_finite ? largest / 127.0f : __builtin_nanf("");
    int8_t* values = rows.values_of(row);
    IntVec sums = {};
    for (int first = 0; first < num_in; first += LANES) {
        const Vec some = is_finite ? load_some(x + first, num_in - first) : Vec{};
        const Vec shifted = rounded(some * inverse) + TO_INTEGER;
        const IntVec integers = cast<IntVec>(shifted) - cast<int32_t>(TO_INTEGER);
        const ByteVec bytes = __builtin_convertvector(integers, ByteVec);
        std::memcpy(values + first, &bytes, sizeof(bytes));
        sums += integers;
    }
    *rows.below_of(row) = static_cast<uint32_t>(-OFFSET * sum_of_lanes(sums));
    const int end = (num_in + LANES - 1) / LANES * LANES;
    std::memset(values + end, 0, rows.num_groups * GROUP - end);
}

// In the team's shared memory, until the next call takes it.
inline Rows quantised(Team& team, const Floats& from) {
    const int num_groups = (from.num_in + GROUP - 1) / GROUP;
    // Rows lie an odd number of cache lines apart: at a power of two, the rows of a tile would push
    // each other out of the first-level cache.
    const int64_t stride = ((num_groups * GROUP + CACHE_LINE - 1) / CACHE_LINE | 1) * CACHE_LINE;
    const size_t num_bytes = from.num_rows * (stride + sizeof(uint32_t) + sizeof(float));
    auto* values = static_cast<int8_t*>(team.shared().take(num_bytes));
    auto* below = reinterpret_cast<uint32_t*>(values + from.num_rows * stride);
    const Rows rows{values, below, reinterpret_cast<float*>(below + from.num_rows), num_groups, stride};
    team.run(from.num_rows, std::max(1, MIN_SPLIT_INPUTS / from.num_in),
             [&](int first, int last, int) {
                 for (int row = first; row < last; ++row)
                     quantise_row(from.x + static_cast<int64_t>(row) * from.num_in, from.num_in, rows,
                                  row);
             });
    return rows;
}

}  // namespace outrider
