// Sums of one tile of rows by one block of outputs, for each type of groups (groups.h).
//
// Each 32 inputs of a row of x become integers of -127 to 127 and one scale. For every set of 16 or
// 32 inputs an integer sum, which is exact, is added to an output's float32 sum by one fused
// multiply-add, and one more adds the set's minimum times the sum of its integers:
//
//     sum = fma(sum of (code - zero) * integer, scale * row's scale, sum)
//     sum = fma(minimum, row's scale * sum of integers, sum)
//
// in the order of the inputs. Where a unit's two sets have scales that are integers times one float16,
// their sums are multiplied by those, added, and then take one step together. Only CPUs without a
// fused multiply-add have other bits.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "groups_many.h"
#include "integers.h"
#include "unrolled.h"

namespace outrider {

// Rows of a tile: both their sums, of integers and of float32, stay in 32 registers, which leaves the
// units of multiplication to products.
#if defined(OUTRIDER_PLAIN_DOTS)
// Any number gives the same bits, and each takes the compiler seconds.
constexpr int ADD_ROWS = 2;
#else
constexpr int ADD_ROWS = 6;
#endif

// Of what is multiplied, by Codes.
constexpr int BITS[] = {4, 5, 6, 8, 8, 8};

// Whether codes are taken as signed: sums then begin at 0, whatever `zero` is.
constexpr bool is_signed_code(int codes) { return HAS_SIGNED && (codes == U8 || codes == TABLE4); }

// Units first to last of rows from `row` on. With each unit memory is asked for weights: `ahead` bytes
// from those of the first one; then `pace` bytes further each time.
struct Tile {
    const Inputs& inputs;
    const Job& job;
    int row, first, last, ahead, pace;

