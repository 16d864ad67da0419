// Attention of up to 16 queries on tiles, which has the sums of more in the same order.
//
// Keys are the rows of a product and queries its columns, so no key is packed. Values are packed where
// they stay in the first-level cache. Memory is asked for nothing ahead: the CPU foresees rows of keys
// that follow each other, and further requests cost more than they save.
#pragma once

#include "attention_softmax.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

// A step of one column tile.
constexpr int HALF_STEP = TILE_ROWS * TILE_BYTES;

// Stores tiles 0 and 1, side by side, and 2 and 3, `apart` bytes behind.
template <bool BOTH>
inline void take_sums(uint8_t* to, int64_t apart, int64_t stride) {
    store_sums<BOTH>(to, to + apart, stride);
}

template <bool BOTH>
inline void restore_sums(const uint8_t* from, int64_t apart, int64_t stride) {
    tiles::load<0>(from, stride), tiles::load<1>(from + TILE_BYTES, stride);
    if (!BOTH) return;
    tiles::load<2>(from + apart, stride), tiles::load<3>(from + apart + TILE_BYTES, stride);
}

class FewRows {
  public:
    explicit FewRows(const SharedBlocks& blocks)
        : blocks_(blocks), dim_(blocks.keys.dim), steps_(dim_ / TILE_BLOCK) {}

    size_t bytes() const {
        return steps_ * HALF_STEP + NUM_SUMS * HALF_STEP + copied_bytes() + 2 * STEP_BYTES;
    }
    void lie_at(uint8_t* space) {
        columns_ = space;
        sums_ = columns_ + steps_ * HALF_STEP;
        copied_ = sums_ + NUM_SUMS * HALF_STEP;
        packed_ = copied_ + copied_bytes();
    }

    void read_queries(const uint8_t* const* rows) {
        for (int step = 0; step < steps_; ++step)
            transpose(rows, step * TILE_BYTES, columns_ + step * HALF_STEP, TILE_BYTES);
    }

    // Scores of `num` queries for keys of blocks, from `to` on.
    void score(Range blocks, int num, uint8_t* to) {
        uint8_t* before = nullptr;
        int num_before = 0;
        const auto finish = [&] {
            for (int half = 0; half < num_before; ++half, to += TILE_BYTES)
                take_columns(before + half * HALF_STEP, num, to, SCORE_STRIDE);
        };
        // Those of the blocks before are taken while tiles multiply.
        for (int b = blocks.first, turn = 0; b < blocks.end; b += 2, turn ^= 1) {
            uint8_t* sums = sums_ + turn * (NUM_SUMS / 2) * HALF_STEP;
            const bool two = b + 1 < blocks.end;
            if (two) score_blocks<true>(b, sums);
            else score_blocks<false>(b, sums);
            finish();
            before = sums, num_before = two ? 4 : 2;
        }
        finish();
    }

    // Adds values of blocks under weights to sums from `from`, if there are any. True if those of the
    // first row are finite: then the values are.
    bool mix(Range blocks, const uint8_t* weights, const uint8_t* from, uint8_t* to, int64_t stride) {
        for (int step = 0; step < steps_; step += 2) {
            const Sums sums = {from == nullptr ? nullptr : from + step * STEP_STRIDE,
                               to + step * STEP_STRIDE, stride};
            if (step + 1 < steps_) mix_steps<true>(blocks, weights, sums, step);
            else mix_steps<false>(blocks, weights, sums, step);
        }
        return are_finite(reinterpret_cast<const float*>(to));
    }

  private:
    // Of 16 keys by 16 queries: of four halves of blocks, and of the four before.
    static constexpr int NUM_SUMS = 8;

    struct Sums {
        const uint8_t* from;
        uint8_t* to;
        int64_t stride;
    };

    // 16 keys.
    struct Rows {
        const uint8_t* at;
        int64_t stride;

        template <int TILE>
        void load(int step) const {
            tiles::load<TILE>(at + step * TILE_BYTES, stride);
        }
    };

    int64_t copy_stride() const { return (steps_ | 1) * TILE_BYTES; }
    size_t copied_bytes() const { return 4 * TILE_ROWS * copy_stride(); }

