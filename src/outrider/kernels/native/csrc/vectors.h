// The vector types of every kernel, on compiler vector extensions: one source for all CPUs.
//
// Kernels promise bits, so arithmetic is written once on whole vectors. A tail is the same vector
// code on zero-padded input, never a scalar loop: the compiler may fuse a scalar loop's
// multiply-adds differently. Sums across lanes follow one fixed tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {

// Lanes of one register; registers that make a block of output columns; rows a tile may hold
// before its accumulators no longer fit the register file.
#if defined(__AVX512F__)
constexpr int LANES = 16, BLOCK_VECS = 2, MAX_ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, BLOCK_VECS = 2, MAX_ROWS = 6;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, BLOCK_VECS = 4, MAX_ROWS = 6;
#else
constexpr int LANES = 4, BLOCK_VECS = 2, MAX_ROWS = 6;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

constexpr int CACHE_LINE = 64;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t BitVec __attribute__((vector_size(LANES * 4)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef uint8_t ByteLanes __attribute__((vector_size(LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

// Their numbers are the places in SUFFIXES of ops.py.
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

// Asks memory for a line that will be read. The empty statement is an effect: GCC takes a function that
// only prefetches for one without any, and leaves out the calls of it.
inline void ask_memory(const void* line) {
    __builtin_prefetch(line);
    asm volatile("");
}

// The same for a line that is read after so many others that it waits in the second-level cache.
inline void ask_later(const void* line) {
    __builtin_prefetch(line, 0, 2);
    asm volatile("");
}

// The same for a line that will be written.
inline void ask_to_write(const void* line) {
    __builtin_prefetch(line, 1);
    asm volatile("");
}

// How far ahead of use memory is asked for weights. Without it a pass of several rows takes the time
// of its memory and of its arithmetic one after the other; with it, the longer of the two. The more
// rows share a weight, the more time there is.
constexpr int bytes_ahead(int num_rows) { return (num_rows <= 2 ? 2 : 16) * 1024; }

template <class To, class From>
inline To cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline Vec splat(float value) { return value - Vec{}; }

inline Vec load(const float* from) {
    Vec vec;
    std::memcpy(&vec, from, sizeof(vec));
    return vec;
}

inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof(vec)); }

// `count` floats, at most LANES; the other lanes are zero.
inline Vec load_some(const float* from, int count) {
    if (count >= LANES) return load(from);
    Vec vec = {};
    std::memcpy(&vec, from, sizeof(float) * count);
    return vec;
}

inline void store_some(float* to, Vec vec, int count) {
    if (count >= LANES) return store(to, vec);
    std::memcpy(to, &vec, sizeof(float) * count);
}

// A 32-bit lane holds two bfloat16 values; widening either is one instruction.
inline Vec low_halves(BitVec pairs) { return cast<Vec>(pairs << 16); }
inline Vec high_halves(BitVec pairs) { return cast<Vec>(pairs & 0xffff0000u); }

inline BitVec load_pairs(const BFloat16* from) {
    BitVec pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    return pairs;
}

// `count` stored halves, at most LANES; the other lanes are zero.
inline HalfVec load_halves(const void* from, int count) {
    HalfVec halves = {};
    std::memcpy(&halves, from, sizeof(uint16_t) * (count < LANES ? count : LANES));
    return halves;
}

inline void store_halves(void* to, HalfVec halves, int count) {
    std::memcpy(to, &halves, sizeof(uint16_t) * (count < LANES ? count : LANES));
}

// Rounds to bfloat16, ties to even; a NaN stays one. The result is still float32.
inline Vec round_to_bfloat16(Vec vec) {
    const BitVec bits = cast<BitVec>(vec);
    const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const IntVec is_nan = vec != vec;
    return cast<Vec>(is_nan ? BitVec{} + 0x7fc00000u : rounded);
}

inline Vec load_some(const BFloat16* from, int count) {
    return cast<Vec>(__builtin_convertvector(load_halves(from, count), BitVec) << 16);
}

inline void store_some(BFloat16* to, Vec vec, int count) {
    const BitVec bits = cast<BitVec>(round_to_bfloat16(vec)) >> 16;
    store_halves(to, __builtin_convertvector(bits, HalfVec), count);
}

// float16 to float32, exactly, and back: ties to even, too large is infinite, a NaN stays one.
// Denormals are numbers in every version, so all have the same bits (NaNs aside).
// OUTRIDER_PLAIN_HALVES asks for the version that every CPU has.
#if defined(__AVX512F__) && !defined(OUTRIDER_PLAIN_HALVES)

inline Vec from_float16(HalfVec halves) {
    return cast<Vec>(_mm512_cvtph_ps(cast<__m256i>(halves)));
}
inline HalfVec to_float16(Vec vec) {
    return cast<HalfVec>(_mm512_cvtps_ph(cast<__m512>(vec), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__) && !defined(__AVX512F__) && !defined(OUTRIDER_PLAIN_HALVES)

inline Vec from_float16(HalfVec halves) {
    return cast<Vec>(_mm256_cvtph_ps(cast<__m128i>(halves)));
}
inline HalfVec to_float16(Vec vec) {
    return cast<HalfVec>(_mm256_cvtps_ph(cast<__m256>(vec), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__) && !defined(OUTRIDER_PLAIN_HALVES)

inline Vec from_float16(HalfVec halves) {
    return cast<Vec>(vcvt_f32_f16(cast<float16x4_t>(halves)));
}
inline HalfVec to_float16(Vec vec) {
    return cast<HalfVec>(vcvt_f16_f32(cast<float32x4_t>(vec)));
}

#else

inline Vec from_float16(HalfVec halves) {
    const BitVec bits = __builtin_convertvector(halves, BitVec), size = bits & 0x7fffu;
    // A float32 whose exponent is 112 too small; denormals become normal on the way.
    const Vec scaled = cast<Vec>(size << 13) * 0x1p112f;
    const BitVec magnitude = size >= 0x7c00u ? (size << 13) | 0x7f800000u : cast<BitVec>(scaled);
    return cast<Vec>(magnitude | (bits & 0x8000u) << 16);
}
inline HalfVec to_float16(Vec vec) {
    const BitVec bits = cast<BitVec>(vec), size = bits & 0x7fffffffu;
    const BitVec normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    // The last place of 1/2 is that of denormals: the addition rounds, the integers' difference is
    // what is stored.
    const BitVec denormal = cast<BitVec>(cast<Vec>(size) + 0.5f) - 0x3f000000u;
    const BitVec finite = size < (113u << 23) ? denormal : normal;
    // 65,520 is halfway between the largest number and what would follow it.
    const BitVec large = size > 0x7f800000u ? BitVec{} + 0x7e00u : BitVec{} + 0x7c00u;
    const BitVec found = size >= 0x477ff000u ? large : finite;
    return __builtin_convertvector(found | (bits >> 16 & 0x8000u), HalfVec);
}

#endif

// Floats of 8 bits with 4 of exponent and 3 of fraction (E4M3), times 2^-8; NaN is read as 480. They
// are float16 whose upper exponents are not used.
inline Vec from_float8(const uint8_t* from, int count) {
    ByteVec bytes = {};
    std::memcpy(&bytes, from, count);
    const HalfVec some = __builtin_convertvector(bytes, HalfVec);
    return from_float16((some & 0x8000) | (some & 0x7f) << 7);
}

inline Vec load_some(const Float16* from, int count) {
    return from_float16(load_halves(from, count));
}

inline void store_some(Float16* to, Vec vec, int count) {
    store_halves(to, to_float16(vec), count);
}

template <class From, class To>
inline void copy_row(const From* from, To* to, int size) {
    for (int i = 0; i < size; i += LANES)
        store_some(to + i, load_some(from + i, size - i), size - i);
}

// a * b + sum, rounded once where the CPU can. Compilers fuse such a sum here and leave it there (GCC
// avoids chains of fused additions on some CPUs), so whatever is compiled in several versions that
// must have the same bits asks by name.
inline Vec fused(Vec a, Vec b, Vec sum) {
#if defined(__AVX512F__)
    return cast<Vec>(_mm512_fmadd_ps(cast<__m512>(a), cast<__m512>(b), cast<__m512>(sum)));
#elif defined(__AVX__) && defined(__FMA__)
    return cast<Vec>(_mm256_fmadd_ps(cast<__m256>(a), cast<__m256>(b), cast<__m256>(sum)));
#elif defined(__aarch64__)
    return cast<Vec>(vfmaq_f32(cast<float32x4_t>(sum), cast<float32x4_t>(a), cast<float32x4_t>(b)));
#else
    return a * b + sum;
#endif
}

// A product that no sum is fused with: the definition rounds each by itself.
inline Vec apart(Vec product) {
#if defined(__AVX512F__)
    asm("" : "+v"(product));
#elif defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#else
    volatile Vec kept = product;
    return kept;
#endif
    return product;
}

// Calls step(at, count, chain) for the vectors of [0, size), whose sums go to four chains in turn.
template <int WIDTH, class Step>
inline void for_vectors(int64_t size, const Step& step) {
    int64_t at = 0;
    for (; at + 4 * WIDTH <= size; at += 4 * WIDTH)
        for (int chain = 0; chain < 4; ++chain) step(at + chain * WIDTH, WIDTH, chain);
    for (int chain = 0; at < size; at += WIDTH, ++chain)
        step(at, std::min<int64_t>(size - at, WIDTH), chain);
}

// Where one is a NaN, `b`.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

// Lanes of `a` then `b`, picked by constant index.
#if defined(__clang__)
#define OUTRIDER_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OUTRIDER_PICK(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Lanes 0, 2, 4 ... of `a`, then of `b`; and lanes 1, 3, 5 ....
template <class V>
inline V even_lanes(V a, V b) {
#if defined(__AVX512F__)
    return OUTRIDER_PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__AVX__)
    return OUTRIDER_PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
    return OUTRIDER_PICK(a, b, 0, 2, 4, 6);
#endif
}
template <class V>
inline V odd_lanes(V a, V b) {
#if defined(__AVX512F__)
    return OUTRIDER_PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX__)
    return OUTRIDER_PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return OUTRIDER_PICK(a, b, 1, 3, 5, 7);
#endif
}

// Sums of neighbouring lanes of `a`, then of `b`.
template <class V>
inline V pair_sums(V a, V b) {
    return even_lanes(a, b) + odd_lanes(a, b);
}

// The tree of pair_sums for several vectors at once, with fewer shuffles. Of four vectors, the sums
// of each quarter of four lanes: lane i of a quarter is vector i's.
inline Vec four_sums(const Vec* of) {
#if defined(__AVX512F__)
#define OUTRIDER_EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define OUTRIDER_ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif defined(__AVX__)
#define OUTRIDER_EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define OUTRIDER_ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define OUTRIDER_EVEN 0, 2, 4, 6
#define OUTRIDER_ODD 1, 3, 5, 7
#endif
    const Vec first =
        OUTRIDER_PICK(of[0], of[1], OUTRIDER_EVEN) + OUTRIDER_PICK(of[0], of[1], OUTRIDER_ODD);
    const Vec second =
        OUTRIDER_PICK(of[2], of[3], OUTRIDER_EVEN) + OUTRIDER_PICK(of[2], of[3], OUTRIDER_ODD);
    return OUTRIDER_PICK(first, second, OUTRIDER_EVEN) + OUTRIDER_PICK(first, second, OUTRIDER_ODD);
#undef OUTRIDER_EVEN
#undef OUTRIDER_ODD
}

// Sums of neighbouring quarters of `a`, then of `b`; a vector of one quarter has none.
inline Vec quarter_sums(Vec a, Vec b) {
#if defined(__AVX512F__)
    return OUTRIDER_PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
         + OUTRIDER_PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif defined(__AVX__)
    return OUTRIDER_PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
         + OUTRIDER_PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return a + b;
#endif
}

template <class V>
inline auto sum_of_lanes(V vec) {
    for (int width = LANES; width > 1; width /= 2) vec = pair_sums(vec, vec);
    return vec[0];
}

inline float largest_lane(Vec vec) {
    float largest = vec[0];
    for (int lane = 1; lane < LANES; ++lane) largest = vec[lane] > largest ? vec[lane] : largest;
    return largest;
}

// LANES integers of 8 bits. Compilers widen bytes of generic vectors one by one.
inline IntVec integers(const void* from, bool is_signed) {
#if defined(__AVX512F__)
    const __m128i some = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return cast<IntVec>(is_signed ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif defined(__AVX2__)
    const __m128i some = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return cast<IntVec>(is_signed ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#elif defined(__aarch64__)
    uint64_t some = 0;
    std::memcpy(&some, from, LANES);
    if (is_signed) return cast<IntVec>(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(some)))));
    return cast<IntVec>(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(some)))));
#else
    ByteLanes some;
    std::memcpy(&some, from, sizeof(some));
    if (is_signed) return __builtin_convertvector(cast<ByteVec>(some), IntVec);
    return __builtin_convertvector(some, IntVec);
#endif
}

inline Vec floats(IntVec integers) { return __builtin_convertvector(integers, Vec); }

// e^x to about 1e-7 relative, lane by lane: 2^n times a polynomial on [-ln2/2, ln2/2]. Exactly 0
// below -87.3 (so -inf weighs nothing) and at most e^88 above; NaN stays NaN.
inline Vec exp(Vec x) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const IntVec is_tiny = x < -87.3f;
    x = is_tiny ? splat(-87.3f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const Vec shifted = x * 1.44269504f + TO_INTEGER;
    const Vec n = shifted - TO_INTEGER;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const BitVec exponent = cast<BitVec>(shifted) << 23;
    const Vec power = cast<Vec>(cast<BitVec>(p) + exponent);
    return is_tiny ? Vec{} : power;
}

// tanh to about 1e-7 relative: near 0, where the quotient cancels, the polynomial of Cephes.
inline Vec tanh(Vec x) {
    const Vec square = x * x, size = larger(x, -x);
    Vec p = splat(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Vec near = x + x * square * p;
    const Vec far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    const Vec away = x < 0.0f ? -far : far;
    return size < 0.625f ? near : away;
}

// cap * tanh(x / cap).
inline Vec capped(Vec x, float cap) { return tanh(x / cap) * cap; }

}  // namespace outrider
