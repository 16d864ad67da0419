// Vectors of 16 bytes, which every CPU has. GCC makes slower code of loops over bytes.
#pragma once

#include "unrolled.h"
#include "vectors.h"

namespace outrider {

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(16)));

#if defined(__clang__)
#define PICK_FOUR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK_FOUR(a, b, ...) __builtin_shuffle(a, b, Four{__VA_ARGS__})
#endif

inline Bytes bytes_at(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return bytes;
}

inline void put_bytes(uint8_t* to, Bytes bytes) { std::memcpy(to, &bytes, sizeof(bytes)); }

// The bits of each byte from `shift` on that `mask` has, which end within the byte.
inline Bytes bits(Bytes bytes, int shift, uint8_t mask) {
    return cast<Bytes>(cast<Words>(bytes) >> shift) & mask;
}

// Row r has element r of each of four columns.
struct Columns {
    Four rows[4];
};

ALWAYS_INLINE Columns transposed(Four a, Four b, Four c, Four d) {
    const Four ab = PICK_FOUR(a, b, 0, 4, 1, 5), cd = PICK_FOUR(c, d, 0, 4, 1, 5);
    const Four ab_up = PICK_FOUR(a, b, 2, 6, 3, 7), cd_up = PICK_FOUR(c, d, 2, 6, 3, 7);
    return {PICK_FOUR(ab, cd, 0, 1, 4, 5), PICK_FOUR(ab, cd, 2, 3, 6, 7),
            PICK_FOUR(ab_up, cd_up, 0, 1, 4, 5), PICK_FOUR(ab_up, cd_up, 2, 3, 6, 7)};
}

}  // namespace outrider
