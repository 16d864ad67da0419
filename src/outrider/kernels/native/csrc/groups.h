// Matrices of quantised groups, as GGUF files and published checkpoints hold them: for 16 or 32
// inputs of an output one scale, and one minimum or a zero, its own or one that all share.
//
//     weight = scale * (code - zero)        weight = scale * code + minimum
//
// A unit is 32 inputs of a block of BLOCK outputs. Codes of 4 bits share bytes: of eight inputs the
// first four are the low halves; fifth and sixth bits lie in planes behind them (`codes_of`). Scales
// are float16 or bfloat16, or bytes times a float16 that 256 inputs of an output share; then those
// float16 stand before their eight units. In a block:
//
//     [8 units' float16 scales of scales [BLOCK], of minimums [BLOCK]]
//     for each unit: scales [sets][BLOCK], minimums [sets][BLOCK], zeros [BLOCK], codes
//
// Codes that are floats of 8 bits (E4M3) have one float32 scale for 128 inputs, before their four
// units, and lie as [input][BLOCK]; rows of x stay float32 for them.
//
// No value of a file is changed: what is stored here is what the file stores, in another order.
// Zeros fill the last unit of an output.
#pragma once

#include "dots.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

constexpr int UNIT = 32, UNITS_OF_SUPER = 8;
constexpr int UNIT_BLOCK = LANES * BLOCK_VECS;

constexpr int units_of(int num_in) { return (num_in + UNIT - 1) / UNIT; }

// TABLE4 are places in a table of 16 numbers, to which `zero` is added.
enum Codes { U4, U5, U6, U8, TABLE4, F8 };
enum Scales { HALF, BRAIN, SUPER, FULL };

struct Format {
    Codes codes;
    Scales scales;
    int sets;  // of scales in a unit: 1 or 2
    bool has_min, is_signed;
    int zero;  // -1: each unit of an output has its own, a byte
    const int8_t* table;
    float step = 1;  // factor of the scales of scales, a power of two

    constexpr int code_bytes() const {
        constexpr int BYTES[] = {16, 20, 24, 32, 16, 32};
        return BYTES[codes] * UNIT_BLOCK;
    }
    constexpr bool is_float() const { return codes == F8; }
    constexpr int scale_bytes() const {
        constexpr int BYTES[] = {2, 2, 1, 0};
        return sets * UNIT_BLOCK * BYTES[scales];
    }
    constexpr bool has_heads() const { return scales == SUPER || scales == FULL; }
    constexpr int head_bytes() const {
        return has_heads() ? UNIT_BLOCK * (scales == FULL || has_min ? 4 : 2) : 0;
    }
    constexpr int units_of_head() const { return scales == FULL ? 4 : UNITS_OF_SUPER; }
    // Scales of a unit's two sets are integers times one float16.
    constexpr bool has_two_integers() const { return sets == 2 && scales == SUPER; }
    constexpr bool has_zeros() const { return zero < 0; }
    constexpr int zeros_at() const { return scale_bytes() * (has_min ? 2 : 1); }
    constexpr int codes_at() const { return zeros_at() + (has_zeros() ? UNIT_BLOCK : 0); }
    constexpr int unit_bytes() const { return codes_at() + code_bytes(); }
    // Of one of the heads, and of one unit, within a block.
    constexpr int64_t head_at(int unit) const {
        const int head = unit / units_of_head();
        return static_cast<int64_t>(head) * (units_of_head() * unit_bytes() + head_bytes());
    }
    constexpr int64_t unit_at(int unit) const {
        const int heads = has_heads() ? unit / units_of_head() + 1 : 0;
        return static_cast<int64_t>(unit) * unit_bytes() + heads * head_bytes();
    }
    constexpr int64_t block_bytes(int num_units) const {
        const int heads = (num_units + units_of_head() - 1) / units_of_head();
        return static_cast<int64_t>(num_units) * unit_bytes() + heads * head_bytes();
    }
};

constexpr int8_t NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
// Twice the numbers of E2M1: the scale is halved.
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int TABLE_ZERO = 127;
// Magnitudes and their negatives, by models/gguf/blocks.py.
constexpr int8_t IQ2[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43};
constexpr int8_t IQ3_XXS[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                -4, -12, -20, -28, -36, -44, -52, -62};
constexpr int8_t IQ3_S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr int8_t IQ1[16] = {-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7};

