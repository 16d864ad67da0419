// Blocks of stored keys or values, and what attention does with one: score it, mix it in.
//
// A bfloat16 row is read as vectors of its even and of its odd elements, since one instruction
// widens either; queries and sums are laid out to match. Whether a row is widened once for many
// queries or anew for each changes no bit.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace outrider {

constexpr int BLOCK_ROWS = 64;

// A byte of a row of integers: `dim` integers of 8 bits, then a float16 scale for each 32 of them
// (kernels/kv_rows.py). Such a row is always widened.
struct Int8 {
    int8_t bits;

    static constexpr int GROUP = 32;
};

template <class R>
struct Layout;

template <>
struct Layout<float> {
    static constexpr int STEP = LANES, VECS = 1;
    static void read(const float* from, Vec* to) { to[0] = load(from); }
    static int place(int d) { return d; }
};

template <>
struct Layout<Float16> {
    static constexpr int STEP = LANES, VECS = 1;
    static void read(const Float16* from, Vec* to) { to[0] = load_some(from, LANES); }
    static int place(int d) { return d; }
};

template <>
struct Layout<BFloat16> {
    static constexpr int STEP = 2 * LANES, VECS = 2;
    static void read(const BFloat16* from, Vec* to) {
        const BitVec pairs = load_pairs(from);
        to[0] = low_halves(pairs);
        to[1] = high_halves(pairs);
    }
    static int place(int d) { return d / STEP * STEP + d % 2 * LANES + d % STEP / 2; }
};

template <>
struct Layout<Int8> {
    static constexpr int STEP = Int8::GROUP;
    static int place(int d) { return d; }
};

// Keys or values of one head in one layer. A padded row is a whole number of steps.
template <class T>
struct Stored {
    const T* base;
    int64_t stride;
    int dim, padded_dim;

    const T* row(int32_t slot) const { return base + slot * stride; }
};

// Rows in logical order; the last also stands in for what a vector of scores lacks.
template <class R>
struct Block {
    const R* rows[BLOCK_ROWS];
    int count;

    void repeat_last() {
        for (int i = count; i % LANES != 0; ++i) rows[i] = rows[count - 1];
    }
};

template <class T>
void point_at(const Stored<T>& stored, const int32_t* slots, int count, Block<T>* block) {
    block->count = count;
    for (int i = 0; i < count; ++i) block->rows[i] = stored.row(slots[i]);
    block->repeat_last();
}

// STEPS > 0 says that a row has exactly that many whole steps.
template <class T, int STEPS>
void widen_rows(const Stored<T>& stored, const int32_t* slots, float* space, Block<float>* block) {
    using L = Layout<T>;
    const int whole = STEPS > 0 ? STEPS * L::STEP : stored.dim / L::STEP * L::STEP;
    for (int i = 0; i < block->count; ++i, space += stored.padded_dim) {
        const T* row = stored.row(slots[i]);
        block->rows[i] = space;
        Vec vecs[L::VECS];
        for (int d = 0; d < whole; d += L::STEP) {
            L::read(row + d, vecs);
            for (int v = 0; v < L::VECS; ++v) store(space + d + v * LANES, vecs[v]);
        }
        if (STEPS > 0 || whole == stored.dim) continue;
        T padded[L::STEP] = {};  // what follows the row is another slot's
        std::memcpy(padded, row + whole, sizeof(T) * (stored.dim - whole));
        L::read(padded, vecs);
        for (int v = 0; v < L::VECS; ++v) store(space + whole + v * LANES, vecs[v]);
    }
}

// `space` holds the widened rows of a block.
template <class T>
void widen(const Stored<T>& stored, const int32_t* slots, int count, float* space,
           Block<float>* block) {
    block->count = count;
    switch (stored.dim == stored.padded_dim ? stored.dim / Layout<T>::STEP : 0) {
        case 2: widen_rows<T, 2>(stored, slots, space, block); break;
        case 4: widen_rows<T, 4>(stored, slots, space, block); break;
        default: widen_rows<T, 0>(stored, slots, space, block);
    }
    block->repeat_last();
}

// GROUPS > 0 says that a row has exactly that many, LANES at most.
template <int GROUPS>
inline void widen_row(const Int8* row, int dim, float* to) {
    const int num_groups = GROUPS > 0 ? GROUPS : dim / Int8::GROUP;
    const Int8* scales = row + dim;
    for (int first = 0; first < num_groups; first += LANES, scales += LANES * sizeof(Float16)) {
        const int count = num_groups - first < LANES ? num_groups - first : LANES;
        const Vec factors = from_float16(load_halves(scales, count));
        for (int i = 0; i < count; ++i, row += Int8::GROUP, to += Int8::GROUP)
            for (int d = 0; d < Int8::GROUP; d += LANES)
                store(to + d, floats(integers(row + d, true)) * splat(factors[i]));
    }
}

