// Row tiles by blocks of packed weights: what linears of bfloat16 and int8 on tiles share.
//
// A block is 32 output columns: two column tiles side by side. A step of it is 64 bytes of inputs
// by 32 columns, 16 rows of 128 bytes, of which each column tile takes one half:
//
//     [inputs of lane 0][column 0 .. 15 | 16 .. 31]     a lane is two bfloat16 or four bytes
//     [inputs of lane 1][column 0 .. 15 | 16 .. 31]
//     ...
//
// Blocks are stored one after the other, a block's steps likewise, so a pass reads memory in order.
// Every sum takes the steps in order, whatever rows it comes with. Up to 32 rows meet a step at
// once, and the first-level cache keeps them for the next block; of more it keeps the block, and rows
// pass by it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

constexpr int TILE_BLOCK = 2 * TILE_COLUMNS;
constexpr int STEP_STRIDE = TILE_BLOCK * 4, STEP_BYTES = TILE_ROWS * STEP_STRIDE;
// How far ahead of use memory is asked for weights.
constexpr int TILE_PREFETCH = 8192;
// A thread takes at least so many bytes of weights at a time: less would not repay its tiles.
constexpr int CHUNK_BYTES = 32 * 1024;
// Bytes of rows that meet all blocks of a chunk before other rows do: they stay in the cache.
constexpr int BAND_BYTES = 512 * 1024;

// Mirrored by `WeightsStruct` in ops.py.
struct TileWeights {
    Team* team;
    const uint8_t* packed;
    int32_t num_in, num_out;
};

// Rows of activations, whole steps each.
struct TileInputs {
    const uint8_t* rows;
    int64_t stride;
    int num_rows, num_steps;
};

struct TileOutputs {
    float* out;
    int num_out;
    bool accumulate;

    float* place(int row, int block) const {
        return out + static_cast<int64_t>(row) * num_out + block * TILE_BLOCK;
    }

    void ask_to_write(int row, int block) const {
        const float* line = place(row, block);
        tiles::ask_to_write(line), tiles::ask_to_write(line + TILE_COLUMNS);
    }

    // Whether a block's sums are stored as they are.
    bool takes_tiles(int block) const { return !accumulate && (block + 1) * TILE_BLOCK <= num_out; }

    // Columns of one block in one row; `result(v)` is the block's v-th vector.
    template <class Result>
    void put(int row, int block, const Result& result) const {
        for (int v = 0; v < TILE_BLOCK / LANES; ++v) {
            const int first = block * TILE_BLOCK + v * LANES, count = num_out - first;
            if (count <= 0) break;
            float* to = place(row, block) + v * LANES;
            const Vec vec = result(v);
            store_some(to, accumulate ? load_some(to, count) + vec : vec, count);
        }
    }
};

// Rows dealt to tiles of one height, the least that does. The last tile begins early enough to be
// whole; what it has in common with the one before has the same bits and is dropped. The number of
// tiles is a multiple of `multiple`.
struct RowTiles {
    explicit RowTiles(int num_rows, int multiple = 1)
        : num_rows(num_rows),
          count((num_rows + multiple * TILE_ROWS - 1) / (multiple * TILE_ROWS) * multiple),
          height((num_rows + count - 1) / count) {}

    int num_rows, count, height;

    int first(int tile) const { return std::min(tile * height, num_rows - height); }
    int num_dropped(int tile) const { return tile * height - first(tile); }
};

inline bool few_rows(const TileInputs& in) { return in.num_rows * in.stride <= BAND_BYTES; }

// Of many rows, so many blocks that all threads have as many chunks, where some number of more than
// half of the most gives that.
inline int blocks_of_chunk(const Team& team, int num_blocks, int64_t block_bytes, bool are_few) {
    const int num_threads = team.num_threads();
    if (are_few)
        return static_cast<int>(std::min<int64_t>(std::max<int64_t>(CHUNK_BYTES / block_bytes, 1),
                                                  num_blocks));
    const int most = std::max(1, num_blocks / (4 * num_threads));
    for (int chunk = most; 2 * chunk > most; --chunk)
        if ((num_blocks + chunk - 1) / chunk % num_threads == 0) return chunk;
    return most;
}

template <int BYTES>
inline void prefetch(const uint8_t* weights) {
#pragma GCC unroll 32
    for (int at = 0; at < BYTES; at += CACHE_LINE)
        __builtin_prefetch(weights + TILE_PREFETCH + at, 0, 2);
}

struct BFloat16Tiles {
    template <int C, int A, int B>
    static void dot() {
        tiles::dot_bfloat16<C, A, B>();
    }
};

inline void round_row(const float* x, int num_in, int num_padded, BFloat16* to) {
    for (int i = 0; i < num_padded; i += LANES) {
        const Vec some = i < num_in ? load_some(x + i, num_in - i) : Vec{};
        const BitVec bits = cast<BitVec>(round_to_bfloat16(some)) >> 16;
        const HalfVec halves = __builtin_convertvector(bits, HalfVec);
        std::memcpy(to + i, &halves, sizeof(halves));
    }
}

template <bool BOTH>
void zero_sums() {
    tiles::zero<0>(), tiles::zero<1>();
    if (BOTH) tiles::zero<2>(), tiles::zero<3>();
}

// What of a step is read once more before long, so that the first-level cache had better keep it: the
// weights, by the next rows, or the rows, by the next block. It cannot hold both.
enum Kept { BOTH_SIDES, WEIGHTS, ROWS };

template <int TILE, bool IS_KEPT>
inline void load_tile(const uint8_t* from, int64_t stride) {
    if (IS_KEPT) tiles::load<TILE>(from, stride);
    else tiles::load_passing<TILE>(from, stride);
}

