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
inline void load_passing(const void* from, int64_t stride) {
    load<TILE>(from, stride);
}

inline void ask_to_write(const void*) {}

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

// The registers of a dot: C += A B, where A has as many inputs of four bytes a row as B has rows.
struct Operands {
    Register& c;
    const Register &a, &b;

    Operands(int c_tile, int a_tile, int b_tile)
        : c(configured(c_tile)), a(configured(a_tile)), b(configured(b_tile)) {
        expect(c_tile != a_tile && a_tile != b_tile && b_tile != c_tile);
        expect(a.bytes / 4 == b.rows && a.rows == c.rows && b.bytes == c.bytes);
    }
};

// The innermost loops run over the columns of a row, which a compiler makes vectors of; columns
// beyond the configured ones are zeros and are not stored.
template <int C, int A, int B>
[[gnu::noinline]] inline void dot_bfloat16() {
    const Operands tile(C, A, B);
    float weights[TILE_ROWS][2][TILE_COLUMNS];
    for (int k = 0; k < tile.b.rows; ++k)
        for (int half = 0; half < 2; ++half)
            for (int n = 0; n < TILE_COLUMNS; ++n)
                weights[k][half][n] = bfloat16_at(tile.b.data[k] + 4 * n + 2 * half);
    for (int m = 0; m < tile.c.rows; ++m) {
        float chains[2][TILE_COLUMNS] = {}, sums[TILE_COLUMNS];
        for (int k = 0; k < tile.b.rows; ++k)
            for (int half = 0; half < 2; ++half) {
                const float input = bfloat16_at(tile.a.data[m] + 4 * k + 2 * half);
                for (int n = 0; n < TILE_COLUMNS; ++n)
                    chains[half][n] =
                        flushed(std::fma(input, weights[k][half][n], chains[half][n]));
            }
        std::memcpy(sums, tile.c.data[m], sizeof(sums));
        for (int n = 0; n < TILE_COLUMNS; ++n)
            sums[n] = flushed(flushed(sums[n]) + flushed(chains[0][n] + chains[1][n]));
        std::memcpy(tile.c.data[m], sums, tile.c.bytes);
    }
}

template <class Weight>
inline void dot_bytes(const Operands& tile) {
    for (int m = 0; m < tile.c.rows; ++m) {
        uint32_t sums[TILE_COLUMNS];
        std::memcpy(sums, tile.c.data[m], sizeof(sums));
        for (int k = 0; k < tile.b.rows; ++k)
            for (int byte = 0; byte < 4; ++byte) {
                const int input = static_cast<int8_t>(tile.a.data[m][4 * k + byte]);
                for (int n = 0; n < TILE_COLUMNS; ++n)
                    sums[n] += static_cast<uint32_t>(
                        input * static_cast<Weight>(tile.b.data[k][4 * n + byte]));
            }
        std::memcpy(tile.c.data[m], sums, tile.c.bytes);
    }
}

template <int C, int A, int B>
[[gnu::noinline]] inline void dot_signed_unsigned() {
    dot_bytes<uint8_t>(Operands(C, A, B));
}

template <int C, int A, int B>
[[gnu::noinline]] inline void dot_signed() {
    dot_bytes<int8_t>(Operands(C, A, B));
}

}  // namespace outrider::tiles