    // Of all rows of the tile, one behind the other.
    const float* scales_of(int unit) const { return inputs.scales_of(unit, row); }
    const Begin* begins_of(int set) const {
        return job.begins + static_cast<int64_t>(set) * inputs.num_rows + row;
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
ALWAYS_INLINE void codes_of(const uint8_t* codes, int eight, int v, const uint8_t* table,
                            BitVec* low, BitVec* high) {
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

// What multiplies the sums of set `set` of a unit at `scales`, and the minimum that is added to them.
// `heads` are the float16 scales of scales and of minimums; two sets of integers share theirs.
template <const Format& F>
ALWAYS_INLINE Vec scale_of(const uint8_t* scales, const Vec* heads, int set, int v) {
    if constexpr (F.scales != SUPER)
        return halves(scales + set * UNIT_BLOCK * 2, v, F.scales == BRAIN);
    else if constexpr (F.sets == 1)
        return heads[v] * floats(integers(scales + v * LANES, F.is_signed));
    else return heads[v];
}

template <const Format& F>
ALWAYS_INLINE Vec min_of(const uint8_t* scales, const Vec* heads, int set, int v) {
    const uint8_t* mins = scales + F.scale_bytes();
    if constexpr (F.scales != SUPER) return halves(mins, v, F.scales == BRAIN);
    else
        return heads[BLOCK_VECS + v] *
               floats(-integers(mins + set * UNIT_BLOCK + v * LANES, F.is_signed));
}

// What one unit of a tile works on: codes and factors of a block, inputs of the rows.
template <int ROWS>
struct Place {
    const uint8_t *codes, *scales;
    const int8_t* const (&x)[ROWS];
    int input;
};

// Adds the products of eight inputs to `sums`.
template <const Format& F, int ROWS>
ALWAYS_INLINE void add_eight(const Place<ROWS>& at, int eight, const uint8_t* table,
                             BitVec (&sums)[ROWS][BLOCK_VECS]) {
    constexpr bool IS_SIGNED = is_signed_code(F.codes);
    BitVec codes[2][BLOCK_VECS], sizes[2][BLOCK_VECS];
    unrolled<BLOCK_VECS>([&](auto v) INLINED {
        codes_of<F.codes>(at.codes, eight, v, table, &codes[0][v], &codes[1][v]);
    });
    unrolled<2>([&](auto half) INLINED {
        if constexpr (IS_SIGNED)
            unrolled<BLOCK_VECS>([&](auto v) INLINED {
                if constexpr (F.codes == U8) codes[half][v] ^= SIGN_BITS;
                sizes[half][v] = magnitudes(codes[half][v]);
            });
        unrolled<ROWS>([&](auto r) INLINED {
            const BitVec inputs = splat_inputs(at.x[r] + at.input + eight * 8 + half * DOT_INPUTS);
            unrolled<BLOCK_VECS>([&](auto v) INLINED {
                BitVec& sum = sums[r][v];
                const BitVec code = codes[half][v];
                if constexpr (IS_SIGNED) sum = add_signed(sum, code, sizes[half][v], inputs);
                else sum = add_products<BITS[F.codes]>(sum, code, inputs);
            });
        });
    });
}

// The sums of products of set `set`; where two sets make a unit, times their scales, which are
// integers.
template <const Format& F, int ROWS>
ALWAYS_INLINE void add_set(const Place<ROWS>& at, int set, const uint8_t* table,
                           BitVec (&part)[ROWS][BLOCK_VECS]) {
    constexpr int EIGHTS = UNIT / 8 / F.sets;
    constexpr int TOGETHER = std::min(narrow_eights(BITS[F.codes]), EIGHTS);
    if constexpr (is_signed_code(F.codes) && !F.has_two_integers()) {
        for (int e = 0; e < EIGHTS; ++e) add_eight<F>(at, set * EIGHTS + e, table, part);
        return;
    }
    if constexpr (is_signed_code(F.codes)) {
        BitVec sums[ROWS][BLOCK_VECS] = {};
        for (int e = 0; e < EIGHTS; ++e) add_eight<F>(at, set * EIGHTS + e, table, sums);
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            const auto scale =
                cast<BitVec>(integers(at.scales + set * UNIT_BLOCK + v * LANES, F.is_signed));
            unrolled<ROWS>([&](auto r) INLINED { part[r][v] += sums[r][v] * scale; });
        });
        return;
    }
    for (int e = 0; e < EIGHTS; e += TOGETHER) {
        BitVec sums[ROWS][BLOCK_VECS] = {};
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; ++i) add_eight<F>(at, set * EIGHTS + e + i, table, sums);
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            IntVec scale;
            if constexpr (F.has_two_integers())
                scale = integers(at.scales + set * UNIT_BLOCK + v * LANES, F.is_signed);
            unrolled<ROWS>([&](auto r) INLINED {
                if constexpr (F.has_two_integers()) part[r][v] += scaled<BITS[F.codes]>(sums[r][v], scale);
                else part[r][v] += widened<BITS[F.codes]>(sums[r][v]);
            });
        });
    }
}

// What one unit's sums are multiplied by and begin with, of the rows of a tile.
struct Factors {
    const float* xs;
    const Begin* begins;
    int64_t num_rows;  // between the begins of two sets
};

// One unit whose two sets have float16 scales of their own: a step for each.
template <const Format& F, int ROWS>
ALWAYS_INLINE void add_two(const Place<ROWS>& at, const Factors& by, const uint8_t* table,
                           Vec (&sums)[ROWS][BLOCK_VECS]) {
    unrolled<2>([&](auto set) INLINED {
        BitVec part[ROWS][BLOCK_VECS];
        unrolled<ROWS>([&](auto r) INLINED {
            const uint32_t below =
                is_signed_code(F.codes) ? 0 : by.begins[set * by.num_rows + r].modulo();
            unrolled<BLOCK_VECS>([&](auto v) INLINED { part[r][v] = below - BitVec{}; });
        });
        add_set<F>(at, set, table, part);
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            const Vec scale = scale_of<F>(at.scales, nullptr, set, v);
            unrolled<ROWS>([&](auto r) INLINED {
                Vec& sum = sums[r][v];
                sum = fused(floats(cast<IntVec>(part[r][v])), scale * splat(by.xs[r]), sum);
            });
        });
    });
}

// Whether sums of a unit's two sets are multiplied by their integers in float32: below 2^24 together,
// they stay exact, and take fewer steps than integers of 32 bits.
template <const Format& F>
constexpr bool joined_as_floats() {
    return F.has_two_integers() && !is_narrow(BITS[F.codes]) && !is_signed_code(F.codes);
}