template <int GROUPS>
void widen_int8(const Stored<Int8>& stored, const int32_t* slots, float* space,
                Block<float>* block) {
    for (int i = 0; i < block->count; ++i, space += stored.padded_dim) {
        widen_row<GROUPS>(stored.row(slots[i]), stored.dim, space);
        block->rows[i] = space;
    }
}

inline void widen(const Stored<Int8>& stored, const int32_t* slots, int count, float* space,
                  Block<float>* block) {
    block->count = count;
    switch (stored.dim / Int8::GROUP) {
        case 2: widen_int8<2>(stored, slots, space, block); break;
        case 4: widen_int8<4>(stored, slots, space, block); break;
        default: widen_int8<0>(stored, slots, space, block);
    }
    block->repeat_last();
}

// One query head of one token.
struct Query {
    float* vector;
    float* mixed;
    float* scores;  // by logical position from the first that is seen; then weights
    float scale;
    int first;

    float* score(int t) const { return scores + (t - first); }
};

template <class R>
inline void read_vecs(const R* from, int vecs, Vec* to) {
    for (int v = 0; v < vecs; v += Layout<R>::VECS) Layout<R>::read(from + v * LANES, to + v);
}

// Lane-wise products of COUNT rows with the query, summed; for LANES rows, lane i is row i's score.
// VECS > 0 says that a row has exactly that many vectors.
template <class R, int VECS, int COUNT>
inline Vec dots(const float* query, const R* const* rows, int padded_dim) {
    if constexpr (COUNT == 1) {
        const int vecs = VECS > 0 ? VECS : padded_dim / LANES;
        Vec sum = {};
        for (int v = 0; v < vecs; v += Layout<R>::VECS) {
            Vec parts[Layout<R>::VECS];
            Layout<R>::read(*rows + v * LANES, parts);
            for (int p = 0; p < Layout<R>::VECS; ++p)
                sum = fused(load(query + (v + p) * LANES), parts[p], sum);
        }
        return sum;
    } else {
        return pair_sums(dots<R, VECS, COUNT / 2>(query, rows, padded_dim),
                         dots<R, VECS, COUNT / 2>(query, rows + COUNT / 2, padded_dim));
    }
}

template <class R, int VECS>
void score_rows(const Query& query, int t, const Block<R>& block, int padded_dim, float scale) {
    float* scores = query.score(t);
    for (int i = 0; i < block.count; i += LANES)
        store(scores + i,
              dots<R, VECS, LANES>(query.vector, block.rows + i, padded_dim) * scale);
}

// Scores for logical positions from t.
template <class R>
void score(const Query& query, int t, const Block<R>& block, int padded_dim, float scale) {
    switch (padded_dim) {
        case 4 * LANES: return score_rows<R, 4>(query, t, block, padded_dim, scale);
        case 8 * LANES: return score_rows<R, 8>(query, t, block, padded_dim, scale);
        default: return score_rows<R, 0>(query, t, block, padded_dim, scale);
    }
}

// Adds the weighted rows, in order, to VECS vectors of QUERIES queries.
template <class R, int QUERIES, int VECS>
void mix_vecs(const Query* queries, int t, const Block<R>& block, int at) {
    Vec sums[QUERIES][VECS];
    const float* weights[QUERIES];
    for (int q = 0; q < QUERIES; ++q) weights[q] = queries[q].score(t);
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECS; ++v) sums[q][v] = load(queries[q].mixed + at + v * LANES);
    for (int i = 0; i < block.count; ++i) {
        Vec row[VECS];
        read_vecs(block.rows[i] + at, VECS, row);
        for (int q = 0; q < QUERIES; ++q)
            for (int v = 0; v < VECS; ++v)
                sums[q][v] = fused(row[v], splat(weights[q][i]), sums[q][v]);
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECS; ++v) store(queries[q].mixed + at + v * LANES, sums[q][v]);
}

template <class R, int QUERIES>
void mix_queries(const Query* queries, int t, const Block<R>& block, int padded_dim) {
    constexpr int FEW = Layout<R>::VECS;
    int at = 0;
    for (; at + 4 * LANES <= padded_dim; at += 4 * LANES)
        mix_vecs<R, QUERIES, 4>(queries, t, block, at);
    for (; at < padded_dim; at += FEW * LANES) mix_vecs<R, QUERIES, FEW>(queries, t, block, at);
}

template <class R>
void mix(const Query* queries, int num, int t, const Block<R>& block, int padded_dim) {
    int q = 0;
    for (; q + 4 <= num; q += 4) mix_queries<R, 4>(queries + q, t, block, padded_dim);
    for (; q + 2 <= num; q += 2) mix_queries<R, 2>(queries + q, t, block, padded_dim);
    for (; q < num; ++q) mix_queries<R, 1>(queries + q, t, block, padded_dim);
}

}  // namespace outrider