// By the numbers that GGUF has for types.
template <int TYPE>
constexpr Format FORMAT = {};
template <>
constexpr Format FORMAT<2> = {U4, HALF, 1, false, false, 8, nullptr};  // Q4_0
template <>
constexpr Format FORMAT<3> = {U4, HALF, 1, true, false, 0, nullptr};  // Q4_1
template <>
constexpr Format FORMAT<6> = {U5, HALF, 1, false, false, 16, nullptr};  // Q5_0
template <>
constexpr Format FORMAT<7> = {U5, HALF, 1, true, false, 0, nullptr};  // Q5_1
template <>
constexpr Format FORMAT<8> = {U8, HALF, 1, false, false, 128, nullptr};  // Q8_0
template <>
constexpr Format FORMAT<10> = {U4, SUPER, 2, true, false, 0, nullptr};  // Q2_K
template <>
constexpr Format FORMAT<11> = {U4, SUPER, 2, false, true, 4, nullptr};  // Q3_K
template <>
constexpr Format FORMAT<12> = {U4, SUPER, 1, true, false, 0, nullptr};  // Q4_K
template <>
constexpr Format FORMAT<13> = {U5, SUPER, 1, true, false, 0, nullptr};  // Q5_K
template <>
constexpr Format FORMAT<14> = {U6, SUPER, 2, false, true, 32, nullptr};  // Q6_K
template <>
constexpr Format FORMAT<16> = {TABLE4, SUPER, 1, false, true, TABLE_ZERO, IQ2, 0.125};  // IQ2_XXS
template <>
constexpr Format FORMAT<17> = {TABLE4, SUPER, 2, false, true, TABLE_ZERO, IQ2, 0.125};  // IQ2_XS
template <>
constexpr Format FORMAT<18> = {TABLE4, SUPER, 1, false, true, TABLE_ZERO, IQ3_XXS, 0.25};
template <>
constexpr Format FORMAT<19> = {TABLE4, SUPER, 1, false, true, TABLE_ZERO, IQ1, 0.125};  // IQ1_S
template <>
constexpr Format FORMAT<20> = {TABLE4, HALF, 1, false, false, TABLE_ZERO, NON_LINEAR};  // IQ4_NL
template <>
constexpr Format FORMAT<21> = {TABLE4, SUPER, 1, false, true, TABLE_ZERO, IQ3_S};
template <>
constexpr Format FORMAT<22> = FORMAT<17>;  // IQ2_S
template <>
constexpr Format FORMAT<23> = {TABLE4, SUPER, 1, false, true, TABLE_ZERO, NON_LINEAR};  // IQ4_XS
template <>
constexpr Format FORMAT<29> = {TABLE4, SUPER, 2, false, true, TABLE_ZERO, IQ1, 0.125};  // IQ1_M
template <>
constexpr Format FORMAT<34> = FORMAT<2>;  // TQ1_0
template <>
constexpr Format FORMAT<35> = FORMAT<2>;  // TQ2_0
template <>
constexpr Format FORMAT<39> = {TABLE4, BRAIN, 1, false, false, TABLE_ZERO, E2M1};  // MXFP4
template <>
constexpr Format FORMAT<40> = {TABLE4, HALF, 2, false, false, TABLE_ZERO, E2M1};  // NVFP4
template <>
constexpr Format FORMAT<41> = FORMAT<2>;  // Q1_0
template <>
constexpr Format FORMAT<42> = FORMAT<2>;  // Q2_0
// Of published checkpoints (plugins/published/codes.py), by numbers beyond GGUF's.
template <>
constexpr Format FORMAT<128> = {U4, HALF, 1, false, false, -1, nullptr};
template <>
constexpr Format FORMAT<129> = {U4, BRAIN, 1, false, false, -1, nullptr};
template <>
constexpr Format FORMAT<130> = {U8, BRAIN, 1, false, false, 128, nullptr};
template <>
constexpr Format FORMAT<131> = {U4, BRAIN, 1, true, false, 0, nullptr};
template <>
constexpr Format FORMAT<132> = {F8, FULL, 1, false, false, 0, nullptr};

// Null for a type without a format.
const Format* format_of(int type);

// Some outputs of a matrix: those of one type; `factor` multiplies their sums. Mirrored by `_Rows` in kernels/native/ops.py.
struct Part {
    const uint8_t* packed;
    int32_t type, first_out, num_out;
    float factor;
};

constexpr int MOST_PARTS = 8;

// Mirrored by `_Grouped` in kernels/native/ops.py. `on_tiles`: this process may use matrix tiles.
struct Grouped {
    Team* team;
    int32_t num_in, num_out, num_parts, on_tiles;
    Part parts[MOST_PARTS];
};

}  // namespace outrider