// Adds steps of one or two row tiles by a block to tiles 0 and 1, and 2 and 3; before(step) is called
// with each.
template <class Format, bool BOTH, Kept KEPT, class Before>
void add_steps(const uint8_t* rows, const uint8_t* more_rows, const TileInputs& in,
               const uint8_t* weights, const Before& before) {
    using Shapes = TileShapes;
    for (int step = 0; step < in.num_steps; ++step, weights += STEP_BYTES) {
        before(step);
        load_tile<Shapes::ROWS_0, KEPT != WEIGHTS>(rows + step * TILE_BYTES, in.stride);
        load_tile<Shapes::COLUMNS_0, KEPT != ROWS>(weights, STEP_STRIDE);
        Format::template dot<0, Shapes::ROWS_0, Shapes::COLUMNS_0>();
        load_tile<Shapes::COLUMNS_1, KEPT != ROWS>(weights + TILE_BYTES, STEP_STRIDE);
        Format::template dot<1, Shapes::ROWS_0, Shapes::COLUMNS_1>();
        if (!BOTH) continue;
        load_tile<Shapes::ROWS_1, KEPT != WEIGHTS>(more_rows + step * TILE_BYTES, in.stride);
        Format::template dot<2, Shapes::ROWS_1, Shapes::COLUMNS_0>();
        Format::template dot<3, Shapes::ROWS_1, Shapes::COLUMNS_1>();
    }
}

template <class Format, bool BOTH>
void add_steps(const uint8_t* rows, const uint8_t* more_rows, const TileInputs& in,
               const uint8_t* weights, bool is_fresh) {
    add_steps<Format, BOTH, BOTH_SIDES>(rows, more_rows, in, weights, [=](int step) {
        if (is_fresh) prefetch<STEP_BYTES>(weights + step * STEP_BYTES);
    });
}

template <class Format, bool BOTH>
void multiply(const uint8_t* rows, const uint8_t* more_rows, const TileInputs& in,
              const uint8_t* weights, bool is_fresh) {
    zero_sums<BOTH>();
    add_steps<Format, BOTH>(rows, more_rows, in, weights, is_fresh);
}

// The sums of one or two row tiles by a block; rows lie `stride` bytes apart.
template <bool BOTH>
void store_sums(void* rows, void* more_rows, int64_t stride) {
    tiles::store<0>(rows, stride);
    tiles::store<1>(static_cast<uint8_t*>(rows) + TILE_BYTES, stride);
    if (!BOTH) return;
    tiles::store<2>(more_rows, stride);
    tiles::store<3>(static_cast<uint8_t*>(more_rows) + TILE_BYTES, stride);
}

// 32 sums of 32 bits for each row of two row tiles.
struct alignas(CACHE_LINE) BlockSums {
    uint8_t of[2][TILE_ROWS][STEP_STRIDE];

    template <bool BOTH>
    void take() {
        store_sums<BOTH>(of[0], of[1], STEP_STRIDE);
    }
};

// All blocks of [first, last): the weights of block b, STEP_BYTES a step, begin at weights_of(b). Sums
// are stored as they are if `are_plain`, and wherever that cannot be, finish(row, block, sums) gets 32.
template <class Format, class WeightsOf, class Finish>
void multiply_blocks(const TileInputs& in, const TileOutputs& out, bool are_plain, int first,
                     int last, const WeightsOf& weights_of, const Finish& finish) {
    // Rows of the output that memory is asked for with each step.
    constexpr int ROWS_A_STEP = 4;
    const RowTiles dealt(in.num_rows);
    const Tiles in_use({dealt.height, TILE_BYTES});
    const int64_t tile_bytes = dealt.height * in.stride;
    const int band = std::max<int>(2, static_cast<int>(BAND_BYTES / tile_bytes) / 2 * 2);
    BlockSums sums;
    const auto multiply_tiles = [&](int tile, int block, auto both, auto kept) {
        constexpr bool BOTH = decltype(both)::value;
        const int row = dealt.first(tile), next = BOTH ? dealt.first(tile + 1) : row;
        const int num_rows = next + dealt.height - row;
        const uint8_t* weights = weights_of(block);
        zero_sums<BOTH>();
        add_steps<Format, BOTH, decltype(kept)::value>(
            in.rows + row * in.stride, in.rows + next * in.stride, in, weights, [&](int step) {
                if (tile == 0) prefetch<STEP_BYTES>(weights + step * STEP_BYTES);
                const int end = std::min((step + 1) * ROWS_A_STEP, num_rows);
                for (int r = step * ROWS_A_STEP; r < end; ++r) out.ask_to_write(row + r, block);
            });
        if (are_plain && out.takes_tiles(block))
            return store_sums<BOTH>(out.place(row, block), out.place(next, block),
                                    out.num_out * sizeof(float));
        sums.take<BOTH>();
        for (int t = 0; t < 1 + BOTH; ++t)
            for (int r = dealt.num_dropped(tile + t); r < dealt.height; ++r)
                finish((t == 0 ? row : next) + r, block, sums.of[t][r]);
    };
    const auto multiply_band = [&](int from, int end, auto kept) {
        for (int block = first; block < last; ++block)
            for (int tile = from; tile < end; tile += 2) {
                if (tile + 1 < end) multiply_tiles(tile, block, std::true_type{}, kept);
                else multiply_tiles(tile, block, std::false_type{}, kept);
            }
    };
    for (int from = 0; from < dealt.count; from += band) {
        const int end = std::min(from + band, dealt.count);
        if (end - from > 2) multiply_band(from, end, std::integral_constant<Kept, WEIGHTS>{});
        else multiply_band(from, end, std::integral_constant<Kept, ROWS>{});
    }
}

}  // namespace outrider

#endif