template <const Format& F, int ROWS>
ALWAYS_INLINE void join_sets(const Place<ROWS>& at, const Factors& by, const uint8_t* table,
                             Vec (&joined)[ROWS][BLOCK_VECS]) {
    constexpr int EIGHTS = UNIT / 8 / 2;
    unrolled<2>([&](auto set) INLINED {
        BitVec part[ROWS][BLOCK_VECS];
        unrolled<ROWS>([&](auto r) INLINED {
            const uint32_t below = F.has_min ? 0 : by.begins[set * by.num_rows + r].modulo();
            unrolled<BLOCK_VECS>([&](auto v) INLINED { part[r][v] = below - BitVec{}; });
        });
        unrolled<EIGHTS>([&](auto e) INLINED { add_eight<F>(at, set * EIGHTS + e, table, part); });
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            const uint8_t* scales = at.scales + set * UNIT_BLOCK + v * LANES;
            const Vec scale = floats(integers(scales, F.is_signed));
            unrolled<ROWS>([&](auto r) INLINED {
                const Vec sum = floats(cast<IntVec>(part[r][v]));
                joined[r][v] = set == 0 ? sum * scale : fused(sum, scale, joined[r][v]);
            });
        });
    });
}

// One unit of a block for all rows of a tile.
template <const Format& F, int ROWS>
ALWAYS_INLINE void add_unit(const Place<ROWS>& at, const Factors& by, const Vec* heads,
                            const uint8_t* table, Vec (&sums)[ROWS][BLOCK_VECS]) {
    constexpr bool IN_FLOATS = joined_as_floats<F>();
    BitVec part[ROWS][BLOCK_VECS];
    Vec joined[ROWS][BLOCK_VECS];
    if constexpr (IN_FLOATS) {
        join_sets<F>(at, by, table, joined);
    } else {
        unrolled<ROWS>([&](auto r) INLINED {
            unrolled<BLOCK_VECS>([&](auto v) INLINED {
                part[r][v] = F.has_min || F.has_zeros() || F.sets == 2 || is_signed_code(F.codes)
                                 ? BitVec{}
                                 : by.begins[r].modulo() - BitVec{};
            });
        });
        unrolled<F.sets>([&](auto set) INLINED { add_set<F>(at, set, table, part); });
    }
    unrolled<BLOCK_VECS>([&](auto v) INLINED {
        const Vec scale = scale_of<F>(at.scales, heads, 0, v);
        if constexpr (!F.has_min && F.has_two_integers() && !is_signed_code(F.codes) && !IN_FLOATS)
            unrolled<2>([&](auto set) INLINED {
                const auto factor =
                    cast<BitVec>(integers(at.scales + set * UNIT_BLOCK + v * LANES, F.is_signed));
                unrolled<ROWS>([&](auto r) INLINED {
                    part[r][v] += factor * by.begins[set * by.num_rows + r].modulo();
                });
            });
        if constexpr (F.has_zeros()) {
            const auto zeros = cast<BitVec>(integers(at.scales + F.zeros_at() + v * LANES, false));
            unrolled<ROWS>([&](auto r) INLINED { part[r][v] += zeros * by.begins[r].modulo(); });
        }
        unrolled<ROWS>([&](auto r) INLINED {
            Vec& sum = sums[r][v];
            const Vec own = IN_FLOATS ? joined[r][v] : floats(cast<IntVec>(part[r][v]));
            sum = fused(own, scale * splat(by.xs[r]), sum);
        });
        if constexpr (F.has_min)
            unrolled<F.sets>([&](auto set) INLINED {
                const Vec min = min_of<F>(at.scales, heads, set, v);
                unrolled<ROWS>([&](auto r) INLINED {
                    Vec& sum = sums[r][v];
                    sum = fused(min, splat(by.begins[set * by.num_rows + r].total), sum);
                });
            });
    });
}

// Types that differ only by their table and step share a kernel; `own` is the format at hand.
template <const Format& F>
inline void fill_table(const Format& own, bool is_signed, uint8_t* table) {
    for (int i = 0; i < 16; ++i)
        table[i] = F.codes != TABLE4 ? 0 : static_cast<uint8_t>(own.table[i] + (is_signed ? 0 : F.zero));
}

