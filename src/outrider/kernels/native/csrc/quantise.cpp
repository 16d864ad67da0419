// Chooses codes of 4 and 8 bits for weights, with the bits of kernels/reference/linear.py.
//
// A lane has a group of UNIT inputs, and sums go over its inputs in order, as they do there.
#include <algorithm>
#include <cmath>

#include "groups.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr float TRIED_STEPS[] = {14.2f, 14.6f, 15.0f, 15.4f};
constexpr int MOST_CODE = 15, MOST_SIGNED = 127;
constexpr int FOUR_BYTES = 4 + UNIT / 2, EIGHT_BYTES = 2 + UNIT;
constexpr uint16_t NO_NUMBER = 0x7e00;

inline Vec times(Vec a, Vec b) { return apart(a * b); }
inline Vec size_of(Vec x) { return cast<Vec>(cast<BitVec>(x) & 0x7fffffffu); }
inline Vec inverse(Vec x) { return size_of(x) > 0.0f ? 1.0f / x : Vec{}; }
inline Vec between(Vec x, float least, float most) {
    return smaller(larger(x, splat(least)), splat(most));
}

// To the nearest integer, ties to even; of at most 2^22.
inline Vec rounded(Vec x) {
    const Vec shifted = apart(x + 12582912.0f);
    return shifted - 12582912.0f;
}

// A float16's bits, and its number; what float16 cannot hold is no number.
struct Factor {
    HalfVec bits;
    Vec number;
};

Factor as_half(Vec x) {
    const HalfVec bits = to_float16(x);
    const BitVec wide = __builtin_convertvector(bits, BitVec);
    const IntVec is_finite = (wide & 0x7c00u) != 0x7c00u;
    const BitVec kept = is_finite ? wide : BitVec{} + NO_NUMBER;
    return {__builtin_convertvector(kept, HalfVec), is_finite ? from_float16(bits) : splat(NAN)};
}

// Scale and minimum of the least squared error that is found.
void search(const Vec* x, Vec low, Vec high, Vec& scale, Vec& min) {
    const Vec range = high - low, to_unit = inverse(range);
    const Vec to_weight = inverse(larger(size_of(low), size_of(high)));
    Vec weight[UNIT], weighted[UNIT], unit[UNIT], sizes = {};
    for (int i = 0; i < UNIT; ++i) {
        weight[i] = times(size_of(x[i]), to_weight);
        sizes = i == 0 ? weight[i] : sizes + weight[i];
    }
    sizes = apart(sizes / static_cast<float>(UNIT));
    Vec weights = {}, first = {};
    for (int i = 0; i < UNIT; ++i) {
        weight[i] += sizes;
        unit[i] = times(x[i] - low, to_unit);
        weighted[i] = times(weight[i], unit[i]);
        weights = i == 0 ? weight[i] : weights + weight[i];
        first = i == 0 ? weighted[i] : first + weighted[i];
    }
    Vec best = splat(-INFINITY);
    scale = min = Vec{};
    for (const float steps : TRIED_STEPS) {
        Vec mixed = {}, sum = {}, squares = {};
        for (int i = 0; i < UNIT; ++i) {
            const Vec code = rounded(times(unit[i], splat(steps))), product = times(weight[i], code);
            const Vec crossed = times(weighted[i], code), square = times(product, code);
            mixed = i == 0 ? crossed : mixed + crossed;
            sum = i == 0 ? product : sum + product;
            squares = i == 0 ? square : squares + square;
        }
        const Vec own = (times(weights, mixed) - times(first, sum)) /
                        (times(weights, squares) - times(sum, sum));
        const Vec own_min = (first - times(own, sum)) / weights;
        const Vec gain = times(own, mixed) + times(own_min, first);
        const IntVec is_better = gain > best;
        best = is_better ? gain : best;
        scale = is_better ? own : scale;
        min = is_better ? own_min : min;
    }
    scale = times(scale, range);
    min = times(min, range) + low;
}

