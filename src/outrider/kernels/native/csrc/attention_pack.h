// Blocks of keys and values of bfloat16, packed as steps of tiles (tiles_blocks.h).
#pragma once

#include "attention.h"
#include "tiles_blocks.h"

#if defined(OUTRIDER_HAS_TILES)

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int BLOCK_KEYS = TILE_BLOCK;
constexpr int SPAN_BLOCKS = SPAN / BLOCK_KEYS;
constexpr int MAX_TILE_DIM = 256;

alignas(CACHE_LINE) inline constexpr BFloat16 ZEROS[MAX_TILE_DIM] = {};

// Positions of keys.
struct Range {
    int first, end;

    Range within(int from, int size) const {
        return {std::clamp(first - from, 0, size), std::clamp(end - from, 0, size)};
    }
    bool is_empty() const { return first >= end; }
    // Its blocks, and where they begin and end.
    int first_block() const { return first / BLOCK_KEYS; }
    int end_block() const { return (end + BLOCK_KEYS - 1) / BLOCK_KEYS; }
    int begin() const { return first_block() * BLOCK_KEYS; }
    int stop() const { return end_block() * BLOCK_KEYS; }
    // A bit for each of its positions in a block.
    uint32_t bits(int block) const {
        const Range own = within(block * BLOCK_KEYS, BLOCK_KEYS);
        if (own.is_empty()) return 0;
        return ~0u << own.first & ~0u >> (BLOCK_KEYS - own.end);
    }
};

// The rows of a block; what no token sees is a row of zeros.
struct BlockRows {
    const BFloat16* at[BLOCK_KEYS];

    const BFloat16* operator[](int i) const { return at[i]; }
};

// The rows of a block whose halves lie in one piece each.
struct Halves {
    const BFloat16* first[2];
    int64_t stride;

    const BFloat16* operator[](int i) const {
        return first[i / TILE_ROWS] + i % TILE_ROWS * stride;
    }
};

// Asks memory for a cache line of each row, from element `first` on.
inline void ask_rows(const BlockRows& rows, int first) {
    for (const BFloat16* row : rows.at) ask_memory(row + first);
}

// 16 rows of 16 lanes of 32 bits, from byte `first` on, to columns.
template <class Row>
inline void transpose(const Row* const* rows, int first, uint8_t* to, int64_t stride) {
    const auto at = [&](int i) { return reinterpret_cast<const uint8_t*>(rows[i]) + first; };
#if defined(__AVX512BW__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(at(i));
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // r[i + j] has in its quarter l the column 4 l + j of rows i to i + 3.
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_store_si512(to + j * stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_store_si512(to + (4 + j) * stride, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_store_si512(to + (8 + j) * stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_store_si512(to + (12 + j) * stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int column = 0; column < 16; ++column)
            std::memcpy(to + column * stride + 4 * i, at(i) + 4 * column, 4);
#endif
}

// The first `num` of 16 columns of 16 rows of floats: each as a row.
inline void take_columns(const uint8_t* from, int num, uint8_t* to, int64_t stride) {
#if defined(__AVX512F__)
    for (int first = 0; first < num; first += 4, from += 4 * sizeof(float), to += 4 * stride) {
        // Quarter l of part i has four columns of row 4 l + i.
        __m512i part[4];
        for (int i = 0; i < 4; ++i) {
            const auto row = [&](int l) {
                return _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(from + (4 * l + i) * TILE_BYTES));
            };
            part[i] = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(1), 1);
            part[i] = _mm512_inserti32x4(_mm512_inserti32x4(part[i], row(2), 2), row(3), 3);
        }
        const auto put = [&](int column, __m512i a, __m512i b, bool is_odd) {
            if (first + column < num)
                _mm512_storeu_si512(to + column * stride, is_odd ? _mm512_unpackhi_epi64(a, b)
                                                                 : _mm512_unpacklo_epi64(a, b));
        };
        const __m512i low = _mm512_unpacklo_epi32(part[0], part[1]);
        const __m512i more = _mm512_unpacklo_epi32(part[2], part[3]);
        put(0, low, more, false), put(1, low, more, true);
        if (first + 2 >= num) continue;
        const __m512i high = _mm512_unpackhi_epi32(part[0], part[1]);
        const __m512i others = _mm512_unpackhi_epi32(part[2], part[3]);
        put(2, high, others, false), put(3, high, others, true);
    }
#else
    for (int column = 0; column < num; ++column)
        for (int row = 0; row < TILE_ROWS; ++row)
            std::memcpy(to + column * stride + 4 * row, from + row * TILE_BYTES + 4 * column, 4);
#endif
}

// A step for each 32 elements of a key: pairs of them by 32 keys.
inline void pack_keys(const BlockRows& rows, int dim, uint8_t* to) {
    for (int at = 0; at < dim * 2; at += TILE_BYTES, to += STEP_BYTES)
        for (int half = 0; half < 2; ++half)
            transpose(rows.at + half * TILE_COLUMNS, at, to + half * TILE_BYTES, STEP_STRIDE);
}

// A step of values: pairs of keys by 32 elements, from element `first` on, in the order of
// `TileItem::put`; memory is asked for the same elements of `next`. If it CHECKS: true if all are
// finite.
template <bool CHECKS, class Rows>
inline bool pack_values(const Rows& rows, int first, uint8_t* to, const BlockRows* next = nullptr) {
#if defined(__AVX512BW__)
    const __m512i size = _mm512_set1_epi16(0x7fff), infinite = _mm512_set1_epi16(0x7f80);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < BLOCK_KEYS; i += 2, to += STEP_STRIDE) {
        if (next != nullptr) ask_memory(next->at[i] + first), ask_memory(next->at[i + 1] + first);
        const __m512i even = _mm512_loadu_si512(rows[i] + first);
        const __m512i odd = _mm512_loadu_si512(rows[i + 1] + first);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + TILE_BYTES, _mm512_unpackhi_epi16(even, odd));
        if (!CHECKS) continue;
        most = _mm512_max_epu16(most, _mm512_and_si512(even, size));
        most = _mm512_max_epu16(most, _mm512_and_si512(odd, size));
    }
    return _mm512_cmpge_epu16_mask(most, infinite) == 0;
