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
#include "vectors.h"

namespace outrider {

namespace {

constexpr int BLOCK = LANES * BLOCK_VECS;
constexpr int VEC_BYTES = LANES * DOT_INPUTS;
// As in linear.cpp; a slice of a block stays in the first-level cache for all tiles of rows.
constexpr int SLICE_BYTES = 16 * 1024;
// Below this many multiply-adds a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 18;

// Groups first to last of one tile of rows. With each step, memory is asked for weights: `ahead`
// bytes from those of the first step; then `pace` bytes further each time.
struct Slice {
    const Rows& rows;
    int row, first, last, ahead, pace;
};

constexpr int GROUP_BYTES = GROUP * BLOCK, HEAD_BYTES = BLOCK * sizeof(float);
constexpr int STEP_BYTES = DOT_INPUTS * BLOCK;

template <int ROWS, int BLOCKS>
void add(const Slice& slice, const uint8_t* blocks, int64_t stride, Vec* sums) {
    constexpr int VECS = BLOCKS * BLOCK_VECS;
    BitVec acc[ROWS][VECS];
    const int8_t* x[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        x[r] = slice.rows.values_of(slice.row + r);
        const uint32_t below = *slice.rows.below_of(slice.row + r);
        for (int v = 0; v < VECS; ++v)
            acc[r][v] = slice.first != 0 ? cast<BitVec>(sums[r * VECS + v])
                        : HAS_SIGNED     ? BitVec{}
                                         : below - BitVec{};
    }
    int64_t ahead = HEAD_BYTES + slice.first * GROUP_BYTES + slice.ahead;
    for (int i = slice.first * GROUP; i < slice.last * GROUP; i += DOT_INPUTS, ahead += slice.pace) {
        for (int b = 0; b < BLOCKS; ++b) {
            const uint8_t* from =
                blocks + b * stride + HEAD_BYTES + static_cast<int64_t>(i) * BLOCK;
            for (int line = 0; line < STEP_BYTES; line += CACHE_LINE)
                __builtin_prefetch(blocks + b * stride + ahead + line, 0, 2);
            BitVec w[BLOCK_VECS], sizes[BLOCK_VECS];
            for (int v = 0; v < BLOCK_VECS; ++v) {
                w[v] = load_bytes(from + v * VEC_BYTES);
                if constexpr (HAS_SIGNED) w[v] ^= SIGN_BITS;
                sizes[v] = magnitudes(w[v]);
            }
            for (int r = 0; r < ROWS; ++r) {
                const BitVec inputs = splat_inputs(x[r] + i);
                for (int v = 0; v < BLOCK_VECS; ++v) {
                    BitVec& sum = acc[r][b * BLOCK_VECS + v];
                    if constexpr (HAS_SIGNED) sum = add_signed(sum, w[v], sizes[v], inputs);
                    else sum = add_dots(sum, w[v], inputs);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) sums[r * VECS + v] = cast<Vec>(acc[r][v]);
}

Vec scaled_sum(Vec sum, float scale, const uint8_t* block, int v) {
    float scales[LANES];
    std::memcpy(scales, block + v * sizeof(scales), sizeof(scales));
    return __builtin_convertvector(cast<IntVec>(sum), Vec) * (load(scales) * scale);
}

using Add = void (*)(const Slice&, const uint8_t*, int64_t, Vec*);

template <int... ROWS>
constexpr std::array<Add, MAX_ROWS> one_block(std::integer_sequence<int, ROWS...>) {
    return {add<ROWS + 1, 1>...};
}

// Blocks that so few rows take at once: more sums, to hide the latency of an addition.
constexpr int blocks_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

Add kernel_for(int rows, int blocks) {
    static constexpr auto ONE_BLOCK = one_block(std::make_integer_sequence<int, MAX_ROWS>());
    if (blocks == 4) return add<1, 4>;
    if (blocks == 2) return add<2, 2>;
    return ONE_BLOCK[rows - 1];
}

// Mirrored by `_Weights` in kernels/native/quantised.py.
struct Weights {
    Team* team;
    const uint8_t* packed;
    int32_t num_in, num_out;
};

struct Problem {
    const Rows& rows;
    const uint8_t* weights;
    int64_t block_bytes;
    float* out;
    int num_rows, num_out;
    bool accumulate;
};

void finish(const Problem& p, const Vec* sums, int row, int rows, int block, int blocks) {
    const int vecs = blocks * BLOCK_VECS;
    for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < vecs; ++v) {
            const int first = block * BLOCK + v * LANES, count = p.num_out - first;
            if (count <= 0) break;
            const uint8_t* from = p.weights + (block + v / BLOCK_VECS) * p.block_bytes;
            float* out = p.out + static_cast<int64_t>(row + r) * p.num_out + first;
            const Vec result = rounded(
                scaled_sum(sums[r * vecs + v], p.rows.scales[row + r], from, v % BLOCK_VECS));
            store_some(out, p.accumulate ? load_some(out, count) + result : result, count);
        }
    }
}

// All rows fit one tile: whole blocks, one after the other.
void one_tile(const Problem& p, int first, int last) {
    const Slice slice{p.rows, 0, 0, p.rows.num_groups, bytes_ahead(p.num_rows), STEP_BYTES};
    Vec sums[MAX_ROWS * BLOCK_VECS];
    for (int block = first, blocks; block < last; block += blocks) {
        blocks = blocks_at_once(p.num_rows);
        if (blocks > last - block) blocks = 1;
        const uint8_t* from = p.weights + block * p.block_bytes;
        kernel_for(p.num_rows, blocks)(slice, from, p.block_bytes, sums);
        finish(p, sums, 0, p.num_rows, block, blocks);
    }
}

// Tiles of nearly equal height take turns on a slice of one block.
void many_tiles(const Problem& p, int first, int last, Scratch& scratch) {
    constexpr int SLICE_GROUPS = SLICE_BYTES / GROUP_BYTES;
    constexpr int TILE_VECS = MAX_ROWS * BLOCK_VECS;
    const int num_tiles = (p.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const auto tile_row = [&](int tile) {
        return static_cast<int>(static_cast<int64_t>(p.num_rows) * tile / num_tiles);
    };
    const int share = SLICE_BYTES / num_tiles, pace = STEP_BYTES / num_tiles;
    auto* sums = static_cast<Vec*>(scratch.take(sizeof(Vec) * TILE_VECS * num_tiles));
    for (int block = first; block < last; ++block) {
        const uint8_t* from = p.weights + block * p.block_bytes;
        for (int group = 0; group < p.rows.num_groups; group += SLICE_GROUPS) {
            const int end = std::min(group + SLICE_GROUPS, p.rows.num_groups);
            for (int t = 0; t < num_tiles; ++t) {
                const int row = tile_row(t), rows = tile_row(t + 1) - row;
                // Each asks for its share of the next slice, so that memory is never idle.
                const int ahead = (end - group) * GROUP_BYTES + t * share;
                Vec* tile_sums = sums + t * TILE_VECS;
                kernel_for(rows, 1)({p.rows, row, group, end, ahead, pace}, from, 0, tile_sums);
                if (end == p.rows.num_groups) finish(p, tile_sums, row, rows, block, 1);
            }
        }
    }
}

void linear(const Weights& w, const float* x, float* out, int num_rows, bool accumulate) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows rows = quantised(team, {x, num_rows, w.num_in});
    const int64_t block_bytes =
        HEAD_BYTES + static_cast<int64_t>(rows.num_groups) * GROUP_BYTES;
    const Problem p{rows, w.packed, block_bytes, out, num_rows, w.num_out, accumulate};
    const int num_blocks = (w.num_out + BLOCK - 1) / BLOCK;
    const int64_t block_work = static_cast<int64_t>(num_rows) * rows.num_groups * GROUP * BLOCK;
    const int64_t worthwhile =
        std::min<int64_t>(MIN_SPLIT_WORK / std::max<int64_t>(block_work, 1), num_blocks);
    team.run(num_blocks, std::max(blocks_at_once(num_rows), static_cast<int>(worthwhile)),
             [&](int first, int last, int thread) {
                 if (num_rows <= MAX_ROWS) one_tile(p, first, last);
                 else many_tiles(p, first, last, team.own(thread));
             });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_linear_int8(const Weights* w, const float* x, float* out, int num_rows,
                          int accumulate) {
    linear(*w, x, out, num_rows, accumulate != 0);
}
}
