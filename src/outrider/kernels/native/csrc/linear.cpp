// out_NO (+)= x_NI W_OI^T, bit for bit the same for a row whatever rows it comes with.
//
// Each output is one chain of fused multiply-adds, or of dot products of pairs, over i = 0, 1, 2,
// ...; tiles of 1 to MAX_ROWS rows differ only in how many chains run side by side. Weights are
// packed once into blocks of BLOCK output columns, [O / BLOCK][steps][BLOCK] (formats.h), so a block
// streams through the caches once per pass and serves every tile of rows from there. Threads split
// the blocks.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "formats.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr int BLOCK = LANES * BLOCK_VECS;
// Weights a pass over a block takes at once when several tiles of rows need them again: the slice
// stays in the second-level cache, and starting a tile anew counts for little. A chain's running sum
// is kept between slices, unrounded.
constexpr int SLICE_BYTES = 64 * 1024;
// Below this many multiply-adds a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 16;

// Rows of inputs, `stride` entries apart.
template <class W>
struct Rows {
    using Input = typename Format<W>::Input;
    const Input* at;
    int64_t stride;

    const Input* row(int row) const { return at + row * stride; }
};

// Steps [first, last) of a block. With each, memory is asked for weights: for the first, `ahead`
// bytes from the block's beginning; then `pace` bytes further each time.
struct Slice {
    int first, last;
    int64_t ahead;
    int pace;
};

template <class W>
constexpr int STEP_BYTES = BLOCK * sizeof(W);

template <class W>
inline void prefetch(const W* block, const Slice& slice, int step) {
    const char* at = reinterpret_cast<const char*>(block) + slice.ahead +
                     static_cast<int64_t>(step - slice.first) * slice.pace;
    for (int line = 0; line < STEP_BYTES<W>; line += CACHE_LINE)
        __builtin_prefetch(at + line, 0, 2);
}

