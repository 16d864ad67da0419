// Whether linears can use dot products of pairs here; cpu.py asks.
#include "pairs.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

namespace outrider {

namespace {

// Mirrored by `_NO_DOTS` in cpu.py.
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

// CPUs that are known to be faster by dots: AMD's run one a cycle, twice a widened product.
bool is_faster() {
#if defined(__x86_64__)
    unsigned most, vendor[3];
    return __get_cpuid(0, &most, &vendor[0], &vendor[2], &vendor[1])
        && std::memcmp(vendor, "AuthenticAMD", sizeof(vendor)) == 0;
#else
    return false;
#endif
}

}  // namespace

}  // namespace outrider

extern "C" int outrider_dots_missing() { return outrider::missing(); }
extern "C" int outrider_dots_faster() { return outrider::is_faster(); }
