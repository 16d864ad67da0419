// Loops of a constant length, written out.
#pragma once

#include <utility>

namespace outrider {

#define ALWAYS_INLINE inline __attribute__((always_inline))
// For lambdas.
#define INLINED __attribute__((always_inline))

// Calls `f` with 0 to N - 1 as constants. Arrays that only such indices reach stay in registers:
// compilers unroll a loop too late for that.
template <class F, int... I>
ALWAYS_INLINE void unrolled(std::integer_sequence<int, I...>, F&& f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
ALWAYS_INLINE void unrolled(F&& f) {
    unrolled(std::make_integer_sequence<int, N>{}, f);
}

}  // namespace outrider