    template <bool TWO>
    void score_blocks(int block, uint8_t* sums) {
        using Shapes = TileShapes;
        Rows keys[4];
        find_keys(block, keys);
        if (TWO) find_keys(block + 1, keys + 2);
        zero_sums<TWO>();
        for (int step = 0; step < steps_; ++step) {
            tiles::load<Shapes::COLUMNS_0>(columns_ + step * HALF_STEP, TILE_BYTES);
            keys[0].load<Shapes::ROWS_0>(step);
            tiles::dot_bfloat16<0, Shapes::ROWS_0, Shapes::COLUMNS_0>();
            keys[1].load<Shapes::ROWS_1>(step);
            tiles::dot_bfloat16<1, Shapes::ROWS_1, Shapes::COLUMNS_0>();
            if (!TWO) continue;
            keys[2].load<Shapes::ROWS_0>(step);
            tiles::dot_bfloat16<2, Shapes::ROWS_0, Shapes::COLUMNS_0>();
            keys[3].load<Shapes::ROWS_1>(step);
            tiles::dot_bfloat16<3, Shapes::ROWS_1, Shapes::COLUMNS_0>();
        }
        tiles::store<0>(sums, TILE_BYTES);
        tiles::store<1>(sums + HALF_STEP, TILE_BYTES);
        if (!TWO) return;
        tiles::store<2>(sums + 2 * HALF_STEP, TILE_BYTES);
        tiles::store<3>(sums + 3 * HALF_STEP, TILE_BYTES);
    }

    // Both halves of a block: where they are, or copied.
    void find_keys(int block, Rows* to) {
        const int64_t distance = sizeof(BFloat16) * blocks_.keys.stride;
        if (blocks_.is_plain(block)) {
            const Halves keys = blocks_.halves(blocks_.keys, block);
            for (int half = 0; half < 2; ++half)
                to[half] = {reinterpret_cast<const uint8_t*>(keys.first[half]), distance};
            return;
        }
        const BlockRows keys = blocks_.rows(blocks_.keys, block);
        uint8_t* copy = copied_ + block % 2 * BLOCK_KEYS * copy_stride();
        for (int i = 0; i < BLOCK_KEYS; ++i)
            std::memcpy(copy + i * copy_stride(), keys[i], sizeof(BFloat16) * dim_);
        for (int half = 0; half < 2; ++half)
            to[half] = {copy + half * TILE_ROWS * copy_stride(), copy_stride()};
    }

    // One or two steps of 32 elements. While tiles multiply one step of a block, the next is packed, to
    // the other half of a page: the CPU takes lines at the same place of two pages for one.
    template <bool TWO>
    void mix_steps(Range blocks, const uint8_t* weights, const Sums& sums, int step) {
        using Shapes = TileShapes;
        if (sums.from != nullptr) restore_sums<TWO>(sums.from, STEP_STRIDE, sums.stride);
        else zero_sums<TWO>();
        const int num = (1 + TWO) * (blocks.end - blocks.first);
        const auto pack_part = [&](int i) {
            pack(blocks.first + i / (1 + TWO), step + i % (1 + TWO), packed_ + i % 2 * STEP_BYTES);
        };
        pack_part(0);
        for (int i = 0; i < num; weights += TILE_BYTES) {
            tiles::load<Shapes::ROWS_0>(weights, WEIGHT_STRIDE);
            if (i + 1 < num) pack_part(i + 1);
            add_part<0>(packed_ + i++ % 2 * STEP_BYTES);
            if (!TWO) continue;
            if (i + 1 < num) pack_part(i + 1);
            add_part<2>(packed_ + i++ % 2 * STEP_BYTES);
        }
        take_sums<TWO>(sums.to, STEP_STRIDE, sums.stride);
    }

    template <int SUM>
    static void add_part(const uint8_t* values) {
        using Shapes = TileShapes;
        tiles::load<Shapes::COLUMNS_0>(values, STEP_STRIDE);
        tiles::dot_bfloat16<SUM, Shapes::ROWS_0, Shapes::COLUMNS_0>();
        tiles::load<Shapes::COLUMNS_1>(values + TILE_BYTES, STEP_STRIDE);
        tiles::dot_bfloat16<SUM + 1, Shapes::ROWS_0, Shapes::COLUMNS_1>();
    }

    void pack(int block, int step, uint8_t* to) const {
        const auto& values = blocks_.values;
        const int first = step * TILE_BLOCK;
        if (blocks_.is_plain(block)) pack_values<false>(blocks_.halves(values, block), first, to);
        else pack_values<false>(blocks_.rows(values, block), first, to);
    }

    bool are_finite(const float* sums) const {
        IntVec same = IntVec{} - 1;
        for (int d = 0; d < dim_; d += LANES) {
            const Vec rest = load(sums + d) - load(sums + d);
            same &= rest == 0.0f;
        }
        for (int lane = 0; lane < LANES; ++lane)
            if (same[lane] == 0) return false;
        return true;
    }

    const SharedBlocks& blocks_;
    const int dim_, steps_;
    uint8_t *columns_ = nullptr, *sums_ = nullptr, *copied_ = nullptr, *packed_ = nullptr;
};

}  // namespace outrider

#endif