template <const Format& F>
ALWAYS_INLINE void read_heads(const Format& own, const uint8_t* from, Vec (&heads)[2 * BLOCK_VECS]) {
    unrolled<(F.has_min ? 2 : 1) * BLOCK_VECS>([&](auto v) INLINED {
        heads[v] = halves(from, v, false);
        if constexpr (F.codes == TABLE4) heads[v] *= splat(own.step);
    });
}

// Units of one tile by a block, onto the sums at `to`, [ROWS][BLOCK_VECS].
template <const Format& F, int ROWS>
void add(const Tile& tile, const uint8_t* block, Vec* to) {
    const Format& own = *tile.job.format;
    uint8_t table[16];
    fill_table<F>(own, is_signed_code(TABLE4), table);
    const int8_t* x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = tile.inputs.values_of(tile.row + r);
    Vec sums[ROWS][BLOCK_VECS];
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) {
            sums[r][v] = tile.first == 0 ? Vec{} : to[r * BLOCK_VECS + v];
        });
    });
    Vec heads[2 * BLOCK_VECS] = {};
    const uint8_t* asked = block + F.unit_at(tile.first) + tile.ahead;
    for (int u = tile.first; u < tile.last; ++u, asked += tile.pace) {
        if (F.scales == SUPER && (u == tile.first || u % UNITS_OF_SUPER == 0))
            read_heads<F>(own, block + F.head_at(u), heads);
        const uint8_t* unit = block + F.unit_at(u);
        for (int line = 0; line < tile.pace; line += CACHE_LINE) __builtin_prefetch(asked + line);
        const Place<ROWS> at{unit + F.codes_at(), unit, x, u * UNIT};
        const Factors by{tile.scales_of(u), tile.begins_of(u * F.sets), tile.inputs.num_rows};
        if constexpr (F.sets == 2 && F.scales != SUPER) add_two<F>(at, by, table, sums);
        else add_unit<F>(at, by, heads, table, sums);
    }
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) { to[r * BLOCK_VECS + v] = sums[r][v]; });
    });
}

// The same where codes are floats: a chain of fused multiply-adds for each 128 inputs, whose sum times
// their scale is added to the whole.
template <const Format& F, int ROWS>
void add_floats(const Tile& tile, const uint8_t* block, Vec* to) {
    const float* x[ROWS];
    for (int r = 0; r < ROWS; ++r)
        x[r] = tile.inputs.x + static_cast<int64_t>(tile.row + r) * tile.inputs.num_in;
    Vec sums[ROWS][BLOCK_VECS];
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) {
            sums[r][v] = tile.first == 0 ? Vec{} : to[r * BLOCK_VECS + v];
        });
    });
    const uint8_t* asked = block + F.unit_at(tile.first) + tile.ahead;
    for (int first = tile.first; first < tile.last; first += F.units_of_head()) {
        Vec part[ROWS][BLOCK_VECS] = {};
        for (int u = first; u < first + F.units_of_head(); ++u, asked += tile.pace) {
            for (int line = 0; line < tile.pace; line += CACHE_LINE)
                __builtin_prefetch(asked + line);
            const uint8_t* codes = block + F.unit_at(u);
            for (int i = 0; i < UNIT; ++i, codes += UNIT_BLOCK) {
                Vec weights[BLOCK_VECS];
                unrolled<BLOCK_VECS>([&](auto v) {
                    weights[v] = from_float8(codes + v * LANES, LANES);
                });
                unrolled<ROWS>([&](auto r) {
                    const Vec input = splat(x[r][u * UNIT + i]);
                    unrolled<BLOCK_VECS>([&](auto v) {
                        part[r][v] = fused(weights[v], input, part[r][v]);
                    });
                });
            }
        }
        const auto* scales = reinterpret_cast<const float*>(block + F.head_at(first));
        unrolled<BLOCK_VECS>([&](auto v) {
            const Vec scale = load(scales + v * LANES);
            unrolled<ROWS>([&](auto r) { sums[r][v] = fused(part[r][v], scale, sums[r][v]); });
        });
    }
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) { to[r * BLOCK_VECS + v] = sums[r][v]; });
    });
}

