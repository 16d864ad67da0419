// Philox4x32-10, as core/rng.py defines it: random words that are a pure function of their key.
#pragma once

#include <cstdint>

namespace outrider {

// The first two words of a block whose counter is c0 to c3, in their places. Words are below 2^32, in
// lanes of 64 bits; `product` multiplies one by a constant.
template <class Word, class Product>
inline void philox_block(uint64_t seed, Word& c0, Word& c1, Word c2, Word c3,
                         const Product& product) {
    constexpr uint64_t LOW = 0xffffffff;
    auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const Word p0 = product(c0, 0xD2511F53), p1 = product(c2, 0xCD9E8D57);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & LOW;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & LOW;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// A double in [0, 1) with 53 random bits, from one block.
inline double philox_uniform(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint64_t first = c0, second = c1;
    philox_block<uint64_t>(seed, first, second, c2, c3,
                           [](uint64_t word, uint64_t by) { return word * by; });
    return static_cast<double>(first << 21 | second >> 11) * 0x1p-53;
}

}  // namespace outrider
