// Sums of one tile of rows by one block of outputs, or a few, for each type of groups (groups.h).
//
// Each 32 inputs of a row of x become integers of -127 to 127 and one scale. For every set of 16 or
// 32 inputs an integer sum, which is exact, is added to an output's float32 sum by one fused
// multiply-add, and one more adds the set's minimum times the sum of its integers:
//
//     sum = fma(sum of (code - zero) * integer, scale * row's scale, sum)
//     sum = fma(minimum, row's scale * sum of integers, sum)
//
// in the order of the inputs. Two sets of a unit have scales that are integers times one float16:
// their sums are multiplied by those, added, and then take one step together. Only CPUs without a
// fused multiply-add have other bits.
#pragma once

#include <algorithm>
#include <array>

#include "groups.h"
#include "integers.h"

namespace outrider {

constexpr int VEC_BYTES = LANES * DOT_INPUTS;
// As in quantised.cpp.
constexpr int PREFETCH_AHEAD = 2048;

// Of what is multiplied, by Codes.
constexpr int BITS[] = {4, 5, 6, 8, 8};

// Whether codes are taken as signed: sums then begin at 0, whatever `zero` is.
constexpr bool is_signed_code(int codes) { return HAS_SIGNED && (codes == U8 || codes == TABLE4); }

// Rows of x as integers; for each part of the matrix, what sums of sets begin with and what its
// minimums are multiplied by.
struct Inputs {
    int8_t* values;
    float* scales;
    int num_units;
    int64_t stride;

    int8_t* values_of(int row) const { return values + row * stride; }
    float* scales_of(int row) const { return scales + static_cast<int64_t>(row) * num_units; }
};

// For every row and set of a part: the integer from which its sum starts, or, where there are
// minimums, row's scale times the sum of integers.
union Begin {
    int32_t below;
    float total;
};

struct Job {
    const Part* part;
    const Format* format;
    int64_t block_bytes;
    const Begin* begins;
    int first_block, num_blocks;
};

// Units first to last of `rows` rows. A kernel for more rows does the last one again.
struct Tile {
    const Inputs& inputs;
    const Job& job;
    int row, rows, first, last;

    int row_of(int r) const { return row + std::min(r, rows - 1); }
    const Begin* begins_of(int r) const {
        const int64_t sets = static_cast<int64_t>(inputs.num_units) * job.format->sets;
        return job.begins + row_of(r) * sets;
    }
};

// Bytes of `table` at the places that the bytes of `places` name.
inline BitVec looked_up(const uint8_t* table, BitVec places) {
#if defined(__AVX512BW__)
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return cast<BitVec>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), cast<__m512i>(places)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return cast<BitVec>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row),
                                            cast<__m256i>(places)));
#elif defined(__aarch64__)
    return cast<BitVec>(vqtbl1q_u8(vld1q_u8(table), cast<uint8x16_t>(places)));
#else
    uint8_t bytes[sizeof(places)];
    std::memcpy(bytes, &places, sizeof(bytes));
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_bytes(bytes);
#endif
}

// Of eight inputs of LANES outputs, the first four and the other four, as unsigned bytes.
template <int CODES>
inline void codes_of(const uint8_t* codes, int eight, int v, const uint8_t* table, BitVec* low,
                     BitVec* high) {
    if constexpr (CODES == U8) {
        *low = load_bytes(codes + (2 * eight * BLOCK_VECS + v) * VEC_BYTES);
        *high = load_bytes(codes + ((2 * eight + 1) * BLOCK_VECS + v) * VEC_BYTES);
        return;
    }
    const BitVec both = load_bytes(codes + (eight * BLOCK_VECS + v) * VEC_BYTES);
    *low = both & 0x0f0f0f0fu;
    *high = (both >> 4) & 0x0f0f0f0fu;
    const uint8_t* planes = codes + 16 * UNIT_BLOCK;
    if constexpr (CODES == U5) {
        const BitVec bits = load_bytes(planes + v * VEC_BYTES) >> (2 * eight);
        *low |= (bits & 0x01010101u) << 4;
        *high |= (bits & 0x02020202u) << 3;
    }
    if constexpr (CODES == U6) {
        const BitVec bits =
            load_bytes(planes + (eight / 2 * BLOCK_VECS + v) * VEC_BYTES) >> (eight % 2 * 4);
        *low |= (bits & 0x03030303u) << 4;
        *high |= (bits & 0x0c0c0c0cu) << 2;
    }
    if constexpr (CODES == TABLE4) {
        *low = looked_up(table, *low);
        *high = looked_up(table, *high);
    }
}

inline Vec halves(const uint8_t* from, int v, bool is_brain) {
    const HalfVec bits = load_halves(from + v * LANES * 2, LANES);
    return is_brain ? cast<Vec>(__builtin_convertvector(bits, BitVec) << 16) : from_float16(bits);
}

