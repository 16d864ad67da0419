// Blocks of GGUF files into matrices of groups (groups.h), and rows of those as float32.
//
// models/gguf/blocks.py has each type's definition. Here a block becomes its codes, scales
// and minimums, unit by unit.
#include "bytes.h"
#include "groups.h"
#include "integers.h"

namespace outrider {

namespace {

// 32 inputs of an output. Of a scale or minimum that is a byte, `scale` and `min` have that; then
// `super_scale` and `super_min` are the float16 that they are multiplied by.
struct Unit {
    alignas(16) uint8_t codes[UNIT];
    uint16_t scale[2], min[2], super_scale, super_min;
    uint8_t zero;
    float full_scale;
    const uint8_t* codebook;  // entries of indices of magnitudes, or null
};

inline uint16_t half_at(const uint8_t* from) {
    return static_cast<uint16_t>(from[0] | from[1] << 8);
}

// 16 bytes: their low halves, then their high ones.
inline void nibbles(const uint8_t* from, uint8_t* to) {
    const Bytes both = bytes_at(from);
    put_bytes(to, both & 15);
    put_bytes(to + 16, bits(both, 4, 15));
}

// Of 32 bytes the bits from `shift` on that `mask` has.
inline void some_bits(const uint8_t* from, int shift, uint8_t mask, uint8_t* to) {
    for (int i = 0; i < UNIT; i += 16) put_bytes(to + i, bits(bytes_at(from + i), shift, mask));
}

// The same, added to codes from bit `place` on.
inline void add_bits(const uint8_t* from, int shift, uint8_t mask, int place, uint8_t* to) {
    for (int i = 0; i < UNIT; i += 16)
        put_bytes(to + i, bytes_at(to + i) | bits(bytes_at(from + i), shift, mask) << place);
}

inline void fifth_bits(const uint8_t* from, uint8_t* to) {
    constexpr Bytes EACH = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    constexpr uint64_t ALL = 0x0101010101010101u;
    for (int i = 0; i < 2; ++i) {
        const Bytes spread = cast<Bytes>(Words{ALL * from[2 * i], ALL * from[2 * i + 1]});
        put_bytes(to + 16 * i, bytes_at(to + 16 * i) | (cast<Bytes>((spread & EACH) == EACH) & 16));
    }
}

void q4_0(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    nibbles(from + 2, unit.codes);
}

void q4_1(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    unit.min[0] = half_at(from + 2);
    nibbles(from + 4, unit.codes);
}

void q5_0(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    nibbles(from + 6, unit.codes);
    fifth_bits(from + 2, unit.codes);
}

void q5_1(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    unit.min[0] = half_at(from + 2);
    nibbles(from + 8, unit.codes);
    fifth_bits(from + 4, unit.codes);
}

void q8_0(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    for (int i = 0; i < UNIT; ++i) unit.codes[i] = from[2 + i] ^ 128;
}

void published_4(const uint8_t* from, int, Unit& unit) {
    unit.scale[0] = half_at(from);
    unit.zero = from[2];
    nibbles(from + 3, unit.codes);
}

// A float32 and 128 floats of 8 bits. They are read as float16 with other exponents: 2^-8 times.
void float8(const uint8_t* from, int u, Unit& unit) {
    std::memcpy(&unit.full_scale, from, sizeof(float));
    unit.full_scale *= 256.0f;
    std::memcpy(unit.codes, from + sizeof(float) + UNIT * u, UNIT);
}

void mxfp4(const uint8_t* from, int, Unit& unit) {
    // 2^(e - 128) as bfloat16; the two smallest are denormal.
    const int e = from[0];
    unit.scale[0] = static_cast<uint16_t>(e >= 2 ? (e - 1) << 7 : 0x20 << e);
    nibbles(from + 1, unit.codes);
}

void q2_k(const uint8_t* from, int u, Unit& unit) {
    some_bits(from + 16 + u / 4 * 32, u % 4 * 2, 3, unit.codes);
    for (int set = 0; set < 2; ++set) {
        unit.scale[set] = from[2 * u + set] & 15;
        unit.min[set] = from[2 * u + set] >> 4;
    }
    unit.super_scale = half_at(from + 80);
    unit.super_min = half_at(from + 82);
}

void q3_k(const uint8_t* from, int u, Unit& unit) {
    some_bits(from + 32 + u / 4 * 32, u % 4 * 2, 3, unit.codes);
    add_bits(from, u, 1, 2, unit.codes);
    for (int set = 0; set < 2; ++set) {
        const int part = 2 * u + set;
        const int low = from[96 + part % 8] >> part / 8 * 4 & 15;
        const int high = from[104 + part % 4] >> part / 4 * 2 & 3;
        unit.scale[set] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    unit.super_scale = half_at(from + 108);
}

// Scales and minimums of 6 bits in 12 bytes, the two float16 before them.
inline void scales_of_k(const uint8_t* from, int u, Unit& unit) {
    const uint8_t *first = from + 4, *second = from + 8, *third = from + 12;
    unit.scale[0] = u < 4 ? first[u] & 63 : (third[u - 4] & 15) | first[u - 4] >> 6 << 4;
    unit.min[0] = u < 4 ? second[u] & 63 : third[u - 4] >> 4 | second[u - 4] >> 6 << 4;
    unit.super_scale = half_at(from);
    unit.super_min = half_at(from + 2);
}

inline void nibbles_of_k(const uint8_t* from, int u, uint8_t* to) {
    some_bits(from + u / 2 * 32, u % 2 * 4, 15, to);
}

void q4_k(const uint8_t* from, int u, Unit& unit) {
    nibbles_of_k(from + 16, u, unit.codes);
    scales_of_k(from, u, unit);
}

void q5_k(const uint8_t* from, int u, Unit& unit) {
    nibbles_of_k(from + 48, u, unit.codes);
    add_bits(from + 16, u, 1, 4, unit.codes);
    scales_of_k(from, u, unit);
}

void q6_k(const uint8_t* from, int u, Unit& unit) {
    const int half = u / 4, quarter = u % 4;
    const uint8_t* low = from + half * 64 + quarter % 2 * 32;
    const uint8_t* high = from + 128 + half * 32;
    some_bits(low, quarter / 2 * 4, 15, unit.codes);
    add_bits(high, quarter * 2, 3, 4, unit.codes);
    for (int set = 0; set < 2; ++set) unit.scale[set] = from[192 + 2 * u + set];
    unit.super_scale = half_at(from + 208);
}

void iq4_xs(const uint8_t* from, int u, Unit& unit) {
    const int low = from[4 + u / 2] >> u % 2 * 4 & 15, high = from[2 + u / 4] >> u % 4 * 2 & 3;
    unit.scale[0] = static_cast<uint8_t>((low | high << 4) - 32);
    unit.super_scale = half_at(from);
    nibbles(from + 8 + u * 16, unit.codes);
}

// Digits of base 3, -1 to 1: a byte is a fraction of 256, and times 3 its upper bits are a digit.
void tq1_0(const uint8_t* from, int u, Unit& unit) {
    constexpr uint8_t POWERS[] = {1, 3, 9, 27, 81};
    for (int i = 0; i < UNIT; ++i) {
        const int at = u * UNIT + i;
        const int first = at < 160 ? 0 : at < 240 ? 160 : 240;
        const int width = at < 160 ? 32 : at < 240 ? 16 : 4;
        const int start = at < 160 ? 0 : at < 240 ? 32 : 48;
        const auto rest = static_cast<uint8_t>(from[start + (at - first) % width] *
                                               POWERS[(at - first) / width]);
        unit.codes[i] = static_cast<uint8_t>(7 + (rest * 3 >> 8));
    }
    unit.scale[0] = half_at(from + 52);
}

void tq2_0(const uint8_t* from, int u, Unit& unit) {
    some_bits(from + u / 4 * 32, u % 4 * 2, 3, unit.codes);
    for (uint8_t& code : unit.codes) code += 7;
    unit.scale[0] = half_at(from + 64);
}

void q1_0(const uint8_t* from, int u, Unit& unit) {
    for (int i = 0; i < UNIT; ++i)
        unit.codes[i] = static_cast<uint8_t>(7 + (from[2 + 4 * u + i / 8] >> i % 8 & 1) * 2);
    unit.scale[0] = half_at(from);
}

void q2_0(const uint8_t* from, int u, Unit& unit) {
    for (int i = 0; i < UNIT; ++i)
        unit.codes[i] = static_cast<uint8_t>(7 + (from[2 + 8 * u + i / 4] >> i % 4 * 2 & 3));
    unit.scale[0] = half_at(from);
}

// Half of an unsigned float of 4 bits of exponent and 3 of fraction, as float16.
inline uint16_t half_of_e4m3(uint8_t bits) {
    if (bits == 0x7f || (bits & 0x7f) == 0) return 0;
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    if (exponent > 0) return static_cast<uint16_t>((exponent + 7) << 10 | fraction << 7);
    for (exponent = 1; fraction < 8; --exponent) fraction *= 2;
    return static_cast<uint16_t>((exponent + 7) << 10 | (fraction & 7) << 7);
}

void nvfp4(const uint8_t* from, int u, Unit& unit) {
    for (int set = 0; set < 2; ++set) {
        const int part = 2 * u + set;
        unit.scale[set] = half_of_e4m3(from[part]);
        for (int i = 0; i < 8; ++i) {
            const uint8_t both = from[4 + 8 * part + i];
            unit.codes[16 * set + i] = both & 15;
            unit.codes[16 * set + 8 + i] = both >> 4;
        }
    }
}

// Codes of a group: an entry of the codebook; bit i of `above` moves number i by half of the table.
template <int NUMBERS>
inline void group(Unit& unit, int g, int index, int above) {
    const uint8_t* entry = unit.codebook + index * NUMBERS;
    for (int i = 0; i < NUMBERS; ++i)
        unit.codes[g * NUMBERS + i] = static_cast<uint8_t>(entry[i] | (above >> i & 1) << 3);
}

inline uint32_t word_at(const uint8_t* from) {
    return half_at(from) | static_cast<uint32_t>(half_at(from + 2)) << 16;
}

// The eighth sign makes the number of negative ones even.
inline int even_signs(uint32_t bits) {
    return static_cast<int>(bits | (__builtin_popcount(bits) & 1u) << 7);
}

inline void odd_scales(int both, Unit& unit) {
    for (int set = 0; set < 2; ++set)
        unit.scale[set] = static_cast<uint16_t>(2 * (both >> 4 * set & 15) + 1);
}

void iq2_xxs(const uint8_t* from, int u, Unit& unit) {
    const uint8_t* indices = from + 2 + 8 * u;
    const uint32_t word = word_at(indices + 4);
    for (int g = 0; g < 4; ++g) group<8>(unit, g, indices[g], even_signs(word >> 7 * g & 127));
    unit.scale[0] = static_cast<uint16_t>(2 * (word >> 28) + 1);
    unit.super_scale = half_at(from);
}

void iq2_xs(const uint8_t* from, int u, Unit& unit) {
    for (int g = 0; g < 4; ++g) {
        const int word = half_at(from + 2 + 8 * u + 2 * g);
        group<8>(unit, g, word & 511, even_signs(word >> 9));
    }
    odd_scales(from[66 + u], unit);
    unit.super_scale = half_at(from);
}

void iq2_s(const uint8_t* from, int u, Unit& unit) {
    for (int g = 0; g < 4; ++g) {
        const int upper = from[66 + u] >> 2 * g & 3;
        group<8>(unit, g, from[2 + 4 * u + g] | upper << 8, from[34 + 4 * u + g]);
    }
    odd_scales(from[74 + u], unit);
    unit.super_scale = half_at(from);
}

void iq3_xxs(const uint8_t* from, int u, Unit& unit) {
    const uint32_t word = word_at(from + 66 + 4 * u);
    for (int g = 0; g < 8; ++g) {
        const int signs = even_signs(word >> 7 * (g / 2) & 127);
        group<4>(unit, g, from[2 + 8 * u + g], signs >> 4 * (g % 2));
    }
    unit.scale[0] = static_cast<uint16_t>(2 * (word >> 28) + 1);
    unit.super_scale = half_at(from);
}

void iq3_s(const uint8_t* from, int u, Unit& unit) {
    for (int g = 0; g < 8; ++g) {
        const int index = from[2 + 8 * u + g] | (from[66 + u] >> g & 1) << 8;
        group<4>(unit, g, index, from[74 + 4 * u + g / 2] >> 4 * (g % 2));
    }
    unit.scale[0] = static_cast<uint16_t>(2 * (from[106 + u / 2] >> 4 * (u % 2) & 15) + 1);
    unit.super_scale = half_at(from);
}

void iq1_s(const uint8_t* from, int u, Unit& unit) {
    const int word = half_at(from + 34 + 2 * u), above = word >> 15 ? 0xff : 0;
    for (int g = 0; g < 4; ++g)
        group<8>(unit, g, from[2 + 4 * u + g] | (word >> 3 * g & 7) << 8, above);
    unit.scale[0] = static_cast<uint16_t>(2 * (word >> 12 & 7) + 1);
    unit.super_scale = half_at(from);
}

void iq1_m(const uint8_t* from, int u, Unit& unit) {
    const uint8_t* words = from + 48;
    for (int g = 0; g < 4; ++g) {
        const int upper = from[32 + 2 * u + g / 2] >> 4 * (g % 2);
        group<8>(unit, g, from[4 * u + g] | (upper & 7) << 8, upper & 8 ? 0xff : 0);
    }
    for (int set = 0; set < 2; ++set) {
        const int scale = half_at(words + u / 2 * 2) >> (u % 2 * 6 + set * 3) & 7;
        unit.scale[set] = static_cast<uint16_t>(2 * scale + 1);
    }
    unit.super_scale = 0;
    for (int quarter = 0; quarter < 4; ++quarter)
        unit.super_scale |= static_cast<uint16_t>(words[2 * quarter + 1] >> 4 << 4 * quarter);
}

// Input i of column c: byte `at`, bits from `shift` on.
struct Spot {
    int at, shift;
};

// Where the low four bits of an input are, or all eight.
inline Spot low_spot(const Format& f, int c, int i) {
    if (f.codes == U8) return {(i / 4 * UNIT_BLOCK + c) * 4 + i % 4, 0};
    return {(i / 8 * UNIT_BLOCK + c) * 4 + i % 4, i % 8 / 4 * 4};
}

inline Spot high_spot(const Format& f, int c, int i) {
    const int step = i / 4, planes = 16 * UNIT_BLOCK;
    if (f.codes == U5) return {planes + c * 4 + i % 4, step};
    return {planes + (step / 4 * UNIT_BLOCK + c) * 4 + i % 4, step % 4 * 2};
}

// Of each eight inputs of a unit the bits from `shift` on that `mask` has, in four bytes: those of
// the first four, and above them from bit `width` on those of the others.
ALWAYS_INLINE Four folded(const Unit& unit, int shift, uint8_t mask, int width) {
    Words halves[2];
    for (int h = 0; h < 2; ++h) {
        halves[h] = cast<Words>(bits(bytes_at(unit.codes + 16 * h), shift, mask));
        halves[h] |= halves[h] >> (32 - width);
    }
    return PICK_FOUR(cast<Four>(halves[0]), cast<Four>(halves[1]), 0, 2, 4, 6);
}

ALWAYS_INLINE Columns folded(const Unit (&units)[4], int shift, uint8_t mask, int width) {
    return transposed(folded(units[0], shift, mask, width), folded(units[1], shift, mask, width),
                      folded(units[2], shift, mask, width), folded(units[3], shift, mask, width));
}

inline void put_row(uint8_t* to, int row, int c, Four four) {
    std::memcpy(to + (row * UNIT_BLOCK + c) * 4, &four, sizeof(four));
}

// Units of the columns from c on, as `low_spot` and `high_spot` say.
ALWAYS_INLINE void put_codes(const Format& f, const Unit (&units)[4], int c, uint8_t* to) {
    if (f.codes == F8) {
        for (int i = 0; i < UNIT; ++i)
            for (int k = 0; k < 4; ++k) to[i * UNIT_BLOCK + c + k] = units[k].codes[i];
        return;
    }
    if (f.codes == U8) {
        for (int half = 0; half < 2; ++half) {
            Four of[4];
            for (int k = 0; k < 4; ++k) of[k] = cast<Four>(bytes_at(units[k].codes + 16 * half));
            const Columns all = transposed(of[0], of[1], of[2], of[3]);
            for (int row = 0; row < 4; ++row) put_row(to, 4 * half + row, c, all.rows[row]);
        }
        return;
    }
    const Columns low = folded(units, 0, 15, 4);
    for (int row = 0; row < 4; ++row) put_row(to, row, c, low.rows[row]);
    to += 16 * UNIT_BLOCK;
    if (f.codes == U5) {
        const Columns high = folded(units, 4, 1, 1);
        const auto& rows = high.rows;
        put_row(to, 0, c, rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6);
    } else if (f.codes == U6) {
        const Columns high = folded(units, 4, 3, 2);
        const auto& rows = high.rows;
        put_row(to, 0, c, rows[0] | rows[1] << 4);
        put_row(to, 1, c, rows[2] | rows[3] << 4);
    }
}

int code_at(const Format& f, const uint8_t* codes, int c, int i) {
    const Spot low = low_spot(f, c, i);
    if (f.codes == U8) return codes[low.at];
    int code = codes[low.at] >> low.shift & 15;
    if (f.codes == TABLE4) return f.table[code] + f.zero;
    if (f.codes == U4) return code;
    const Spot high = high_spot(f, c, i);
    return code | (codes[high.at] >> high.shift & (f.codes == U5 ? 1 : 3)) << 4;
}

inline void put_half(uint8_t* to, int c, uint16_t bits) {
    std::memcpy(to + 2 * c, &bits, sizeof(bits));
}

// Units number u of the columns from c on.
ALWAYS_INLINE void put(const Format& f, const Unit (&units)[4], int u, int c, uint8_t* block) {
    uint8_t* to = block + f.unit_at(u);
    uint8_t* head = block + f.head_at(u);
    const int scale_bytes = f.scale_bytes();
    for (int k = 0; k < 4; ++k) {
        const Unit& unit = units[k];
        for (int set = 0; set < f.sets && f.scales != FULL; ++set) {
            const int at = set * UNIT_BLOCK + c + k;
            if (f.scales == SUPER) {
                to[at] = static_cast<uint8_t>(unit.scale[set]);
                if (f.has_min) to[scale_bytes + at] = static_cast<uint8_t>(unit.min[set]);
            } else {
                put_half(to, at, unit.scale[set]);
                if (f.has_min) put_half(to + scale_bytes, at, unit.min[set]);
            }
        }
        if (f.scales == FULL && u % f.units_of_head() == 0)
            std::memcpy(head + 4 * (c + k), &unit.full_scale, sizeof(float));
        if (f.scales == SUPER && u % UNITS_OF_SUPER == 0) {
            put_half(head, c + k, unit.super_scale);
            if (f.has_min) put_half(head, UNIT_BLOCK + c + k, unit.super_min);
        }
        if (f.has_zeros()) to[f.zeros_at() + c + k] = unit.zero;
    }
    put_codes(f, units, c, to + f.codes_at());
}

using Decode = void (*)(const uint8_t* block, int unit, Unit& to);

// Units from `first` on of four outputs, columns from c on; a row behind the last one is null.
using PackRows = void (*)(const uint8_t* const* rows, int first, int end, int c,
                          const uint8_t* codebook, uint8_t* block);

struct Type {
    int number, block_bytes, units;
    PackRows pack_rows;
    Format format;
};

template <int TYPE, int BLOCK_BYTES, int UNITS, Decode DECODE>
void pack_rows(const uint8_t* const* rows, int first, int end, int c, const uint8_t* codebook,
               uint8_t* block) {
    Unit units[4] = {};
    for (Unit& unit : units) unit.codebook = codebook;
    for (int u = first; u < end; ++u) {
        for (int k = 0; k < 4 && rows[k] != nullptr; ++k)
            DECODE(rows[k] + u / UNITS * BLOCK_BYTES, u % UNITS, units[k]);
        put(FORMAT<TYPE>, units, u, c, block);
    }
}

template <int TYPE, int BLOCK_BYTES, int UNITS, Decode DECODE>
constexpr Type known() {
    return {TYPE, BLOCK_BYTES, UNITS, pack_rows<TYPE, BLOCK_BYTES, UNITS, DECODE>, FORMAT<TYPE>};
}

constexpr Type TYPES[] = {
    known<2, 18, 1, q4_0>(),     known<3, 20, 1, q4_1>(),
    known<6, 22, 1, q5_0>(),     known<7, 24, 1, q5_1>(),
    known<8, 34, 1, q8_0>(),     known<10, 84, 8, q2_k>(),
    known<11, 110, 8, q3_k>(),   known<12, 144, 8, q4_k>(),
    known<13, 176, 8, q5_k>(),   known<14, 210, 8, q6_k>(),
    known<16, 66, 8, iq2_xxs>(), known<17, 74, 8, iq2_xs>(),
    known<18, 98, 8, iq3_xxs>(), known<19, 50, 8, iq1_s>(),
    known<20, 18, 1, q4_0>(),    known<21, 110, 8, iq3_s>(),
    known<22, 82, 8, iq2_s>(),   known<23, 136, 8, iq4_xs>(),
    known<29, 56, 8, iq1_m>(),   known<34, 54, 8, tq1_0>(),
    known<35, 66, 8, tq2_0>(),   known<39, 17, 1, mxfp4>(),
    known<40, 36, 2, nvfp4>(),   known<41, 18, 4, q1_0>(),
    known<42, 18, 2, q2_0>(),    known<128, 19, 1, published_4>(),
    known<129, 19, 1, published_4>(), known<130, 34, 1, q8_0>(),
    known<131, 20, 1, q4_1>(),
    known<132, 132, 4, float8>(),
};

const Type* type_of(int number) {
    for (const Type& type : TYPES)
        if (type.number == number) return &type;
    return nullptr;
}

inline float float_of(uint16_t bits, bool is_brain) {
    if (is_brain) return cast<float>(static_cast<uint32_t>(bits) << 16);
    const Float16 half{bits};
    return load_some(&half, 1)[0];
}

inline float half_of(const uint8_t* from, int c, bool is_brain) {
    return float_of(half_at(from + 2 * c), is_brain);
}

// One of the scales, or of the minimums behind them.
float factor(const Format& f, const uint8_t* head, const uint8_t* unit, int at, int c, bool is_min) {
    if (f.scales == FULL) {
        float scale;
        std::memcpy(&scale, head + 4 * c, sizeof(scale));
        return scale;
    }
    if (f.scales != SUPER)
        return half_of(unit + (is_min ? f.scale_bytes() : 0), at, f.scales == BRAIN);
    const uint8_t byte = unit[(is_min ? f.scale_bytes() : 0) + at];
    const float number = f.is_signed ? static_cast<float>(static_cast<int8_t>(byte)) : byte;
    return half_of(head, (is_min ? UNIT_BLOCK : 0) + c, false) * f.step * number;
}

void read_unit(const Format& f, const uint8_t* block, int u, int c, float* to) {
    const uint8_t *unit = block + f.unit_at(u), *head = block + f.head_at(u);
    const uint8_t* codes = unit + f.codes_at();
    const int zero = f.has_zeros() ? unit[f.zeros_at() + c] : f.zero;
    for (int i = 0; i < UNIT; ++i) {
        const int at = i * f.sets / UNIT * UNIT_BLOCK + c;
        const float scale = factor(f, head, unit, at, c, false);
        const float number = f.is_float() ? from_float8(codes + i * UNIT_BLOCK + c, 1)[0]
                                          : static_cast<float>(code_at(f, codes, c, i) - zero);
        volatile float product = scale * number;
        // Of bytes the minimum is taken away.
        const float min = f.has_min ? factor(f, head, unit, at, c, true) : 0.0f;
        to[i] = !f.has_min ? product : f.scales == SUPER ? product - min : product + min;
    }
}

}  // namespace

const Format* format_of(int type) {
    const Type* found = type_of(type);
    return found == nullptr ? nullptr : &found->format;
}

}  // namespace outrider

using namespace outrider;

extern "C" {

// Bytes of `num_out` outputs of `num_in` inputs, packed; 0 for a type without kernels.
int64_t outrider_grouped_bytes(int type, int num_out, int num_in) {
    const Format* f = format_of(type);
    if (f == nullptr) return 0;
    const int64_t num_blocks = (num_out + UNIT_BLOCK - 1) / UNIT_BLOCK;
    return num_blocks * f->block_bytes(units_of(num_in));
}

// Packs rows of blocks; output o is row order[o], or o where `order` is null. A row ends with a
// whole block. `codebook` has a byte for each number of its entries; null for types without one.
void outrider_pack_grouped(Team* team, int type, const uint8_t* rows, const int32_t* order,
                           const uint8_t* codebook, uint8_t* to, int num_out, int num_in) {
    const Type& known = *type_of(type);
    const Format& f = known.format;
    const int units = units_of(num_in), num_blocks = (num_out + UNIT_BLOCK - 1) / UNIT_BLOCK;
    const int64_t row_bytes = static_cast<int64_t>(units / known.units) * known.block_bytes;
    std::lock_guard<std::mutex> lock(team->entry());
    team->run(num_blocks, 1, [&](int first, int last, int) {
        for (int block = first; block < last; ++block) {
            uint8_t* packed = to + block * f.block_bytes(units);
            const int first_out = block * UNIT_BLOCK;
            const int count = std::min(UNIT_BLOCK, num_out - first_out);
            const uint8_t* from[UNIT_BLOCK] = {};
            for (int c = 0; c < count; ++c) {
                const int out = first_out + c;
                from[c] = rows + (order == nullptr ? out : order[out]) * row_bytes;
            }
            // What all outputs write of some units stays in the first-level cache.
            for (int unit = 0; unit < units; unit += UNITS_OF_SUPER) {
                const int end = std::min(unit + UNITS_OF_SUPER, units);
                for (int c = 0; c < UNIT_BLOCK; c += 4)
                    known.pack_rows(from + c, unit, end, c, codebook, packed);
            }
        }
    });
}

// Outputs `rows` of a packed matrix, each `num_in` float32.
void outrider_grouped_rows(const Grouped* weights, const int32_t* rows, float* to, int num_rows) {
    const Grouped& w = *weights;
    const int units = units_of(w.num_in);
    for (int n = 0; n < num_rows; ++n, to += w.num_in) {
        const Part* part = w.parts;
        while (rows[n] >= part->first_out + part->num_out) ++part;
        const Format& f = *format_of(part->type);
        const int out = rows[n] - part->first_out, c = out % UNIT_BLOCK;
        const uint8_t* block = part->packed + out / UNIT_BLOCK * f.block_bytes(units);
        for (int u = 0; u < units; ++u) {
            float unit[UNIT];
            read_unit(f, block, u, c, unit);
            for (float& number : unit) number *= part->factor;
            std::copy(unit, unit + std::min(UNIT, w.num_in - u * UNIT), to + u * UNIT);
        }
    }
}
}
