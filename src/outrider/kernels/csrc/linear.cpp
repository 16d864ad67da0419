// out_NO (+)= x_NI W_OI^T, bit for bit the same for a row whatever rows it comes with.
//
// Each output is one chain of fused multiply-adds over i = 0, 1, 2, ...; tiles of 1 to MAX_ROWS
// rows differ only in how many chains run side by side. Weights are packed once into blocks of
// BLOCK output columns, [O / BLOCK][I][BLOCK], so a block streams through the caches once per pass
// and serves every tile of rows from there. Threads split the blocks.
//
// bfloat16 pairs column l with column l + LANES in one 32-bit lane, and rounds x as well.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr int BLOCK = LANES * BLOCK_VECS;
// Inputs a pass over a block takes at once when several tiles of rows need it again: the slice
// stays in the first-level cache. A chain's running sum is kept between slices, unrounded.
constexpr int SLICE_BYTES = 16 * 1024;
// How many weights ahead of use memory is asked for them. Without it a pass of several rows takes
// the time of its memory and of its arithmetic one after the other; with it, the longer of the two.
// The more rows share a weight, the more time there is. float32 gains nothing from memory and loses
// a fifth from the second-level cache.
constexpr int FEW_ROWS = 2, AHEAD_OF_FEW = 1024, AHEAD_OF_MANY = 8192;
// Below this many multiply-adds a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 16;

inline void load_weights(const float* from, Vec (&to)[BLOCK_VECS]) {
    for (int v = 0; v < BLOCK_VECS; ++v) to[v] = load(from + v * LANES);
}

inline void load_weights(const BFloat16* from, Vec (&to)[BLOCK_VECS]) {
    for (int v = 0; v < BLOCK_VECS; v += 2) {
        const BitVec pairs = load_pairs(from + v * LANES);
        to[v] = low_halves(pairs);
        to[v + 1] = high_halves(pairs);
    }
}

// Where weight column c of a block lies within its BLOCK entries.
inline int packed_column(const float*, int c) { return c; }
inline int packed_column(const BFloat16*, int c) {
    const int pair = c / (2 * LANES), half = c / LANES % 2;
    return pair * 2 * LANES + c % LANES * 2 + half;
}

struct Slice {
    const float* x;
    int64_t row_stride;
    int first, last;  // inputs
    int ahead;        // weights to prefetch by
};

// Adds a slice of inputs to the sums of ROWS rows by BLOCKS blocks, kept in registers meanwhile.
template <class W, int ROWS, int BLOCKS>
void add_slice(const Slice& slice, const W* weights, int64_t block_stride, Vec* sums, bool fresh) {
    constexpr int VECS = BLOCKS * BLOCK_VECS;
    Vec acc[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = fresh ? Vec{} : sums[r * VECS + v];
    for (int i = slice.first; i < slice.last; ++i) {
        for (int b = 0; b < BLOCKS; ++b) {
            const W* from = weights + b * block_stride + static_cast<int64_t>(i) * BLOCK;
            if (sizeof(W) < 4) __builtin_prefetch(from + slice.ahead, 0, 2);
            Vec w[BLOCK_VECS];
            load_weights(from, w);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < BLOCK_VECS; ++v)
                    acc[r][b * BLOCK_VECS + v] += w[v] * slice.x[r * slice.row_stride + i];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) sums[r * VECS + v] = acc[r][v];
}

template <class W>
using AddSlice = void (*)(const Slice&, const W*, int64_t, Vec*, bool);

template <class W, int... ROWS>
constexpr std::array<AddSlice<W>, MAX_ROWS> one_block(std::integer_sequence<int, ROWS...>) {
    return {add_slice<W, ROWS + 1, 1>...};
}

// Blocks that so few rows take at once: more chains, to hide the latency of an addition.
constexpr int blocks_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

template <class W>
AddSlice<W> kernel_for(int rows, int blocks) {
    static constexpr auto ONE_BLOCK = one_block<W>(std::make_integer_sequence<int, MAX_ROWS>());
    if (blocks == 4) return add_slice<W, 1, 4>;
    if (blocks == 2) return add_slice<W, 2, 2>;
    return ONE_BLOCK[rows - 1];
}

// Mirrored by `_Weights` in native.py.
struct Weights {
    Team* team;
    const void* packed;
    int32_t num_in, num_out;
};

struct Problem {
    const float* x;
    float* out;
    int num_rows, num_in, num_out;
    bool accumulate;
    int64_t row_stride = num_in;
};

void finish(const Problem& p, const Vec* sums, int row, int rows, int column, int vecs) {
    for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < vecs; ++v) {
            const int first = column + v * LANES, count = p.num_out - first;
            if (count <= 0) break;
            float* out = p.out + static_cast<int64_t>(row + r) * p.num_out + first;
            const Vec sum = sums[r * vecs + v];
            store_some(out, p.accumulate ? load_some(out, count) + sum : sum, count);
        }
    }
}

// All rows fit one tile: whole blocks, one after the other.
template <class W>
void one_tile(const Problem& p, const W* weights, int first, int last) {
    const int64_t block_stride = static_cast<int64_t>(p.num_in) * BLOCK;
    const int ahead = p.num_rows <= FEW_ROWS ? AHEAD_OF_FEW : AHEAD_OF_MANY;
    const Slice slice{p.x, p.row_stride, 0, p.num_in, ahead};
    Vec sums[MAX_ROWS * BLOCK_VECS];
    for (int block = first, blocks; block < last; block += blocks) {
        blocks = blocks_at_once(p.num_rows);
        if (blocks > last - block) blocks = 1;
        const W* from = weights + block * block_stride;
        kernel_for<W>(p.num_rows, blocks)(slice, from, block_stride, sums, true);
        finish(p, sums, 0, p.num_rows, block * BLOCK, blocks * BLOCK_VECS);
    }
}