// The same of each lane, and codes from 0 to 15.
void four(Vec* x, int count, uint8_t* to) {
    Vec low = x[0], high = x[0];
    // A NaN among them stays in the sum.
    Vec sum = x[0];
    for (int i = 1; i < UNIT; ++i) low = smaller(x[i], low), high = larger(x[i], high), sum += x[i] * 0.0f;
    const Vec range = high - low;
    const IntVec is_fine = size_of(range) < INFINITY, is_bad = ~is_fine | (sum != sum);
    for (int i = 0; i < UNIT; ++i) x[i] = is_bad ? Vec{} : x[i];
    Vec scale, min;
    search(x, is_bad ? Vec{} : low, is_bad ? Vec{} : high, scale, min);
    Factor scales = as_half(scale);
    const Factor mins = as_half(min);
    const IntVec has_no_min = mins.number != mins.number, has_none = is_bad | has_no_min;
    scales.number = has_none ? splat(NAN) : scales.number;
    const Vec to_code = inverse(scales.number), start = has_no_min ? Vec{} : mins.number;
    float codes[UNIT][LANES];
    for (int i = 0; i < UNIT; ++i) {
        const Vec at = between(times(x[i] - start, to_code), -1.0f, MOST_CODE + 1.0f);
        store(codes[i], between(rounded(at), 0.0f, MOST_CODE));
    }
    for (int lane = 0; lane < count; ++lane, to += FOUR_BYTES) {
        const uint16_t factors[2] = {has_none[lane] ? NO_NUMBER : scales.bits[lane], mins.bits[lane]};
        std::memcpy(to, factors, sizeof(factors));
        for (int i = 0; i < UNIT / 2; ++i)
            to[4 + i] = static_cast<uint8_t>(static_cast<int>(codes[i][lane]) |
                                             static_cast<int>(codes[i + UNIT / 2][lane]) << 4);
    }
}

// Codes from -127 to 127.
void eight(const Vec* x, int count, uint8_t* to) {
    Vec largest = size_of(x[0]), sum = largest;
    for (int i = 1; i < UNIT; ++i) largest = larger(size_of(x[i]), largest), sum += x[i] * 0.0f;
    largest = sum != sum ? splat(NAN) : largest;
    const Factor scales = as_half(largest / static_cast<float>(MOST_SIGNED));
    const Vec to_code = inverse(scales.number);
    float codes[UNIT][LANES];
    for (int i = 0; i < UNIT; ++i) {
        Vec at = times(x[i], to_code);
        at = at != at ? Vec{} : at;
        at = rounded(between(at, -MOST_SIGNED - 1.0f, MOST_SIGNED + 1.0f));
        store(codes[i], between(at, -MOST_SIGNED, MOST_SIGNED));
    }
    for (int lane = 0; lane < count; ++lane, to += EIGHT_BYTES) {
        const uint16_t scale = scales.bits[lane];
        std::memcpy(to, &scale, sizeof(scale));
        for (int i = 0; i < UNIT; ++i)
            to[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(codes[i][lane]));
    }
}

template <class T>
void quantise_row(const T* row, int bits, uint8_t* to, int num_in) {
    const int num_groups = (num_in + UNIT - 1) / UNIT;
    for (int group = 0; group < num_groups; group += LANES) {
        const int count = std::min(LANES, num_groups - group);
        float read[LANES][UNIT] = {}, turned[UNIT][LANES];
        for (int lane = 0; lane < count; ++lane) {
            const int at = (group + lane) * UNIT, some = std::min(UNIT, num_in - at);
            for (int i = 0; i < some; i += LANES)
                store(read[lane] + i, load_some(row + at + i, std::min(LANES, some - i)));
        }
        for (int i = 0; i < UNIT; ++i)
            for (int lane = 0; lane < LANES; ++lane) turned[i][lane] = read[lane][i];
        Vec x[UNIT];
        for (int i = 0; i < UNIT; ++i) x[i] = load(turned[i]);
        if (bits == 4) {
            four(x, count, to);
            to += count * FOUR_BYTES;
        } else {
            eight(x, count, to);
            to += count * EIGHT_BYTES;
        }
    }
}

}  // namespace

}  // namespace outrider

using namespace outrider;

// Rows of `num_in` weights into blocks, as GGUF's Q4_1 and Q8_0 have them.
extern "C" void outrider_quantise(Team* team, int dtype, const void* weights, int bits, uint8_t* to,
                                  int num_out, int num_in) {
    const int64_t num_groups = (num_in + UNIT - 1) / UNIT;
    const int64_t row_bytes = num_groups * (bits == 4 ? FOUR_BYTES : EIGHT_BYTES);
    const auto rows = [&](auto type) {
        using T = decltype(type);
        team->run(num_out, 8, [&](int first, int last, int) {
            for (int out = first; out < last; ++out)
                quantise_row(static_cast<const T*>(weights) + static_cast<int64_t>(out) * num_in,
                             bits, to + out * row_bytes, num_in);
        });
    };
    std::lock_guard<std::mutex> lock(team->entry());
    switch (dtype) {
        case FLOAT32: rows(float{}); break;
        case BFLOAT16: rows(BFloat16{}); break;
        case FLOAT16: rows(Float16{}); break;
    }
}
