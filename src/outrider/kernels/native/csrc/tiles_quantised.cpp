// Weights of 8 or 4 bits on tiles. The integers, their order of sums and so all bits are those of
// quantised.cpp; kernels/reference/linear.py says what they mean.
//
// int8: blocks of 32 columns as in quantised.cpp (scales, then bytes 128 more than they are), with
// inputs padded to whole steps of tiles_blocks.h by bytes of 0, which add nothing.
//
// int4: blocks as in quantised.cpp. A group of 32 inputs is half a tile: its nibbles become bytes
// in memory that stays in the first-level cache, one dot gives its sums for 16 columns, and these
// are scaled and added up in registers. The sums of a group are read one group later, since what a
// tile stores can be loaded only after some time.
#include <array>
#include <utility>

#include "integers.h"
#include "tiles_blocks.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

namespace {

typedef uint8_t TileRow __attribute__((vector_size(TILE_BYTES)));

struct Int8Tiles {
    static constexpr int HEAD_BYTES = TILE_BLOCK * sizeof(float);

    template <int C, int A, int B>
    static void dot() {
        tiles::dot_signed_unsigned<C, A, B>();
    }
};

void linear_int8(const TileWeights& w, const float* x, TileOutputs to, int num_rows) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows rows = quantised(team, {x, num_rows, w.num_in}, {128, false});
    const int num_steps = (rows.num_groups * GROUP + TILE_BYTES - 1) / TILE_BYTES;
    const TileInputs in{reinterpret_cast<const uint8_t*>(rows.values), rows.stride, num_rows,
                        num_steps};
    const int64_t block_bytes =
        Int8Tiles::HEAD_BYTES + static_cast<int64_t>(num_steps) * STEP_BYTES;
    const int num_blocks = (w.num_out + TILE_BLOCK - 1) / TILE_BLOCK;
    const int chunk = blocks_of_chunk(team, num_blocks, block_bytes, few_rows(in));
    const auto finish = [&](int row, int block, const uint8_t* sums) {
        const float scale = rows.scales[row];
        const uint32_t below = *rows.below_of(row);
        const uint8_t* scales = w.packed + block * block_bytes;
        to.put(row, block, [&](int v) {
            BitVec sum;
            float column_scales[LANES];
            std::memcpy(&sum, sums + v * sizeof(sum), sizeof(sum));
            std::memcpy(column_scales, scales + v * sizeof(column_scales), sizeof(column_scales));
            const Vec exact = __builtin_convertvector(cast<IntVec>(sum + below), Vec);
            return rounded(exact * (load(column_scales) * scale));
        });
    };
    team.run(num_blocks, chunk, [&](int first, int last, int) {
        multiply_blocks<Int8Tiles>(
            in, first, last,
            [&](int block) { return w.packed + block * block_bytes + Int8Tiles::HEAD_BYTES; },
            finish);
    });
}

// One half of a block of int4: the 16 columns of one tile.
struct Half {
    static constexpr int NUM_VECS = TILE_COLUMNS / LANES;
    static constexpr int SCALE_BYTES = TILE_BLOCK * 2, TILE_SIZE = GROUP * TILE_COLUMNS;
    static constexpr int GROUP_BYTES = SCALE_BYTES + GROUP / 2 * TILE_BLOCK;

    const uint8_t* block;
    int number;  // 0 or 1

    const uint8_t* group(int g) const { return block + static_cast<int64_t>(g) * GROUP_BYTES; }

    // Rows of a tile: four inputs of all columns. Low halves of the bytes have the even ones.
    void unpack(int g, uint8_t* to) const {
        const uint8_t* from = group(g) + SCALE_BYTES + number * TILE_BYTES;
        for (int row = 0; row < GROUP / 4; row += 2, from += 2 * TILE_BYTES) {
            TileRow both;
            std::memcpy(&both, from, sizeof(both));
            const TileRow low = (both & 15) - 8, high = (both >> 4) - 8;
            std::memcpy(to + row * TILE_BYTES, &low, sizeof(low));
            std::memcpy(to + (row + 1) * TILE_BYTES, &high, sizeof(high));
        }
    }

    Vec scales(int g, int v) const {
        HalfVec bits;
        std::memcpy(&bits, group(g) + (number * NUM_VECS + v) * sizeof(bits), sizeof(bits));
        return cast<Vec>(__builtin_convertvector(bits, BitVec) << 16);
    }
};

// Where groups are unpacked: all of them if several row tiles need them, else a few at a time.
struct Panel {
    static constexpr int FEW = 4;
    uint8_t* memory;
    bool holds_all;

    uint8_t* tile(int g) const { return memory + (holds_all ? g : g % FEW) * Half::TILE_SIZE; }
};

struct RowTile {
    const int8_t* values;
    int64_t stride;
    int num_groups;
    bool is_first;  // else the panel is filled already
};

// Sums of ROWS rows by 16 columns. They are named one by one, by constants: an array that is walked
// in loops would stay in memory, since whatever touches tiles may touch any memory.
template <int... I>
struct Sums {
    Vec of[sizeof...(I)] = {};

    // `parts` are a group's integers, to be scaled.
    void add(const Half& half, int g, const float* parts) {
        Vec scales[Half::NUM_VECS];
        for (int v = 0; v < Half::NUM_VECS; ++v) scales[v] = half.scales(g, v);
        ((of[I] += __builtin_convertvector(cast<IntVec>(load(parts + I * LANES)), Vec) *
                   scales[I % Half::NUM_VECS]),
         ...);
    }

