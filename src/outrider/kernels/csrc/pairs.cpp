// Whether linears can use dot products of pairs here; kinds.py asks.
#include "pairs.h"

#if defined(__x86_64__) && !defined(OUTRIDER_HAS_PAIRS)
#include <cpuid.h>
#endif

namespace outrider {

namespace {

// Mirrored by `_NO_DOTS` in kinds.py.
enum Missing { NOTHING, CPU, COMPILER };

#if defined(OUTRIDER_HAS_PAIRS)

Missing missing() { return NOTHING; }

#elif defined(__x86_64__)

Missing missing() {
    constexpr unsigned BFLOAT16 = 1u << 5;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & BFLOAT16) ? COMPILER : CPU;
}

#else

Missing missing() { return CPU; }

#endif

}  // namespace

}  // namespace outrider

extern "C" int outrider_dots_missing() { return outrider::missing(); }
