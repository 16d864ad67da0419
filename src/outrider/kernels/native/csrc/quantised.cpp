// out_NO (+)= x_NI W_OI^T over weights of 8 bits; kernels/reference/linear.py says what they mean.
//
// A row of x becomes integers of -127 to 127 and one scale. Sums of integers are exact in any order,
// so a row's bits are the same whatever rows it comes with, and on every CPU: one sum over all
// inputs, times (row's scale * column's scale).
//
// Weights are stored unsigned, 128 more than they are, and sums start from that much less (`below`
// in integers.h). They lie in blocks of BLOCK columns, as in linear.cpp: BLOCK float scales, then
// [I / 4][BLOCK][4] bytes. Zeros fill the last group.
#include <algorithm>
#include <array>
#include <utility>

#include "dots.h"
#include "integers.h"
#include "team.h"
#include "unrolled.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr int BLOCK = LANES * BLOCK_VECS;
constexpr int VEC_BYTES = LANES * DOT_INPUTS;
// Groups first to last of one tile of rows. With each step, memory is asked for weights: `ahead`
// bytes from those of the first step; then `pace` bytes further each time.
struct Slice {
    const Rows& rows;
    int row, first, last, ahead, pace;
};

constexpr int GROUP_BYTES = GROUP * BLOCK, HEAD_BYTES = BLOCK * sizeof(float);
constexpr int STEP_BYTES = DOT_INPUTS * BLOCK;

// Sums of ROWS rows by one block, kept in registers meanwhile.
template <int ROWS>
void add(const Slice& slice, const uint8_t* block, BitVec* sums) {
    BitVec acc[ROWS][BLOCK_VECS];
    const int8_t* x[ROWS];
    unrolled<ROWS>([&](auto r) {
        x[r] = slice.rows.values_of(slice.row + r);
        const uint32_t below = HAS_SIGNED ? 0 : *slice.rows.below_of(slice.row + r);
        unrolled<BLOCK_VECS>([&](auto v) {
            acc[r][v] = slice.first != 0 ? sums[r * BLOCK_VECS + v] : below - BitVec{};
        });
    });
    const uint8_t* from = block + HEAD_BYTES + slice.first * GROUP_BYTES;
    const uint8_t* asked = from + slice.ahead;
    for (int i = slice.first * GROUP; i < slice.last * GROUP; i += DOT_INPUTS) {
        for (int line = 0; line < STEP_BYTES; line += CACHE_LINE) __builtin_prefetch(asked + line);
        BitVec w[BLOCK_VECS], sizes[BLOCK_VECS];
        unrolled<BLOCK_VECS>([&](auto v) {
            w[v] = load_bytes(from + v * VEC_BYTES);
            if constexpr (HAS_SIGNED) w[v] ^= SIGN_BITS;
            sizes[v] = magnitudes(w[v]);
        });
        unrolled<ROWS>([&](auto r) {
            const BitVec inputs = splat_inputs(x[r] + i);
            unrolled<BLOCK_VECS>([&](auto v) {
                if constexpr (HAS_SIGNED) acc[r][v] = add_signed(acc[r][v], w[v], sizes[v], inputs);
                else acc[r][v] = add_dots(acc[r][v], w[v], inputs);
            });
        });
        from += STEP_BYTES;
        asked += slice.pace;
    }
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) { sums[r * BLOCK_VECS + v] = acc[r][v]; });
    });
}

using Add = void (*)(const Slice&, const uint8_t*, BitVec*);

template <int... ROWS>
constexpr std::array<Add, MAX_ROWS> adds(std::integer_sequence<int, ROWS...>) {
    return {add<ROWS + 1>...};
}

// By rows, from 1 on.
constexpr auto ADDS = adds(std::make_integer_sequence<int, MAX_ROWS>());

struct Problem {
    const Rows& rows;
    const uint8_t* weights;
    int64_t block_bytes;
    float* out;
    int num_rows, num_out;
    bool accumulate;
};