#else
    bool finite = true;
    for (int i = 0; i < BLOCK_KEYS; ++i)
        for (int d = 0; d < TILE_BLOCK; ++d) {
            const BFloat16 value = rows[i][first + d];
            const int column = d % 8 / 4 * TILE_COLUMNS + d / 8 * 4 + d % 4;
            std::memcpy(to + i / 2 * STEP_STRIDE + 4 * column + i % 2 * 2, &value, sizeof(value));
            finite &= (value.bits & 0x7f80) != 0x7f80;
        }
    return finite;
#endif
}

// Keys and values of a span that tokens of one sequence share. A block is packed when it is first used.
class SharedBlocks {
  public:
    SharedBlocks(const Stored<BFloat16>& keys, const Stored<BFloat16>& values)
        : keys(keys), values(values), num_steps_(keys.dim / TILE_BLOCK) {}

    // Of keys, and as much of values.
    size_t packed_bytes() const { return size_t(SPAN_BLOCKS) * num_steps_ * STEP_BYTES; }
    void lie_at(uint8_t* keys, uint8_t* values, int32_t* slots) {
        packed_keys_ = keys, packed_values_ = values, slots_ = slots;
    }
    // How far apart positions are whose slots are listed: those between follow in a row.
    static int listed(const Pass& pass) { return pass.page_size % TILE_ROWS == 0 ? TILE_ROWS : 1; }
    static size_t slot_bytes(const Pass& pass) { return sizeof(int32_t) * SPAN / listed(pass); }

    void begin() {
        keys_ready_ = values_ready_ = infinite_ = whole_ = 0;
        std::fill_n(read_, SPAN_BLOCKS, 0u);
        all_ = {SPAN, 0};
    }

    // A token reads these positions; others may be read as well.
    void add(Range seen) {
        if (seen.is_empty()) return;
        all_ = {std::min(all_.first, seen.first), std::max(all_.end, seen.end)};
        const int first = seen.first_block(), last = seen.end_block() - 1;
        read_[first] |= seen.bits(first), read_[last] |= seen.bits(last);
        if (last - first > 1) whole_ |= Range{first + 1, last}.bits(0);
    }