// Adds a slice of inputs to the sums of ROWS rows by BLOCKS blocks, kept in registers meanwhile.
template <class W, int ROWS, int BLOCKS>
void add_slice(const Slice& slice, const Rows<W>& x, const W* weights, int64_t block_stride,
               Vec* sums) {
    using F = Format<W>;
    constexpr int VECS = BLOCKS * BLOCK_VECS;
    Vec acc[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = slice.first == 0 ? Vec{} : sums[r * VECS + v];
    for (int i = slice.first; i < slice.last; ++i) {
        for (int b = 0; b < BLOCKS; ++b) {
            const W* block = weights + b * block_stride;
            if (F::PREFETCHES) prefetch(block, slice, i);
            typename F::Weights w[BLOCK_VECS];
            F::load(block + static_cast<int64_t>(i) * BLOCK, w);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < BLOCK_VECS; ++v)
                    F::add(acc[r][b * BLOCK_VECS + v], w[v], x.row(r)[i]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) sums[r * VECS + v] = acc[r][v];
}

template <class W>
using AddSlice = void (*)(const Slice&, const Rows<W>&, const W*, int64_t, Vec*);

template <class W, int... ROWS>
constexpr std::array<AddSlice<W>, MAX_ROWS> one_block(std::integer_sequence<int, ROWS...>) {
    return {add_slice<W, ROWS + 1, 1>...};
}

// Blocks that so few rows take at once: enough chains to hide the latency of an addition, as many as
// registers hold.
constexpr int blocks_at_once(int rows) {
    return rows == 1 ? 4 : rows == 2 || (rows == 3 && NUM_REGISTERS == 32) ? 2 : 1;
}

template <class W>
AddSlice<W> kernel_for(int rows, int blocks) {
    static constexpr auto ONE_BLOCK = one_block<W>(std::make_integer_sequence<int, MAX_ROWS>());
    if (blocks == 4) return add_slice<W, 1, 4>;
    if (blocks == 2) return rows == 2 ? add_slice<W, 2, 2> : add_slice<W, 3, 2>;
    return ONE_BLOCK[rows - 1];
}

// Mirrored by `WeightsStruct` in ops.py.
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
void one_tile(const Problem& p, const Rows<W>& x, const W* weights, int first, int last) {
    const int steps = num_steps<W>(p.num_in);
    const int64_t block_stride = static_cast<int64_t>(steps) * BLOCK;
    const Slice whole{0, steps, bytes_ahead(p.num_rows), STEP_BYTES<W>};
    Vec sums[MAX_ROWS * BLOCK_VECS];
    for (int block = first, blocks; block < last; block += blocks) {
        blocks = blocks_at_once(p.num_rows);
        if (blocks > last - block) blocks = 1;
        const W* from = weights + block * block_stride;
        kernel_for<W>(p.num_rows, blocks)(whole, x, from, block_stride, sums);
        finish(p, sums, 0, p.num_rows, block * BLOCK, blocks * BLOCK_VECS);
    }
}

// Tiles of nearly equal height (sixteen rows as 8 + 8) take turns on a slice of one block.
template <class W>
void many_tiles(const Problem& p, const Rows<W>& x, const W* weights, int first, int last,
                Scratch& scratch) {
    const int num_tiles = (p.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const auto tile_row = [&](int tile) {
        return static_cast<int>(static_cast<int64_t>(p.num_rows) * tile / num_tiles);
    };
    const int steps = num_steps<W>(p.num_in);
    constexpr int SLICE_STEPS = SLICE_BYTES / STEP_BYTES<W>, TILE_VECS = MAX_ROWS * BLOCK_VECS;
    const int share = SLICE_BYTES / num_tiles;
    auto* sums = static_cast<Vec*>(scratch.take(sizeof(Vec) * TILE_VECS * num_tiles));
    for (int block = first; block < last; ++block) {
        const W* from = weights + static_cast<int64_t>(steps) * BLOCK * block;
        for (int i = 0; i < steps; i += SLICE_STEPS) {
            const int end = std::min(i + SLICE_STEPS, steps);
            for (int t = 0; t < num_tiles; ++t) {
                const int row = tile_row(t), rows = tile_row(t + 1) - row;
                // Each asks for its share of the next slice, so that memory is never idle.
                const int64_t next = static_cast<int64_t>(end) * STEP_BYTES<W> + t * share;
                const Slice slice{i, end, next, (share + end - i - 1) / (end - i)};
                Vec* tile_sums = sums + t * TILE_VECS;
                kernel_for<W>(rows, 1)(slice, {x.row(row), x.stride}, from, 0, tile_sums);
                if (end == steps) finish(p, tile_sums, row, rows, block * BLOCK, BLOCK_VECS);
            }
        }
    }
}

// Entries of a row and what keeps rows apart: an odd number of cache lines, since rows a multiple of
// 4 KB apart would drive each other out of the first-level cache.
inline int64_t padded_row(int num_entries) { return (((num_entries + 15) / 16) | 1) * 16; }

// The rows as the format reads them.
template <class W>
Rows<W> read_rows(Scratch& scratch, const Problem& p) {
    using Input = typename Format<W>::Input;
    if constexpr (std::is_same_v<W, float>)
        if (p.num_rows == 1) return {p.x, p.num_in};
    const int64_t stride = padded_row(num_steps<W>(p.num_in));
    auto* to = static_cast<Input*>(scratch.take(p.num_rows * stride * sizeof(Input)));
    for (int r = 0; r < p.num_rows; ++r) {
        const float* from = p.x + static_cast<int64_t>(r) * p.num_in;
        for (int i = 0; i < p.num_in; i += LANES)
            Format<W>::read(from + i, std::min(LANES, p.num_in - i),
                            to + r * stride + i / Format<W>::INPUTS);
    }
    return {to, stride};
}

template <class W>
void linear(const Weights& w, const float* x, float* out, int num_rows, bool accumulate) {
    if (num_rows == 0) return;
    const Problem p{x, out, num_rows, w.num_in, w.num_out, accumulate};
    const auto* weights = static_cast<const W*>(w.packed);
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows<W> rows = read_rows<W>(team.shared(), p);
    const int num_blocks = (p.num_out + BLOCK - 1) / BLOCK;
    const int64_t block_work = static_cast<int64_t>(p.num_rows) * p.num_in * BLOCK;
    const int64_t worthwhile = std::min<int64_t>(MIN_SPLIT_WORK / block_work, num_blocks);
    team.run(num_blocks, std::max(blocks_at_once(p.num_rows), static_cast<int>(worthwhile)),
             [&](int first, int last, int thread) {
                 if (p.num_rows <= MAX_ROWS) one_tile(p, rows, weights, first, last);
                 else many_tiles(p, rows, weights, first, last, team.own(thread));
             });
}

template <class W>
void pack(Team& team, const typename Format<W>::Plain* from, W* to, int num_out, int num_in) {
    std::lock_guard<std::mutex> lock(team.entry());
    const int num_blocks = (num_out + BLOCK - 1) / BLOCK, steps = num_steps<W>(num_in);
    team.run(num_blocks, 1, [&](int first, int last, int) {
        for (int column = first * BLOCK; column < last * BLOCK; ++column) {
            const auto* inputs = from + static_cast<int64_t>(column) * num_in;
            W* entry = to + static_cast<int64_t>(column / BLOCK) * steps * BLOCK +
                       Format<W>::place(column % BLOCK);
            for (int i = 0; i < steps; ++i)
                entry[static_cast<int64_t>(i) * BLOCK] =
                    column < num_out ? Format<W>::entry(inputs, i, num_in) : W{};
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

void outrider_pack_float16(Team* team, const Float16* from, Float16* to, int num_out, int num_in) {
    pack(*team, from, to, num_out, num_in);
}

void outrider_linear_float32(const Weights* w, const float* x, float* out, int num_rows,
                             int accumulate) {
    linear<float>(*w, x, out, num_rows, accumulate != 0);
}

void outrider_linear_bfloat16(const Weights* w, const float* x, float* out, int num_rows,
                              int accumulate) {
    linear<BFloat16>(*w, x, out, num_rows, accumulate != 0);
}

void outrider_linear_float16(const Weights* w, const float* x, float* out, int num_rows,
                             int accumulate) {
    linear<Float16>(*w, x, out, num_rows, accumulate != 0);
}

#if defined(OUTRIDER_HAS_PAIRS)
void outrider_pack_bfloat16_dots(Team* team, const BFloat16* from, Pair* to, int num_out,
                                  int num_in) {
    pack(*team, from, to, num_out, num_in);
}

void outrider_linear_bfloat16_dots(const Weights* w, const float* x, float* out, int num_rows,
                                    int accumulate) {
    linear<Pair>(*w, x, out, num_rows, accumulate != 0);
}

#endif
}
