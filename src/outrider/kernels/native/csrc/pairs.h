// Dot products of pairs: two bfloat16 inputs a 32-bit lane.
//
// Each lane of a sum gets two fused multiply-adds, each rounded to the nearest even; denormal inputs
// and results are zeros (VDPBF16PS). OUTRIDER_SOFTWARE_PAIRS asks for the same in plain C++, for tests
// on any CPU. Without either, nothing that needs pairs is compiled.
#pragma once

#include "vectors.h"

#if !defined(OUTRIDER_SOFTWARE_PAIRS) && defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace outrider {

struct Pair {
    BFloat16 of[2];
};

inline BitVec splat(Pair pair) { return cast<uint32_t>(pair) - BitVec{}; }

#if defined(OUTRIDER_SOFTWARE_PAIRS)
#define OUTRIDER_HAS_PAIRS 1

inline Vec flushed(Vec x) {
    const IntVec is_denormal = (cast<BitVec>(x) & 0x7f800000u) == 0;
    return is_denormal ? cast<Vec>(cast<BitVec>(x) & 0x80000000u) : x;
}

inline Vec add_pair_dots(Vec sums, BitVec weights, Pair inputs) {
    const BitVec x = splat(inputs);
    sums = flushed(fused(flushed(high_halves(weights)), flushed(high_halves(x)), flushed(sums)));
    return flushed(fused(flushed(low_halves(weights)), flushed(low_halves(x)), sums));
}

#elif defined(__AVX512BF16__) && defined(__AVX512F__)
#define OUTRIDER_HAS_PAIRS 1

inline Vec add_pair_dots(Vec sums, BitVec weights, Pair inputs) {
    return cast<Vec>(_mm512_dpbf16_ps(cast<__m512>(sums), cast<__m512bh>(weights),
                                      cast<__m512bh>(splat(inputs))));
}

#endif

}  // namespace outrider