    void put(float* to) const { (store(to + I * LANES, of[I]), ...); }
};

// All groups of some rows; `to` gets what they add up to.
template <int... I>
void add_groups(const RowTile rows, const Half half, const Panel panel, float* to) {
    using Shapes = TileShapes;
    alignas(CACHE_LINE) float parts[2][sizeof...(I) * LANES];
    Sums<I...> sums;
    if (rows.is_first) half.unpack(0, panel.tile(0));
    for (int g = 0; g < rows.num_groups; ++g) {
        if (rows.is_first && g + 1 < rows.num_groups) half.unpack(g + 1, panel.tile(g + 1));
        if (rows.is_first && half.number == 0) prefetch<Half::GROUP_BYTES>(half.group(g));
        tiles::zero<0>();
        tiles::load<Shapes::ROWS_0>(rows.values + g * GROUP, rows.stride);
        tiles::load<Shapes::COLUMNS_0>(panel.tile(g), TILE_BYTES);
        tiles::dot_signed<0, Shapes::ROWS_0, Shapes::COLUMNS_0>();
        tiles::store<0>(parts[g % 2], TILE_BYTES);
        if (g > 0) sums.add(half, g - 1, parts[(g - 1) % 2]);
    }
    sums.add(half, rows.num_groups - 1, parts[(rows.num_groups - 1) % 2]);
    sums.put(to);
}

using AddGroups = void (*)(RowTile, Half, Panel, float*);

template <int... I>
constexpr AddGroups of_vectors(std::integer_sequence<int, I...>) {
    return add_groups<I...>;
}

template <int... ROWS>
constexpr std::array<AddGroups, TILE_ROWS> by_height(std::integer_sequence<int, ROWS...>) {
    return {of_vectors(std::make_integer_sequence<int, (ROWS + 1) * Half::NUM_VECS>())...};
}

constexpr auto ADD_GROUPS = by_height(std::make_integer_sequence<int, TILE_ROWS>());

struct Int4Problem {
    const Rows& rows;
    const TileOutputs& to;
    const uint8_t* weights;
    int num_rows;
};

void int4_blocks(const Int4Problem& p, int first, int last, Scratch& scratch) {
    const RowTiles dealt(p.num_rows);
    const Tiles in_use({dealt.height, GROUP});
    const int groups = p.rows.num_groups;
    const bool holds_all = dealt.count > 1;
    const int64_t panel_bytes =
        static_cast<int64_t>(holds_all ? groups : Panel::FEW) * Half::TILE_SIZE;
    const int64_t sum_bytes = sizeof(float) * TILE_BLOCK * TILE_ROWS * dealt.count;
    auto* memory = static_cast<uint8_t*>(scratch.take(panel_bytes + sum_bytes));
    auto* sums = reinterpret_cast<float*>(memory + panel_bytes);
    const Panel panel{memory, holds_all};
    const int64_t block_bytes = static_cast<int64_t>(groups) * Half::GROUP_BYTES;
    const auto sums_of = [&](int tile, int half) {
        return sums + (tile * 2 + half) * TILE_ROWS * TILE_COLUMNS;
    };
    for (int block = first; block < last; ++block) {
        for (int half = 0; half < 2; ++half)
            for (int t = 0; t < dealt.count; ++t) {
                const int8_t* values = p.rows.values_of(dealt.first(t));
                ADD_GROUPS[dealt.height - 1]({values, p.rows.stride, groups, t == 0},
                                             {p.weights + block * block_bytes, half}, panel,
                                             sums_of(t, half));
            }
        for (int t = 0; t < dealt.count; ++t)
            for (int r = dealt.num_dropped(t); r < dealt.height; ++r) {
                const int row = dealt.first(t) + r;
                p.to.put(row, block, [&](int v) {
                    const int half = v / Half::NUM_VECS, at = v % Half::NUM_VECS * LANES;
                    const Vec sum = load(sums_of(t, half) + r * TILE_COLUMNS + at);
                    return rounded(sum * p.rows.scales[row]);
                });
            }
    }
}

void linear_int4(const TileWeights& w, const float* x, TileOutputs to, int num_rows) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows rows = quantised(team, {x, num_rows, w.num_in}, {0, false});
    const int num_blocks = (w.num_out + TILE_BLOCK - 1) / TILE_BLOCK;
    const int64_t block_bytes = static_cast<int64_t>(rows.num_groups) * Half::GROUP_BYTES;
    const int chunk = blocks_of_chunk(team, num_blocks, block_bytes, true);
    team.run(num_blocks, chunk, [&](int first, int last, int thread) {
        int4_blocks({rows, to, w.packed, num_rows}, first, last, team.own(thread));
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_linear_int8_tiles(const TileWeights* w, const float* x, float* out, int num_rows,
                                int accumulate) {
    linear_int8(*w, x, {out, w->num_out, accumulate != 0}, num_rows);
}

void outrider_linear_int4_tiles(const TileWeights* w, const float* x, float* out, int num_rows,
                                int accumulate) {
    linear_int4(*w, x, {out, w->num_out, accumulate != 0}, num_rows);
}
}

#endif