void finish(const Problem& p, const BitVec* sums, int row, int rows, int block) {
    const uint8_t* head = p.weights + block * p.block_bytes;
    for (int v = 0; v < BLOCK_VECS; ++v) {
        const int first = block * BLOCK + v * LANES, count = p.num_out - first;
        if (count <= 0) break;
        Vec scales;
        std::memcpy(&scales, head + v * sizeof(scales), sizeof(scales));
        float* out = p.out + static_cast<int64_t>(row) * p.num_out + first;
        for (int r = 0; r < rows; ++r, out += p.num_out) {
            const Vec sum = floats(cast<IntVec>(sums[r * BLOCK_VECS + v]));
            const Vec result = apart(sum * (scales * p.rows.scales[row + r]));
            store_some(out, p.accumulate ? load_some(out, count) + result : result, count);
        }
    }
}

// All rows fit one tile: whole blocks, one after the other.
void one_tile(const Problem& p, int first, int last) {
    const Slice slice{p.rows, 0, 0, p.rows.num_groups, BYTES_AHEAD, STEP_BYTES};
    BitVec sums[MAX_ROWS * BLOCK_VECS];
    for (int block = first; block < last; ++block) {
        ADDS[p.num_rows - 1](slice, p.weights + block * p.block_bytes, sums);
        finish(p, sums, 0, p.num_rows, block);
    }
}

// Tiles of nearly equal height take turns on a slice of one block.
void many_tiles(const Problem& p, int first, int last, Scratch& scratch) {
    const int num_groups = p.rows.num_groups, slice = slice_units(num_groups, GROUP_BYTES);
    constexpr int TILE_VECS = MAX_ROWS * BLOCK_VECS;
    const int num_tiles = (p.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const auto tile_row = [&](int tile) {
        return static_cast<int>(static_cast<int64_t>(p.num_rows) * tile / num_tiles);
    };
    const int pace = STEP_BYTES / num_tiles;
    auto* sums = static_cast<BitVec*>(scratch.take(sizeof(BitVec) * TILE_VECS * num_tiles));
    for (int block = first; block < last; ++block) {
        const uint8_t* from = p.weights + block * p.block_bytes;
        for (int group = 0; group < num_groups; group += slice) {
            const int end = std::min(group + slice, num_groups);
            for (int t = 0; t < num_tiles; ++t) {
                const int row = tile_row(t), rows = tile_row(t + 1) - row;
                // Each asks for its share of the next slice, so that memory is never idle.
                const int ahead = (end - group) * (GROUP_BYTES + t * pace * GROUP / DOT_INPUTS);
                BitVec* tile_sums = sums + t * TILE_VECS;
                ADDS[rows - 1]({p.rows, row, group, end, ahead, pace}, from, tile_sums);
                if (end == num_groups) finish(p, tile_sums, row, rows, block);
            }
        }
    }
}

void linear(const ByteMatrix& w, int padded_to, const float* x, float* out, int num_rows,
            bool accumulate) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows rows = quantised(team, {x, num_rows, w.num_in});
    const int64_t padded_in = static_cast<int64_t>((w.num_in + padded_to - 1) / padded_to) * padded_to;
    const int64_t block_bytes = HEAD_BYTES + padded_in * BLOCK;
    const Problem p{rows, w.packed, block_bytes, out, num_rows, w.num_out, accumulate};
    const int num_blocks = (w.num_out + BLOCK - 1) / BLOCK;
    const int64_t block_work = static_cast<int64_t>(num_rows) * rows.num_groups * GROUP * BLOCK;
    const int64_t worthwhile =
        std::min<int64_t>(MIN_SPLIT_WORK / std::max<int64_t>(block_work, 1), num_blocks);
    team.run(num_blocks, std::max(1, static_cast<int>(worthwhile)),
             [&](int first, int last, int thread) {
                 if (num_rows <= MAX_ROWS) one_tile(p, first, last);
                 else many_tiles(p, first, last, team.own(thread));
             });
}

}  // namespace

bool int8_on_vectors(const ByteMatrix& w, int block, int padded_to, const float* x, float* out,
                     int num_rows, bool accumulate) {
    if (BLOCK != block) return false;
    linear(w, padded_to, x, out, num_rows, accumulate);
    return true;
}

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_linear_int8(const ByteMatrix* w, const float* x, float* out, int num_rows,
                          int accumulate) {
    linear(*w, GROUP, x, out, num_rows, accumulate != 0);
}
}