// Tiles of nearly equal height (sixteen rows as 8 + 8) take turns on a slice of one block.
template <class W>
void many_tiles(const Problem& p, const W* weights, int first, int last, Scratch& scratch) {
    const int num_tiles = (p.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const auto tile_row = [&](int tile) {
        return static_cast<int>(static_cast<int64_t>(p.num_rows) * tile / num_tiles);
    };
    const int slice_inputs = SLICE_BYTES / (BLOCK * sizeof(W));
    constexpr int TILE_VECS = MAX_ROWS * BLOCK_VECS;
    auto* sums = static_cast<Vec*>(scratch.take(sizeof(Vec) * TILE_VECS * num_tiles));
    for (int block = first; block < last; ++block) {
        const W* from = weights + static_cast<int64_t>(p.num_in) * BLOCK * block;
        for (int i = 0; i < p.num_in; i += slice_inputs) {
            const int end = std::min(i + slice_inputs, p.num_in);
            for (int t = 0; t < num_tiles; ++t) {
                const int row = tile_row(t), rows = tile_row(t + 1) - row;
                // The first tile asks for the next slice, while the others find this one in cache.
                const int ahead = t == 0 ? slice_inputs * BLOCK : 0;
                const Slice slice{p.x + row * p.row_stride, p.row_stride, i, end, ahead};
                Vec* tile_sums = sums + t * TILE_VECS;
                kernel_for<W>(rows, 1)(slice, from, 0, tile_sums, i == 0);
                if (end == p.num_in) finish(p, tile_sums, row, rows, block * BLOCK, BLOCK_VECS);
            }
        }
    }
}

// Inputs of a row and what keeps rows apart: an odd number of cache lines, since rows a multiple of
// 4 KB apart would drive each other out of the first-level cache.
inline int64_t padded_row(int num_in) { return (((num_in + 15) / 16) | 1) * 16; }

inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const BFloat16*) { return round_to_bfloat16(x); }

template <class W>
void take_rows(Scratch& scratch, Problem& p, const W* weights) {
    if (std::is_same_v<W, float> && p.num_rows == 1) return;
    const int64_t stride = padded_row(p.num_in);
    auto* to = static_cast<float*>(scratch.take(p.num_rows * stride * sizeof(float)));
    for (int r = 0; r < p.num_rows; ++r) {
        const float* from = p.x + r * p.row_stride;
        for (int i = 0; i < p.num_in; i += LANES) {
            const int some = std::min(LANES, p.num_in - i);
            store_some(to + r * stride + i, rounded(load_some(from + i, some), weights), some);
        }
    }
    p.x = to;
    p.row_stride = stride;
}

template <class W>
void linear(Team& team, Problem p, const W* weights) {
    if (p.num_rows == 0) return;
    std::lock_guard<std::mutex> lock(team.entry());
    take_rows(team.shared(), p, weights);
    const int num_blocks = (p.num_out + BLOCK - 1) / BLOCK;
    const int64_t block_work = static_cast<int64_t>(p.num_rows) * p.num_in * BLOCK;
    const int64_t worthwhile = std::min<int64_t>(MIN_SPLIT_WORK / block_work, num_blocks);
    team.run(num_blocks, std::max(blocks_at_once(p.num_rows), static_cast<int>(worthwhile)),
             [&](int first, int last, int thread) {
                 if (p.num_rows <= MAX_ROWS) one_tile(p, weights, first, last);
                 else many_tiles(p, weights, first, last, team.own(thread));
             });
}

template <class W>
void pack(Team& team, const W* from, W* to, int num_out, int num_in) {
    std::lock_guard<std::mutex> lock(team.entry());
    const int num_blocks = (num_out + BLOCK - 1) / BLOCK;
    team.run(num_blocks, 1, [&](int first, int last, int) {
        for (int block = first; block < last; ++block) {
            W* block_to = to + static_cast<int64_t>(block) * num_in * BLOCK;
            for (int c = 0; c < BLOCK; ++c) {
                const int column = block * BLOCK + c;
                const W* row = from + static_cast<int64_t>(column) * num_in;
                W* entry = block_to + packed_column(from, c);
                for (int i = 0; i < num_in; ++i)
                    entry[static_cast<int64_t>(i) * BLOCK] = column < num_out ? row[i] : W{};
            }
        }
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

int outrider_block() { return BLOCK; }

void outrider_pack_float32(Team* team, const float* from, float* to, int num_out, int num_in) {
    pack(*team, from, to, num_out, num_in);
}

void outrider_pack_bfloat16(Team* team, const BFloat16* from, BFloat16* to, int num_out,
                            int num_in) {
    pack(*team, from, to, num_out, num_in);
}

void outrider_linear_float32(const Weights* w, const float* x, float* out, int num_rows,
                             int accumulate) {
    linear(w->team->here(), {x, out, num_rows, w->num_in, w->num_out, accumulate != 0},
           static_cast<const float*>(w->packed));
}

void outrider_linear_bfloat16(const Weights* w, const float* x, float* out, int num_rows,
                              int accumulate) {
    linear(w->team->here(), {x, out, num_rows, w->num_in, w->num_out, accumulate != 0},
           static_cast<const BFloat16*>(w->packed));
}
}
