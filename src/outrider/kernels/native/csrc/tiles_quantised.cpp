// Weights of 8 bits on tiles. The integers and so all bits are those of quantised.cpp;
// kernels/reference/linear.py says what they mean.
//
// Blocks of 32 columns as in quantised.cpp (scales, then bytes 128 more than they are), with inputs
// padded to whole steps of tiles_blocks.h by bytes of 0, which add nothing.
#include "integers.h"
#include "tiles_blocks.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

namespace {

struct Int8Tiles {
    static constexpr int HEAD_BYTES = TILE_BLOCK * sizeof(float);

    template <int C, int A, int B>
    static void dot() {
        tiles::dot_signed_unsigned<C, A, B>();
    }
};

// Of fewer rows vectors are as fast.
constexpr int FEWEST_ON_TILES = 9;

void linear_int8(const ByteMatrix& w, const float* x, TileOutputs to, int num_rows) {
    if (num_rows == 0) return;
    if (num_rows < FEWEST_ON_TILES &&
        int8_on_vectors(w, TILE_BLOCK, TILE_BYTES, x, to.out, num_rows, to.accumulate))
        return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const Rows rows = quantised(team, {x, num_rows, w.num_in});
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
            return apart(exact * (load(column_scales) * scale));
        });
    };
    team.run(num_blocks, chunk, [&](int first, int last, int) {
        multiply_blocks<Int8Tiles>(
            in, to, false, first, last,
            [&](int block) { return w.packed + block * block_bytes + Int8Tiles::HEAD_BYTES; },
            finish);
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_linear_int8_tiles(const ByteMatrix* w, const float* x, float* out, int num_rows,
                                int accumulate) {
    linear_int8(*w, x, {out, w->num_out, accumulate != 0}, num_rows);
}
}

#endif