    // After the last token: where the keys lie, from position `base` of the sequence on.
    void list(const Pass& pass, const int32_t* pages, int base) {
        for (int b = 0; b < SPAN_BLOCKS; ++b)
            if (whole_ >> b & 1) read_[b] = ~0u;
        apart_ = listed(pass);
        if (all_.is_empty()) return;
        const int first = all_.first / apart_, end = (all_.end + apart_ - 1) / apart_;
        std::fill(slots_ + all_.begin() / apart_, slots_ + first, 0);
        std::fill(slots_ + end, slots_ + all_.stop() / apart_, 0);
        const int32_t* page = pages + (base + first * apart_) / pass.page_size;
        int within = (base + first * apart_) % pass.page_size;
        for (int i = first; i < end; ++page, within = 0) {
            int32_t slot = *page * pass.page_size + within;
            for (; within < pass.page_size && i < end; within += apart_, slot += apart_)
                slots_[i++] = slot;
        }
    }

    BlockRows rows(const Stored<BFloat16>& stored, int block) const {
        BlockRows rows;
        if (apart_ == 1) {
            const int32_t* slots = slots_ + block * BLOCK_KEYS;
            for (int i = 0; i < BLOCK_KEYS; ++i) rows.at[i] = stored.row(slots[i]);
        } else {
            const Halves found = halves(stored, block);
            for (int i = 0; i < BLOCK_KEYS; ++i) rows.at[i] = found[i];
        }
        if (read_[block] != ~0u)
            for (int i = 0; i < BLOCK_KEYS; ++i)
                if (!(read_[block] >> i & 1)) rows.at[i] = ZEROS;
        return rows;
    }

    // True if all rows of a block are read, and `halves` has them.
    bool is_plain(int block) const { return apart_ != 1 && read_[block] == ~0u; }
    Halves halves(const Stored<BFloat16>& stored, int block) const {
        const int32_t* slots = slots_ + 2 * block;
        return {{stored.row(slots[0]), stored.row(slots[1])}, stored.stride};
    }

    // The rows that memory is asked for while those of a block are read.
    BlockRows next_rows(const Stored<BFloat16>& stored, int block) const {
        const int next = block + AHEAD_ROWS / BLOCK_KEYS;
        if (next < all_.end_block()) return rows(stored, next);
        BlockRows none;
        std::fill_n(none.at, BLOCK_KEYS, ZEROS);
        return none;
    }
    const uint8_t* packed_keys(int block) {
        uint8_t* to = packed_keys_ + block * num_steps_ * STEP_BYTES;
        if (keys_ready_ >> block & 1) return to;
        keys_ready_ |= 1u << block;
        const BlockRows next = next_rows(keys, block);
        for (int d = 0; d < keys.dim; d += TILE_BLOCK) ask_rows(next, d);
        pack_keys(rows(keys, block), keys.dim, to);
        return to;
    }

    // Steps of one block after the other: those that come next lie behind.
    const uint8_t* packed_values(int block, int step) const {
        return packed_values_ + (step * SPAN_BLOCKS + block) * STEP_BYTES;
    }

    void pack_values_of(Range blocks) {
        for (int b = blocks.first; b < blocks.end; ++b) {
            if (values_ready_ >> b & 1) continue;
            const BlockRows here = rows(values, b), next = next_rows(values, b);
            bool finite = true;
            for (int step = 0; step < num_steps_; ++step)
                finite &= pack_values<true>(
                    here, step * TILE_BLOCK,
                    packed_values_ + (step * SPAN_BLOCKS + b) * STEP_BYTES, &next);
            values_ready_ |= 1u << b;
            // Zero times such a value is no zero: each token gets a block of what it sees.
            if (!finite) infinite_ |= 1u << b;
        }
    }
    bool is_infinite(int block) const { return infinite_ >> block & 1; }
    bool some_infinite(Range blocks) const { return infinite_ & blocks.bits(0); }

    const Stored<BFloat16> keys, values;

  private:
    const int num_steps_;
    int apart_ = 1;
    Range all_ = {0, 0};
    // Bits for blocks: packed, with values that are not finite, and read as a whole.
    uint32_t keys_ready_ = 0, values_ready_ = 0, infinite_ = 0, whole_ = 0;
    // For each block, the positions that some token reads of it.
    uint32_t read_[SPAN_BLOCKS];
    uint8_t *packed_keys_ = nullptr, *packed_values_ = nullptr;
    int32_t* slots_ = nullptr;
};

}  // namespace outrider

#endif
