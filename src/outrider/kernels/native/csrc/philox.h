// Philox4x32-10, as core/rng.py defines it: random words that are a pure function of their key.
#pragma once

#include <cstdint>

namespace outrider {

// A double in [0, 1) with 53 random bits, from one block.
inline double philox_uniform(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return static_cast<double>((uint64_t{c0} << 21) | (c1 >> 11)) * 0x1p-53;
}

}  // namespace outrider