// Two sets a unit want two sums an output: few registers hold those of half of the rows.
template <const Format& F, int ROWS>
void add_rows(const Tile& tile, const uint8_t* block, Vec* to) {
    if constexpr (F.is_float()) {
        add_floats<F, ROWS>(tile, block, to);
    } else if constexpr (F.sets == 2 && ROWS == ADD_ROWS && 2 * ROWS * BLOCK_VECS > NUM_REGISTERS) {
        constexpr int HALF_ROWS = ROWS / 2;
        add<F, HALF_ROWS>(tile, block, to);
        Tile other = tile;
        other.row += HALF_ROWS;
        add<F, ROWS - HALF_ROWS>(other, block, to + HALF_ROWS * BLOCK_VECS);
    } else {
        add<F, ROWS>(tile, block, to);
    }
}

// Units first to last of a block, each once for all rows (groups_many.h).
template <const Format& F, bool AS_NUMBERS>
void unpack(const Job& job, const uint8_t* block, int first, int last, Unpacked* to) {
    typedef uint8_t Bytes __attribute__((vector_size(VEC_BYTES)));
    const Format& own = *job.format;
    uint8_t table[16];
    fill_table<F>(own, AS_NUMBERS, table);
    Vec heads[2 * BLOCK_VECS] = {};
    for (int u = first; u < last; ++u, ++to) {
        if (F.scales == SUPER && (u == first || u % UNITS_OF_SUPER == 0))
            read_heads<F>(own, block + F.head_at(u), heads);
        const uint8_t* unit = block + F.unit_at(u);
        unrolled<BLOCK_VECS>([&](auto v) {
            Bytes zeros = Bytes{} + static_cast<uint8_t>(F.codes == TABLE4 ? 0 : F.zero);
            if constexpr (F.has_zeros())
                zeros = cast<Bytes>(cast<BitVec>(integers(unit + F.zeros_at() + v * LANES, false)) *
                                    0x01010101u);
            unrolled<UNIT / 8>([&](auto eight) {
                BitVec codes[2];
                codes_of<F.codes>(unit + F.codes_at(), eight, v, table, &codes[0], &codes[1]);
                unrolled<2>([&](auto half) {
                    Bytes bytes = cast<Bytes>(codes[half]);
                    if constexpr (AS_NUMBERS) bytes -= zeros;
                    std::memcpy(to->codes[2 * eight + half][v * LANES], &bytes, sizeof(bytes));
                });
            });
            constexpr Steps STEPS = steps_of(F);
            unrolled<STEPS == TWO ? 2 : 1>([&](auto set) {
                store(to->scales[set] + v * LANES, scale_of<F>(unit, heads, set, v));
            });
            if constexpr (STEPS == JOINED)
                unrolled<2>([&](auto set) {
                    const uint8_t* scales = unit + set * UNIT_BLOCK + v * LANES;
                    store(to->scales[1 + set] + v * LANES, floats(integers(scales, F.is_signed)));
                });
            if constexpr (F.has_min)
                unrolled<F.sets>([&](auto set) {
                    store(to->mins[set] + v * LANES, min_of<F>(unit, heads, set, v));
                });
        });
    }
}

using Add = void (*)(const Tile&, const uint8_t*, Vec*);

// Kernels by their rows, from 1 on. Each is compiled for every type, and takes the compiler as long as a file of
// other code does.
using Adds = std::array<Add, ADD_ROWS>;

template <int TYPE, size_t... ROWS>
constexpr Adds adds(std::index_sequence<ROWS...>) {
    return {add_rows<FORMAT<TYPE>, ROWS + 1>...};
}

struct Kernels {
    Adds adds;
    Unpacks unpacks;
};

template <const Format& F>
constexpr Unpacks unpacks() {
    Unpacks found = {nullptr, nullptr};
    if constexpr (!F.is_float() && F.sets == 1) found.as_numbers = unpack<F, true>;
    if constexpr (!F.is_float() && !F.has_zeros()) found.as_stored = unpack<F, false>;
    return found;
}

template <int TYPE>
constexpr Kernels KERNELS = {adds<TYPE>(std::make_index_sequence<ADD_ROWS>()), unpacks<FORMAT<TYPE>>()};

// Of a type that files often hold, or else of another; null for one that is not among them.
const Kernels* common_kernels(int type);
const Kernels* other_kernels(int type);

}  // namespace outrider
