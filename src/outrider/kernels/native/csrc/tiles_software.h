// Tiles in plain C++, for tests: the documented order of every sum, and an end to the process where
// the CPU would raise an exception.
//
// A dot of bfloat16 runs two chains of fused multiply-adds for each sum, over the first and over the
// second inputs of the lanes, then adds the one to the other and both to the sum. Denormal inputs
// and results are zeros.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

namespace outrider::tiles {

struct Register {
    int rows = 0, bytes = 0;
    uint8_t data[TILE_ROWS][TILE_BYTES];
};

inline thread_local Register registers[TileShapes::NUM];

inline void expect(bool legal) {
    if (!legal) std::abort();
}

inline Register& configured(int tile) {
    expect(registers[tile].rows > 0);
    return registers[tile];
}

inline void configure(TileShapes shapes) {
    for (int tile = 0; tile < TileShapes::NUM; ++tile) {
        const int rows = shapes.rows_of(tile), bytes = shapes.bytes_of(tile);
        expect(rows > 0 && rows <= TILE_ROWS && bytes > 0 && bytes <= TILE_BYTES);
        Register& at = registers[tile];
        at.rows = rows, at.bytes = bytes;
        std::memset(at.data, 0, sizeof(at.data));
    }
}

inline void release() {
    for (Register& at : registers) at.rows = at.bytes = 0;
}

template <int TILE>
inline void zero() {
    std::memset(configured(TILE).data, 0, sizeof(Register::data));
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    Register& to = configured(TILE);
    std::memset(to.data, 0, sizeof(to.data));
    for (int row = 0; row < to.rows; ++row)
        std::memcpy(to.data[row], static_cast<const uint8_t*>(from) + row * stride, to.bytes);
}

template <int TILE>
inline void store(void* to, int64_t stride) {
    const Register& from = configured(TILE);
    for (int row = 0; row < from.rows; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, from.data[row], from.bytes);
}

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float bfloat16_at(const uint8_t* from) {
    const uint32_t bits = static_cast<uint32_t>(from[0]) << 16 | static_cast<uint32_t>(from[1]) << 24;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return flushed(value);
}

// Calls add(sum, its row of A, its column of B, number of lanes) for every sum.
template <class Sum, class Add>
inline void for_all(int c_tile, int a_tile, int b_tile, const Add& add) {
    expect(c_tile != a_tile && a_tile != b_tile && b_tile != c_tile);
    Register& c = configured(c_tile);
    const Register &a = configured(a_tile), &b = configured(b_tile);
    expect(a.bytes / 4 == b.rows && a.rows == c.rows && b.bytes == c.bytes);
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes / 4; ++n) {
            Sum sum;
            std::memcpy(&sum, c.data[m] + 4 * n, sizeof(sum));
            add(sum, a.data[m], b.data[0] + 4 * n, b.rows);
            std::memcpy(c.data[m] + 4 * n, &sum, sizeof(sum));
        }
}

template <int C, int A, int B>
[[gnu::noinline]] inline void dot_bfloat16() {
    for_all<float>(C, A, B, [](float& sum, const uint8_t* a, const uint8_t* b, int lanes) {
        float chains[2] = {};
        for (int k = 0; k < lanes; ++k)
            for (int half = 0; half < 2; ++half)
                chains[half] = flushed(std::fma(bfloat16_at(a + 4 * k + 2 * half),
                                                bfloat16_at(b + TILE_BYTES * k + 2 * half),
                                                chains[half]));
        sum = flushed(flushed(sum) + flushed(chains[0] + chains[1]));
    });
}

template <class B>
inline void add_bytes(uint32_t& sum, const uint8_t* a, const uint8_t* b, int lanes) {
    for (int k = 0; k < lanes; ++k)
        for (int byte = 0; byte < 4; ++byte)
            sum += static_cast<uint32_t>(static_cast<int8_t>(a[4 * k + byte]) *
                                         static_cast<B>(b[TILE_BYTES * k + byte]));
}

template <int C, int A, int B>
[[gnu::noinline]] inline void dot_signed_unsigned() {
    for_all<uint32_t>(C, A, B, add_bytes<uint8_t>);
}

template <int C, int A, int B>
[[gnu::noinline]] inline void dot_signed() {
    for_all<uint32_t>(C, A, B, add_bytes<int8_t>);
}

}  // namespace outrider::tiles