typedef uint8_t ByteLanes __attribute__((vector_size(LANES)));

inline IntVec integers(const uint8_t* from, int v, bool is_signed) {
    from += v * LANES;
    // Compilers widen bytes of generic vectors one by one.
#if defined(__AVX512F__)
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return cast<IntVec>(is_signed ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif defined(__AVX2__)
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return cast<IntVec>(is_signed ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#else
    ByteLanes some;
    std::memcpy(&some, from, sizeof(some));
    if (is_signed) return __builtin_convertvector(cast<ByteVec>(some), IntVec);
    return __builtin_convertvector(some, IntVec);
#endif
}

inline Vec floats(IntVec integers) { return __builtin_convertvector(integers, Vec); }

// What one unit of a tile works on: codes and factors of a block, inputs of the rows.
template <int ROWS>
struct Place {
    const uint8_t *codes, *scales;
    const int8_t* const (&x)[ROWS];
    int input;
};

template <const Format& F, int ROWS>
inline void add_eight_signed(const Place<ROWS>& at, int eight, const uint8_t* table,
                             BitVec (&part)[ROWS][BLOCK_VECS]) {
    BitVec weights[2][BLOCK_VECS], sizes[2][BLOCK_VECS];
    for (int v = 0; v < BLOCK_VECS; ++v) {
        codes_of<F.codes>(at.codes, eight, v, table, &weights[0][v], &weights[1][v]);
        for (int half = 0; half < 2; ++half) {
            if constexpr (F.codes == U8) weights[half][v] ^= SIGN_BITS;
            sizes[half][v] = magnitudes(weights[half][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) {
            const BitVec inputs = splat_inputs(at.x[r] + at.input + eight * 8 + half * DOT_INPUTS);
            for (int v = 0; v < BLOCK_VECS; ++v)
                part[r][v] = add_signed(part[r][v], weights[half][v], sizes[half][v], inputs);
        }
}

// The sums of products of set `set`; where two sets make a unit, times their scales, which are
// integers.
template <const Format& F, int ROWS>
inline void add_set(const Place<ROWS>& at, int set, const uint8_t* table,
                    BitVec (&part)[ROWS][BLOCK_VECS]) {
    constexpr int EIGHTS = UNIT / 8 / F.sets;
    constexpr int TOGETHER = std::min(narrow_eights(BITS[F.codes]), EIGHTS);
    BitVec low[BLOCK_VECS], high[BLOCK_VECS];
    IntVec scale[BLOCK_VECS];
    if constexpr (F.sets == 2)
        for (int v = 0; v < BLOCK_VECS; ++v)
            scale[v] = integers(at.scales + set * UNIT_BLOCK, v, F.is_signed);
    if constexpr (is_signed_code(F.codes)) {
        for (int e = 0; e < EIGHTS; ++e)
            add_eight_signed<F, ROWS>(at, set * EIGHTS + e, table, part);
        return;
    }
    for (int e = 0; e < EIGHTS; e += TOGETHER) {
        BitVec sums[ROWS][BLOCK_VECS] = {};
        for (int i = e; i < e + TOGETHER; ++i) {
            const int eight = set * EIGHTS + i;
            for (int v = 0; v < BLOCK_VECS; ++v)
                codes_of<F.codes>(at.codes, eight, v, table, &low[v], &high[v]);
            for (int r = 0; r < ROWS; ++r) {
                const int8_t* from = at.x[r] + at.input + eight * 8;
                const BitVec first = splat_inputs(from);
                const BitVec second = splat_inputs(from + DOT_INPUTS);
                for (int v = 0; v < BLOCK_VECS; ++v)
                    sums[r][v] = add_products<BITS[F.codes]>(
                        add_products<BITS[F.codes]>(sums[r][v], low[v], first), high[v], second);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < BLOCK_VECS; ++v)
                part[r][v] += F.sets == 2 ? scaled<BITS[F.codes]>(sums[r][v], scale[v])
                                          : widened<BITS[F.codes]>(sums[r][v]);
    }
}

// One unit of one block for all rows of a tile.
template <const Format& F, int ROWS>
inline void add_unit(const Place<ROWS>& at, int u, const Vec* heads, const float* const (&xs)[ROWS],
                     const Begin* const (&begins)[ROWS], const uint8_t* table, Vec* sums,
                     int stride) {
    BitVec part[ROWS][BLOCK_VECS];
    const uint8_t* mins = at.scales + F.scale_bytes();
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < BLOCK_VECS; ++v)
            part[r][v] = F.has_min || F.sets == 2 || is_signed_code(F.codes)
                             ? BitVec{}
                             : static_cast<uint32_t>(begins[r][u].below) - BitVec{};
    for (int set = 0; set < F.sets; ++set) add_set<F, ROWS>(at, set, table, part);
    for (int v = 0; v < BLOCK_VECS; ++v) {
        Vec scale = heads[v];
        if constexpr (F.scales != SUPER) scale = halves(at.scales, v, F.scales == BRAIN);
        else if constexpr (F.sets == 1) scale *= floats(integers(at.scales, v, F.is_signed));
        if constexpr (!F.has_min && F.sets == 2)
            for (int set = 0; set < 2; ++set) {
                const IntVec own = integers(at.scales + set * UNIT_BLOCK, v, F.is_signed);
                for (int r = 0; r < ROWS; ++r)
                    part[r][v] += cast<BitVec>(own * begins[r][2 * u + set].below);
            }
        for (int r = 0; r < ROWS; ++r) {
            Vec& sum = sums[r * stride + v];
            sum = fused(floats(cast<IntVec>(part[r][v])), scale * splat(xs[r][u]), sum);
        }
        if constexpr (F.has_min)
            for (int set = 0; set < F.sets; ++set) {
                Vec min;
                if constexpr (F.scales != SUPER) min = halves(mins, v, false);
                else
                    min = heads[BLOCK_VECS + v] *
                          floats(-integers(mins + set * UNIT_BLOCK, v, F.is_signed));
                for (int r = 0; r < ROWS; ++r) {
                    Vec& sum = sums[r * stride + v];
                    sum = fused(min, splat(begins[r][u * F.sets + set].total), sum);
                }
            }
    }
}

template <const Format& F, int ROWS, int BLOCKS>
void add(const Tile& tile, const uint8_t* blocks, Vec* sums) {
    constexpr int VECS = BLOCKS * BLOCK_VECS, FACTORS = F.has_min ? 2 : 1;
    uint8_t table[16] = {};
    if constexpr (F.codes == TABLE4)
        for (int i = 0; i < 16; ++i)
            table[i] = static_cast<uint8_t>(F.table[i] + (is_signed_code(TABLE4) ? 0 : F.zero));
    const int8_t* x[ROWS];
    const float* xs[ROWS];
    const Begin* begins[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        x[r] = tile.inputs.values_of(tile.row_of(r));
        xs[r] = tile.inputs.scales_of(tile.row_of(r));
        begins[r] = tile.begins_of(r);
    }
    if (tile.first == 0) std::fill(sums, sums + ROWS * VECS, Vec{});
    Vec heads[BLOCKS][2 * BLOCK_VECS] = {};
    for (int u = tile.first; u < tile.last; ++u) {
        const bool has_head = F.scales == SUPER && (u == tile.first || u % UNITS_OF_SUPER == 0);
        for (int b = 0; b < BLOCKS; ++b) {
            const uint8_t* block = blocks + b * tile.job.block_bytes;
            if (has_head)
                for (int v = 0; v < FACTORS * BLOCK_VECS; ++v)
                    heads[b][v] = halves(block + F.head_at(u), v, false);
            const uint8_t* unit = block + F.unit_at(u);
            for (int line = 0; line < F.unit_bytes(); line += LINE)
                __builtin_prefetch(unit + line + PREFETCH_AHEAD);
            const Place<ROWS> at{unit + FACTORS * F.scale_bytes(), unit, x, u * UNIT};
            add_unit<F, ROWS>(at, u, heads[b], xs, begins, table, sums + b * BLOCK_VECS, VECS);
        }
    }
}

using Add = void (*)(const Tile&, const uint8_t*, Vec*);

// Kernels of so many rows by one block; the last two take one row of four blocks, and two of two.
// Each is compiled for every type, and takes the compiler as long as a file of other code does.
#if defined(__AVX512F__)
constexpr int HEIGHTS[] = {1, 2, 4, 6, 8, 12};
#else
constexpr int HEIGHTS[] = {1, 2, 3, 4, 6, 6};
#endif
constexpr int NUM_HEIGHTS = 6;
static_assert(HEIGHTS[NUM_HEIGHTS - 1] == MAX_ROWS);

using Adds = std::array<Add, NUM_HEIGHTS + 2>;

template <int TYPE>
constexpr Adds ADDS = {
    add<FORMAT<TYPE>, HEIGHTS[0], 1>, add<FORMAT<TYPE>, HEIGHTS[1], 1>,
    add<FORMAT<TYPE>, HEIGHTS[2], 1>, add<FORMAT<TYPE>, HEIGHTS[3], 1>,
    add<FORMAT<TYPE>, HEIGHTS[4], 1>, add<FORMAT<TYPE>, HEIGHTS[5], 1>,
    add<FORMAT<TYPE>, 1, 4>,          add<FORMAT<TYPE>, 2, 2>,
};

// Of a type that files often hold, or else of another; null for one that is not among them.
const Adds* common_adds(int type);
const Adds* other_adds(int type);

}  // namespace outrider
