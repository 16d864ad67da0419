// Rows of activations as integers of -127 to 127; kernels/reference/linear.py says what they mean.
#pragma once

#include <algorithm>

#include "team.h"
#include "unrolled.h"
#include "vectors.h"

namespace outrider {

constexpr int GROUP = 32;
// A row whose largest magnitude is below this is all zeros: 127 over it would be infinite.
constexpr float TINY = 1e-30f;
// Weights that all tiles of rows take before the next ones: they stay in the first-level cache.
constexpr int SLICE_BYTES = 20 * 1024;
// How far ahead of use memory is asked for weights where one tile holds all rows.
constexpr int BYTES_AHEAD = 8 * 1024;
// Units of a slice, of so many and of so many bytes each: slices are of nearly equal length, so that
// each has the time to ask for the next.
constexpr int slice_units(int num_units, int unit_bytes) {
    const int num_slices = (num_units * unit_bytes + SLICE_BYTES - 1) / SLICE_BYTES;
    return (num_units + num_slices - 1) / num_slices;
}
// Below this many multiply-adds a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 18;
// Below this many inputs a second thread costs more than it saves.
constexpr int MIN_SPLIT_INPUTS = 1 << 13;

// Weights of 8 bits, in the layout of quantised.cpp. Mirrored by `WeightsStruct` in ops.py.
struct ByteMatrix {
    Team* team;
    const uint8_t* packed;
    int32_t num_in, num_out;
};

// Multiplies without tiles where blocks of `block` outputs are those of vectors, and says so; a column has whole
// `padded_to` inputs.
bool int8_on_vectors(const ByteMatrix& w, int block, int padded_to, const float* x, float* out,
                     int num_rows, bool accumulate);

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

// LANES integers of 8 bits as bytes. Compilers narrow generic vectors one by one.
inline void store_bytes(int8_t* to, IntVec integers) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const auto pair = cast<__m256i>(integers);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
#else
    const ByteVec bytes = __builtin_convertvector(integers, ByteVec);
    std::memcpy(to, &bytes, sizeof(bytes));
#endif
}

// Integers of `count` inputs to `values`, in whole vectors; `each` is called with the first input and
// the integers of a vector. Gives their scale. Ties round to even; with a NaN or an infinity among the
// inputs all integers are zero and the scale is NaN.
template <class Each>
ALWAYS_INLINE float to_integers(const float* x, int count, int8_t* values, const Each& each) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const int whole = count / LANES * LANES;
    const auto larger = [](IntVec a, IntVec b) { return a > b ? a : b; };
    // As integers, so that a NaN counts as the largest of all.
    const auto size_of = [](Vec some) { return cast<IntVec>(some) & 0x7fffffff; };
    IntVec sizes = size_of(load_some(x + whole, count - whole));
    for (int first = 0; first < whole; first += LANES)
        sizes = larger(sizes, size_of(load(x + first)));
    for (int width = LANES; width > 1; width /= 2)
        sizes = larger(even_lanes(sizes, sizes), odd_lanes(sizes, sizes));
    const auto largest = cast<float>(static_cast<int32_t>(sizes[0]));
    const bool is_finite = largest < __builtin_inff();
    const BitVec kept = BitVec{} - static_cast<uint32_t>(is_finite);
    const Vec inverse = splat(is_finite && largest >= TINY ? 127.0f / largest : 0.0f);
    const auto put = [&](int first, Vec some) __attribute__((always_inline)) {
        const Vec shifted = apart(cast<Vec>(cast<BitVec>(some) & kept) * inverse) + TO_INTEGER;
        const IntVec integers = cast<IntVec>(shifted) - cast<int32_t>(TO_INTEGER);
        store_bytes(values + first, integers);
        each(first, integers);
    };
    for (int first = 0; first < whole; first += LANES) put(first, load(x + first));
    if (whole < count) put(whole, load_some(x + whole, count - whole));
    return is_finite ? largest / 127.0f : __builtin_nanf("");
}

inline void quantise_row(const float* x, int num_in, const Rows& rows, int row) {
    int8_t* values = rows.values_of(row);
    IntVec sums = {};
    rows.scales[row] = to_integers(x, num_in, values, [&](int, IntVec some) { sums += some; });
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
