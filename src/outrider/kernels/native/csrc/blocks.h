// Blocks of stored keys or values, and what attention does with one: score it, mix it in.
//
// A bfloat16 row is read as vectors of its even and of its odd elements, since one instruction
// widens either; queries and sums are laid out to match. Whether a row is widened once for many
// queries or anew for each changes no bit.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace outrider {

// At most; widened ones share the first-level cache with queries and weights.
constexpr int BLOCK_ROWS = 64, BLOCK_FLOATS = 4096;

// A byte of a row of integers: `dim` integers of 8 bits, then a float16 scale for each 32 of them. Such a row is always widened.
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

// The slots of a block's rows; `next` are those of rows that will be read AHEAD_ROWS later.
struct Slots {
    const int32_t* at;
    int count;
    const int32_t* next;
    int num_next;
};

// Far enough ahead for memory to answer, near enough to stay in the first-level cache.
constexpr int AHEAD_ROWS = 64;

// Asks memory for rows [first, last) of what comes next.
template <class T>
void prefetch(const Stored<T>& stored, const Slots& slots, int first, int last) {
    const int64_t bytes = sizeof(T) * (std::is_same_v<T, Int8> ? stored.stride : stored.dim);
    for (int row = first; row < last; ++row) {
        const char* from = reinterpret_cast<const char*>(stored.row(slots.next[row]));
        for (int64_t line = 0; line < bytes; line += CACHE_LINE) ask_memory(from + line);
    }
}

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
void point_at(const Stored<T>& stored, const Slots& slots, Block<T>* block) {
    block->count = slots.count;
    for (int i = 0; i < slots.count; ++i) block->rows[i] = stored.row(slots.at[i]);
    block->repeat_last();
}

// STEPS > 0 says that a row has exactly that many whole steps.
template <class T, int STEPS>
void widen_rows(const Stored<T>& stored, const Slots& slots, float* space, Block<float>* block) {
    using L = Layout<T>;
    const int whole = STEPS > 0 ? STEPS * L::STEP : stored.dim / L::STEP * L::STEP;
    for (int i = 0; i < block->count; ++i, space += stored.padded_dim) {
        const T* row = stored.row(slots.at[i]);
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
void widen(const Stored<T>& stored, const Slots& slots, float* space, Block<float>* block) {
    block->count = slots.count;
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
void widen_int8(const Stored<Int8>& stored, const Slots& slots, float* space,
                Block<float>* block) {
    for (int i = 0; i < block->count; ++i, space += stored.padded_dim) {
        widen_row<GROUPS>(stored.row(slots.at[i]), stored.dim, space);
        block->rows[i] = space;
    }
}

inline void widen(const Stored<Int8>& stored, const Slots& slots, float* space,
                  Block<float>* block) {
    block->count = slots.count;
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
    float* scores;  // by logical position from `first`; then weights
    int first;

    float* score(int t) const { return scores + (t - first); }
};

// Queries that share a read of a row, as many as the registers have sums for.
constexpr int TILE_QUERIES = NUM_REGISTERS == 32 ? 4 : 3;

// Lane-wise products of COUNT rows with each query, summed over the row; for LANES rows, lane i is
// row i's score.
template <class R, int QUERIES, int COUNT>
inline void dots(const Query* queries, const R* const* rows, int padded_dim, Vec* to) {
    constexpr int VECS = Layout<R>::VECS, AT_ONCE = QUERIES == 1 && LANES > 4 ? 8 : 4;
    if constexpr (COUNT > AT_ONCE) {
        Vec others[QUERIES];
        dots<R, QUERIES, COUNT / 2>(queries, rows, padded_dim, to);
        dots<R, QUERIES, COUNT / 2>(queries, rows + COUNT / 2, padded_dim, others);
        for (int q = 0; q < QUERIES; ++q) to[q] = quarter_sums(to[q], others[q]);
    } else {
        Vec sums[QUERIES][COUNT] = {};
        for (int d = 0; d < padded_dim; d += VECS * LANES) {
            Vec query[QUERIES][VECS];
            for (int q = 0; q < QUERIES; ++q)
                for (int p = 0; p < VECS; ++p) query[q][p] = load(queries[q].vector + d + p * LANES);
            for (int i = 0; i < COUNT; ++i) {
                Vec parts[VECS];
                Layout<R>::read(rows[i] + d, parts);
                for (int p = 0; p < VECS; ++p)
                    for (int q = 0; q < QUERIES; ++q)
                        sums[q][i] = fused(query[q][p], parts[p], sums[q][i]);
            }
        }
        for (int q = 0; q < QUERIES; ++q) {
            to[q] = four_sums(sums[q]);
            if constexpr (COUNT == 8) to[q] = quarter_sums(to[q], four_sums(sums[q] + 4));
        }
    }
}

// Scores for logical positions from t.
template <class R, int QUERIES>
void score_tile(const Query* queries, int t, const Block<R>& block, int padded_dim, float scale) {
    for (int i = 0; i < block.count; i += LANES) {
        Vec found[QUERIES];
        dots<R, QUERIES, LANES>(queries, block.rows + i, padded_dim, found);
        for (int q = 0; q < QUERIES; ++q) store(queries[q].score(t) + i, found[q] * scale);
    }
}

// Calls use(first, count) with `num` queries in tiles, none of which is one alone where that can be
// helped; `count` is a constant.
template <class Use>
inline void each_tile(int num, const Use& use) {
    for (int q = 0, count; q < num; q += count) {
        count = std::min(num - q, TILE_QUERIES);
        if (num - q == TILE_QUERIES + 1) --count;
        switch (count) {
            case 1: use(q, std::integral_constant<int, 1>{}); break;
            case 2: use(q, std::integral_constant<int, 2>{}); break;
            case 3: use(q, std::integral_constant<int, 3>{}); break;
            default: use(q, std::integral_constant<int, TILE_QUERIES>{});
        }
    }
}

// `before(first, count)` is called before each tile.
template <class R, class Before>
void score(const Query* queries, int num, int t, const Block<R>& block, int padded_dim,
           float scale, const Before& before) {
    each_tile(num, [&](int first, auto count) {
        before(first, count);
        score_tile<R, count>(queries + first, t, block, padded_dim, scale);
    });
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
        Vec weight[QUERIES];
        for (int q = 0; q < QUERIES; ++q) weight[q] = splat(weights[q][i]);
        // A part at a time: the registers that sums leave are few.
        for (int v = 0; v < VECS; v += Layout<R>::VECS) {
            Vec parts[Layout<R>::VECS];
            Layout<R>::read(block.rows[i] + at + v * LANES, parts);
            for (int p = 0; p < Layout<R>::VECS; ++p)
                for (int q = 0; q < QUERIES; ++q)
                    sums[q][v + p] = fused(parts[p], weight[q], sums[q][v + p]);
        }
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int v = 0; v < VECS; ++v) store(queries[q].mixed + at + v * LANES, sums[q][v]);
}

template <class R, class Before>
void mix(const Query* queries, int num, int t, const Block<R>& block, int padded_dim,
         const Before& before) {
    constexpr int FEW = Layout<R>::VECS;
    each_tile(num, [&](int first, auto count) {
        // One query alone needs as many sums to hide the latency of an addition.
        constexpr int MANY = count == 1 ? 8 : 4;
        before(first, count);
        int at = 0;
        for (; at + MANY * LANES <= padded_dim; at += MANY * LANES)
            mix_vecs<R, count, MANY>(queries + first, t, block, at);
        for (; at < padded_dim; at += FEW * LANES)
            mix_vecs<R, count, FEW>(queries + first, t, block, at);
    });
}

}  // namespace outrider
