// Tiles in hardware. Inline assembly, since the intrinsics of g++ 12 do not say that they read and
// write memory, and code compiled with them crashed.
#pragma once

#include "tiles.h"

namespace outrider::tiles {

// The layout that `ldtilecfg` reads.
struct Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

static_assert(sizeof(Configuration) == 64);

inline void configure(TileShapes shapes) {
    Configuration to;
    for (int tile = 0; tile < TileShapes::NUM; ++tile) {
        to.rows[tile] = static_cast<uint8_t>(shapes.rows_of(tile));
        to.bytes[tile] = static_cast<uint16_t>(shapes.bytes_of(tile));
    }
    asm volatile("ldtilecfg %0" : : "m"(to) : "memory");
}

inline void release() { asm volatile("tilerelease" : : : "memory"); }

template <int TILE>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE) : "memory");
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

// Of what is not read again soon: it leaves the lines of the first-level cache to others.
template <int TILE>
inline void load_passing(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

// Asks memory for a line that will be written.
inline void ask_to_write(const void* line) {
    asm volatile("prefetchw %0" : : "m"(*static_cast<const uint8_t*>(line)));
}

template <int TILE>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int C, int A, int B>
inline void dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B) : "memory");
}

// Signed rows by unsigned columns, modulo 2^32.
template <int C, int A, int B>
inline void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B) : "memory");
}

template <int C, int A, int B>
inline void dot_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B) : "memory");
}

}  // namespace outrider::tiles
