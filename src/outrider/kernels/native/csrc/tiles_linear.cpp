// out_NO (+)= x_NI W_OI^T in bfloat16 on tiles, bit for bit the same for a row whatever rows it
// comes with. x is rounded to bfloat16; a sum runs over steps of 32 inputs in order, each of which
// the CPU sums in its own fixed order (tiles_software.h). See tiles_blocks.h for the layout.
#include "tiles_blocks.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

namespace {

constexpr int STEP_INPUTS = TILE_BYTES / sizeof(BFloat16);
// Below this many inputs a second thread costs more than it saves.
constexpr int MIN_SPLIT_INPUTS = 1 << 15;

int num_steps(int num_in) { return (num_in + STEP_INPUTS - 1) / STEP_INPUTS; }

// Rows lie an odd number of cache lines apart: at a power of two they would drive each other out of
// the first-level cache.
TileInputs rounded_rows(Team& team, const float* x, int num_rows, int num_in) {
    const int steps = num_steps(num_in);
    const int64_t stride = static_cast<int64_t>(steps | 1) * TILE_BYTES;
    auto* rows = static_cast<uint8_t*>(team.shared().take(num_rows * stride));
    team.run(num_rows, std::max(1, MIN_SPLIT_INPUTS / num_in), [&](int first, int last, int) {
        for (int row = first; row < last; ++row)
            round_row(x + static_cast<int64_t>(row) * num_in, num_in, steps * STEP_INPUTS,
                      reinterpret_cast<BFloat16*>(rows + row * stride));
    });
    return {rows, stride, num_rows, steps};
}

void linear(const TileWeights& w, const float* x, TileOutputs to, int num_rows) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const TileInputs in = rounded_rows(team, x, num_rows, w.num_in);
    const int64_t block_bytes = static_cast<int64_t>(in.num_steps) * STEP_BYTES;
    const int num_blocks = (w.num_out + TILE_BLOCK - 1) / TILE_BLOCK;
    const int chunk = blocks_of_chunk(team, num_blocks, block_bytes, few_rows(in));
    team.run(num_blocks, chunk, [&](int first, int last, int) {
        multiply_blocks<BFloat16Tiles>(
            in, to, true, first, last, [&](int block) { return w.packed + block * block_bytes; },
            [&](int row, int block, const uint8_t* sums) {
                const auto* floats = reinterpret_cast<const float*>(sums);
                to.put(row, block, [&](int v) { return load(floats + v * LANES); });
            });
    });
}

// [O / 32][I / 2][32][2], zeros for what the matrix lacks.
void pack(Team& team, const BFloat16* from, BFloat16* to, int num_out, int num_in) {
    std::lock_guard<std::mutex> lock(team.entry());
    const int64_t padded_in = static_cast<int64_t>(num_steps(num_in)) * STEP_INPUTS;
    const int num_blocks = (num_out + TILE_BLOCK - 1) / TILE_BLOCK;
    team.run(num_blocks, 1, [&](int first, int last, int) {
        for (int column = first * TILE_BLOCK; column < last * TILE_BLOCK; ++column) {
            const BFloat16* row = from + static_cast<int64_t>(column) * num_in;
            BFloat16* entry = to + column / TILE_BLOCK * padded_in * TILE_BLOCK +
                              column % TILE_BLOCK * 2;
            for (int i = 0; i < padded_in; ++i)
                entry[i / 2 * TILE_BLOCK * 2 + i % 2] =
                    column < num_out && i < num_in ? row[i] : BFloat16{};
        }
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_pack_bfloat16_tiles(Team* team, const BFloat16* from, BFloat16* to, int num_out,
                                  int num_in) {
    pack(*team, from, to, num_out, num_in);
}

void outrider_linear_bfloat16_tiles(const TileWeights* w, const float* x, float* out, int num_rows,
                                    int accumulate) {
    linear(*w, x, {out, w->num_out, accumulate != 0}, num_rows);
}
}

#endif
