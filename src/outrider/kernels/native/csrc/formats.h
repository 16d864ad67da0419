// What a linear multiplies: packed weights of each precision, and the rows of inputs they meet.
//
// For one step, a packed weight has an entry for each column of a block, and a row has one entry,
// which all of them are multiplied by: an input or, with dot products, a pair of neighbours.
#pragma once

#include <algorithm>

#include "pairs.h"
#include "vectors.h"

namespace outrider {

// By the entries of a packed weight; `Plain` is the precision of the matrix that it is made of.
template <class Entry>
struct Format;

// Formats that are float32 once they are read, one input a step.
struct Widened {
    using Input = float;
    using Weights = Vec;
    static constexpr int INPUTS = 1;

    static void add(Vec& sums, Vec weights, float input) {
        sums = fused(weights, splat(input), sums);
    }
    template <class Plain>
    static Plain entry(const Plain* inputs, int step, int) {
        return inputs[step];
    }
};

template <>
struct Format<float> : Widened {
    using Plain = float;
    // Measured: prefetching gains nothing from memory and loses a fifth from the second-level cache.
    static constexpr bool PREFETCHES = false;

    static void load(const float* from, Vec (&to)[BLOCK_VECS]) {
        for (int v = 0; v < BLOCK_VECS; ++v) to[v] = outrider::load(from + v * LANES);
    }
    static int place(int column) { return column; }
    static void read(const float* x, int count, float* to) {
        store_some(to, load_some(x, count), count);
    }
};

// Column l shares a 32-bit lane with column l + LANES; the inputs are widened after rounding.
template <>
struct Format<BFloat16> : Widened {
    using Plain = BFloat16;
    static constexpr bool PREFETCHES = true;

    static void load(const BFloat16* from, Vec (&to)[BLOCK_VECS]) {
        for (int v = 0; v < BLOCK_VECS; v += 2) {
            const BitVec pairs = load_pairs(from + v * LANES);
            to[v] = low_halves(pairs);
            to[v + 1] = high_halves(pairs);
        }
    }
    static int place(int column) {
        const int pair = column / (2 * LANES), half = column / LANES % 2;
        return pair * 2 * LANES + column % LANES * 2 + half;
    }
    static void read(const float* x, int count, float* to) {
        store_some(to, round_to_bfloat16(load_some(x, count)), count);
    }
};

// The inputs are widened after rounding.
template <>
struct Format<Float16> : Widened {
    using Plain = Float16;
    static constexpr bool PREFETCHES = true;

    static void load(const Float16* from, Vec (&to)[BLOCK_VECS]) {
        for (int v = 0; v < BLOCK_VECS; ++v) to[v] = load_some(from + v * LANES, LANES);
    }
    static int place(int column) { return column; }
    static void read(const float* x, int count, float* to) {
        store_some(to, from_float16(to_float16(load_some(x, count))), count);
    }
};

#if defined(OUTRIDER_HAS_PAIRS)

// A column's neighbouring inputs share a lane; zero stands in for what an odd number lacks.
template <>
struct Format<Pair> {
    using Plain = BFloat16;
    using Input = Pair;
    using Weights = BitVec;
    static constexpr int INPUTS = 2;
    static constexpr bool PREFETCHES = true;

    static void load(const Pair* from, BitVec (&to)[BLOCK_VECS]) {
        for (int v = 0; v < BLOCK_VECS; ++v) std::memcpy(&to[v], from + v * LANES, sizeof(to[v]));
    }
    static void add(Vec& sums, BitVec weights, Pair input) {
        sums = add_pair_dots(sums, weights, input);
    }
    static int place(int column) { return column; }
    static Pair entry(const BFloat16* inputs, int step, int num_in) {
        const int i = 2 * step;
        return {{inputs[i], i + 1 < num_in ? inputs[i + 1] : BFloat16{}}};
    }
    // Writes whole vectors.
    static void read(const float* x, int count, Pair* to) {
        store_some(reinterpret_cast<BFloat16*>(to), load_some(x, count), LANES);
    }
};

#endif

template <class Entry>
inline int num_steps(int num_in) {
    return (num_in + Format<Entry>::INPUTS - 1) / Format<Entry>::INPUTS;
}

}  // namespace outrider
