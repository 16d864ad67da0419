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
    const int grain = even_grain(num_rows, std::max(1, MIN_SPLIT_INPUTS / num_in));
    team.run(num_rows, grain, [&](int first, int last, int) {
        for (int row = first; row < last; ++row)
            round_row(x + static_cast<int64_t>(row) * num_in, num_in, steps * STEP_INPUTS,
                      reinterpret_cast<BFloat16*>(rows + row * stride));
    });
    return {rows, stride, num_rows, steps};
}

// Up to 32 rows: weights are read once.
void multiply_few(Team& team, const TileWeights& w, const float* x, const TileOutputs& to,
                  int num_rows) {
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

// More rows. A panel is as many rows and steps as the second-level cache holds with room for what
// passes; all blocks meet one panel after the other. A slice is as many steps of a block as the
// first-level cache holds, and the panel's rows pass by it, two row tiles at a time. Between slices sums
// are stored unrounded: they take the steps in order, as those of few rows do.
constexpr int64_t PANEL_BYTES = 1 << 20;
constexpr int PANEL_STEPS = 32, SLICE_STEPS = 16, MOST_SLICE_STEPS = 20;
// Bytes of sums that wait for the next panel; it limits how many blocks meet a panel.
constexpr int64_t KEPT_BYTES = 16 << 20;

// Rows as tiles take them: [tile][step][height][64 bytes].
struct TiledRows {
    RowTiles dealt;
    int num_steps;
    uint8_t* bytes;

    int64_t step_bytes() const { return static_cast<int64_t>(dealt.height) * TILE_BYTES; }
    int64_t tile_bytes() const { return num_steps * step_bytes(); }
    uint8_t* at(int tile, int step) const {
        return bytes + tile * tile_bytes() + step * step_bytes();
    }
};

// Step after step, so that memory is written in order.
void round_tiles(Team& team, const TiledRows& to, const float* x, int num_in) {
    team.run(to.dealt.count, 1, [&](int first, int last, int) {
        for (int tile = first; tile < last; ++tile) {
            const float* rows = x + static_cast<int64_t>(to.dealt.first(tile)) * num_in;
            auto* at = reinterpret_cast<BFloat16*>(to.at(tile, 0));
            for (int i = 0; i < to.num_steps * STEP_INPUTS; i += STEP_INPUTS)
                for (int r = 0; r < to.dealt.height; ++r, at += STEP_INPUTS)
                    round_row(rows + static_cast<int64_t>(r) * num_in + i, num_in - i, STEP_INPUTS,
                              at);
        }
    });
}

struct Panel {
    int first_tile, num_pairs, first_step, num_steps;
    // Whether its steps are the first ones, and the last ones, of all.
    bool begins, ends;
};

// Two row tiles by a slice of a block.
struct Piece {
    const uint8_t *rows, *weights;
    BlockSums* sums;
    int tile, block, num_steps;
    bool begins, ends;
};

class PanelProduct {
  public:
    PanelProduct(const TiledRows& in, const Panel& panel, const TileWeights& w,
                 const TileOutputs& to)
        : in_(in),
          panel_(panel),
          to_(to),
          packed_(w.packed),
          num_rows_(2 * in.dealt.height),
          num_slices_(panel.num_steps <= MOST_SLICE_STEPS
                          ? 1
                          : (panel.num_steps + SLICE_STEPS - 1) / SLICE_STEPS),
          lines_a_step_((STEP_BYTES / CACHE_LINE + panel.num_pairs - 1) / panel.num_pairs) {}

    // All blocks of [first, last). Sums of the panel's pairs, one after the other, are kept at
    // sums_of(block).
    template <class SumsOf>
    void multiply(int first, int last, const SumsOf& sums_of) {
        const Tiles in_use({in_.dealt.height, TILE_BYTES});
        Piece done{};
        for (int block = first; block < last; ++block)
            for (int slice = 0; slice < num_slices_; ++slice) {
                const bool is_last = slice + 1 == num_slices_;
                const int from = first_step(slice), end = first_step(slice + 1);
                BlockSums* sums = sums_of(block);
                ahead_ = is_last ? weights_of(block + 1, panel_.first_step) : weights_of(block, end);
                for (int pair = 0; pair < panel_.num_pairs; ++pair) {
                    const int tile = panel_.first_tile + 2 * pair;
                    const Piece piece{in_.at(tile, from), weights_of(block, from), sums + pair,
                                      tile, block, end - from,
                                      panel_.begins && slice == 0, panel_.ends && is_last};
                    if (pair + 1 < panel_.num_pairs) next_sums_ = sums + pair + 1;
                    else next_sums_ = is_last ? sums_of(block + 1) : sums;
                    add(done, piece);
                    done = piece;
                }
            }
        store<0>(done), store<1>(done), store<2>(done), store<3>(done);
        if (has_rest(done)) finish(done, 0, num_rows_);
    }

  private:
    using Shapes = TileShapes;

    int first_step(int slice) const {
        return panel_.first_step + panel_.num_steps * slice / num_slices_;
    }

    const uint8_t* weights_of(int block, int step) const {
        return packed_ + (static_cast<int64_t>(block) * in_.num_steps + step) * STEP_BYTES;
    }

    // Whether finished sums are stored as they are, whole tiles of the output.
    bool is_plain(const Piece& piece) const { return piece.ends && to_.takes_tiles(piece.block); }
    bool has_rest(const Piece& piece) const { return piece.ends && !is_plain(piece); }

    template <int SUM>
    static uint8_t* kept(const Piece& piece) {
        return piece.sums->of[SUM / 2][0] + SUM % 2 * TILE_BYTES;
    }

    template <int SUM>
    void store(const Piece& done) const {
        if (is_plain(done))
            tiles::store<SUM>(to_.place(in_.dealt.first(done.tile + SUM / 2), done.block) +
                                  SUM % 2 * TILE_COLUMNS,
                              to_.num_out * static_cast<int64_t>(sizeof(float)));
        else tiles::store<SUM>(kept<SUM>(done), STEP_STRIDE);
    }

    // Makes room for a sum of the next piece.
    template <int SUM>
    void turn(const Piece& done, const Piece& next) const {
        if (done.sums != nullptr) store<SUM>(done);
        if (next.begins) tiles::zero<SUM>();
        else tiles::load<SUM>(kept<SUM>(next), STEP_STRIDE);
    }

    // In the first step of a piece each sum of the one before is stored while others are added to.
    template <bool IS_FIRST>
    void add_step(const Piece& done, const Piece& piece, int step) const {
        const uint8_t* rows = piece.rows + step * in_.step_bytes();
        const uint8_t* weights = piece.weights + step * STEP_BYTES;
        tiles::load_passing<Shapes::ROWS_0>(rows, TILE_BYTES);
        tiles::load<Shapes::COLUMNS_0>(weights, STEP_STRIDE);
        if (IS_FIRST) turn<0>(done, piece);
        tiles::dot_bfloat16<0, Shapes::ROWS_0, Shapes::COLUMNS_0>();
        tiles::load<Shapes::COLUMNS_1>(weights + TILE_BYTES, STEP_STRIDE);
        if (IS_FIRST) turn<1>(done, piece);
        tiles::dot_bfloat16<1, Shapes::ROWS_0, Shapes::COLUMNS_1>();
        tiles::load_passing<Shapes::ROWS_1>(rows + in_.tile_bytes(), TILE_BYTES);
        if (IS_FIRST) turn<2>(done, piece);
        tiles::dot_bfloat16<2, Shapes::ROWS_1, Shapes::COLUMNS_0>();
        if (IS_FIRST) turn<3>(done, piece);
        tiles::dot_bfloat16<3, Shapes::ROWS_1, Shapes::COLUMNS_1>();
    }

    void add(const Piece& done, const Piece& piece) {
        const int rows_a_step = (num_rows_ + piece.num_steps - 1) / piece.num_steps;
        for (int step = 0, row = 0; step < piece.num_steps; ++step) {
            if (step == 0) add_step<true>(done, piece, step);
            else add_step<false>(done, piece, step);
            const int end = std::min(row + rows_a_step, num_rows_);
            look_ahead(piece, row, end);
            if (has_rest(done)) finish(done, row, end);
            row = end;
        }
    }

    // Asks memory for a part of the next slice's weights, and for places that will be written.
    void look_ahead(const Piece& piece, int row, int end) {
        for (int line = 0; line < lines_a_step_; ++line, ahead_ += CACHE_LINE)
            __builtin_prefetch(ahead_, 0, 2);
        for (; row < end; ++row) {
            const uint8_t* sums = next_sums_->of[row / TILE_ROWS][row % TILE_ROWS];
            tiles::ask_to_write(sums), tiles::ask_to_write(sums + TILE_BYTES);
            if (!piece.ends) continue;
            const int tile = piece.tile + (row >= in_.dealt.height);
            to_.ask_to_write(in_.dealt.first(tile) + row % in_.dealt.height, piece.block);
        }
    }

    // Rows of the output, from the sums that are stored.
    void finish(const Piece& done, int row, int end) const {
        for (; row < end; ++row) {
            const int more = row >= in_.dealt.height, r = row - more * in_.dealt.height;
            if (r < in_.dealt.num_dropped(done.tile + more)) continue;
            const auto* sums = reinterpret_cast<const float*>(done.sums->of[more][r]);
            to_.put(in_.dealt.first(done.tile + more) + r, done.block,
                    [&](int v) { return load(sums + v * LANES); });
        }
    }

    const TiledRows& in_;
    const Panel panel_;
    const TileOutputs to_;
    const uint8_t *packed_, *ahead_ = nullptr;
    BlockSums* next_sums_ = nullptr;
    const int num_rows_, num_slices_, lines_a_step_;
};

int parts_of(int whole, int64_t most) { return static_cast<int>((whole + most - 1) / most); }

void multiply_many(Team& team, const TileWeights& w, const float* x, const TileOutputs& to,
                   int num_rows) {
    TiledRows in{RowTiles(num_rows, 2), num_steps(w.num_in), nullptr};
    const int num_blocks = parts_of(w.num_out, TILE_BLOCK), num_pairs = in.dealt.count / 2;
    // Panels of equal size: so many ranges of steps by so many of rows.
    const int num_ranges = parts_of(in.num_steps, PANEL_STEPS);
    const int64_t pair_bytes = 2 * in.step_bytes() * parts_of(in.num_steps, num_ranges);
    const int num_bands = parts_of(num_pairs, std::max<int64_t>(1, PANEL_BYTES / pair_bytes));
    const int most_pairs = parts_of(num_pairs, num_bands);
    const int64_t row_bytes = in.dealt.count * in.tile_bytes(),
                  sum_bytes = most_pairs * static_cast<int64_t>(sizeof(BlockSums));
    // Sums that the next range of steps adds to are kept, for so many blocks.
    const bool keeps = num_ranges > 1;
    const int most_blocks =
        keeps ? static_cast<int>(std::clamp<int64_t>(KEPT_BYTES / sum_bytes, 1, num_blocks))
              : num_blocks;
    in.bytes = static_cast<uint8_t*>(
        team.shared().take(row_bytes + (keeps ? most_blocks * sum_bytes : 0)));
    round_tiles(team, in, x, w.num_in);
    const auto multiply = [&](const Panel& panel, int from, int end) {
        team.run(end - from, blocks_of_chunk(team, end - from, 0, false),
                 [&](int first, int last, int thread) {
                     auto* sums = keeps ? in.bytes + row_bytes
                                        : static_cast<uint8_t*>(team.own(thread).take(sum_bytes));
                     PanelProduct(in, panel, w, to)
                         .multiply(from + first, from + last, [&](int block) {
                             return reinterpret_cast<BlockSums*>(
                                 sums + (keeps ? (block - from) * sum_bytes : 0));
                         });
                 });
    };
    for (int from = 0; from < num_blocks; from += most_blocks)
        for (int band = 0; band < num_bands; ++band)
            for (int range = 0; range < num_ranges; ++range) {
                const int pair = num_pairs * band / num_bands,
                          step = in.num_steps * range / num_ranges;
                const Panel panel{2 * pair, num_pairs * (band + 1) / num_bands - pair, step,
                                  in.num_steps * (range + 1) / num_ranges - step, range == 0,
                                  range + 1 == num_ranges};
                multiply(panel, from, std::min(from + most_blocks, num_blocks));
            }
}

void linear(const TileWeights& w, const float* x, const TileOutputs& to, int num_rows) {
    if (num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    if (num_rows > 2 * TILE_ROWS) multiply_many(team, w, x, to, num_rows);
    else multiply_few(team, w, x, to, num_rows);
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
