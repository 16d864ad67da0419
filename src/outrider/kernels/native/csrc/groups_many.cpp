// Many rows over matrices of groups: each slice of a block is unpacked once, and all rows meet it, on
// tiles (tiles.h) or by dot products. Sums of integers are exact, and floats take the steps of
// groups_add.h in the same order, so that a row's bits are those that it has alone.
#include "groups_many.h"

#include <algorithm>

#include "integers.h"
#include "tiles_blocks.h"
#include "unrolled.h"

namespace outrider {

namespace {

// Some rows of a call, and units of a block that they meet. With each unit memory is asked for `pace`
// bytes of the next ones.
struct Meeting {
    const Inputs& inputs;
    const Job& job;
    const Unpacked* units;
    int row, rows, first, last;
    const uint8_t* asked;
    int pace;

    const float* scales_of(int unit) const { return inputs.scales_of(unit, row); }
    template <int SETS>
    const Begin* begins_of(int unit) const {
        return job.begins + static_cast<int64_t>(unit) * SETS * inputs.num_rows + row;
    }
    void ask(int unit) const {
        const uint8_t* from = asked + (unit - first) * pace;
        for (int line = 0; line < pace; line += CACHE_LINE) __builtin_prefetch(from + line);
    }
};

constexpr int sets_of(Steps steps) { return steps == ONE ? 1 : 2; }

// Of one unit and LANES outputs.
template <Steps STEPS, bool HAS_MIN>
struct UnitFactors {
    static constexpr int SETS = sets_of(STEPS);
    Vec scales[3], mins[2];

    ALWAYS_INLINE UnitFactors(const Unpacked& from, int at) {
        constexpr int SCALES = STEPS == ONE ? 1 : STEPS == TWO ? 2 : 3;
        unrolled<SCALES>([&](auto i) { scales[i] = load(from.scales[i] + at); });
        if constexpr (HAS_MIN)
            unrolled<SETS>([&](auto i) { mins[i] = load(from.mins[i] + at); });
    }

    // `found` are the sums of both sets, `begins` those of a row, `apart` from set to set. Both sets'
    // integers are below 2^24 together, so that float32 holds what they are joined to.
    ALWAYS_INLINE Vec add(const Vec* found, float xs, const Begin* begins, int64_t apart,
                          Vec sum) const {
        Vec some = found[0];
        if constexpr (STEPS == JOINED) some = fused(some, scales[1], found[1] * scales[2]);
        sum = fused(some, scales[0] * splat(xs), sum);
        if constexpr (STEPS == TWO) sum = fused(found[1], scales[1] * splat(xs), sum);
        if constexpr (HAS_MIN)
            unrolled<SETS>([&](auto i) { sum = fused(mins[i], splat(begins[i * apart].total), sum); });
        return sum;
    }
};

using Add = void (*)(const Meeting&, float* sums);

// All rows by blocks first to last. As many rows as a cache holds take turns on a slice of a block.
template <class Way>
void by_bands(const Output& to, const Inputs& inputs, const Job& job, Unpack unpack, int first,
              int last, Scratch& scratch) {
    const Format& f = *job.format;
    const int units = inputs.num_units, num_floats = sets_of(steps_of(f)) * (f.has_min ? 2 : 1);
    const int slice = slice_units(units, UNIT_BLOCK * (UNIT + num_floats * sizeof(float)));
    const int64_t row_bytes = inputs.stride + units * (sizeof(float) + f.sets * sizeof(Begin));
    const int most = std::max<int64_t>(1, Way::CACHED_BYTES / row_bytes / Way::ROWS) * Way::ROWS;
    for (int begin = 0; begin < to.num_rows; begin += most) {
        const Way way(f, std::min(most, to.num_rows - begin));
        auto* unpacked = static_cast<Unpacked*>(scratch.take(
            sizeof(Unpacked) * slice + sizeof(float) * UNIT_BLOCK * Way::ROWS * way.count));
        auto* sums = reinterpret_cast<float*>(unpacked + slice);
        for (int block = first; block < last; ++block) {
            const uint8_t* from = job.part->packed + block * job.block_bytes;
            for (int u = 0; u < units; u += slice) {
                const int end = std::min(u + slice, units);
                const int pace = f.unit_bytes() / way.count + 1;
                unpack(job, from, u, end, unpacked);
                for (int t = 0; t < way.count; ++t) {
                    const auto dealt = way.deal(t);
                    const int row = begin + dealt.row;
                    // Each asks for its share of the next slice, so that memory is never idle.
                    const uint8_t* asked = from + f.unit_at(end) + t * (end - u) * pace;
                    float* own = sums + t * Way::ROWS * UNIT_BLOCK;
                    way.add({inputs, job, unpacked, row, dealt.rows, u, end, asked, pace}, own);
                    if (end == units)
                        finish(to, job, own + dealt.dropped * UNIT_BLOCK, row + dealt.dropped,
                               dealt.rows - dealt.dropped, block);
                }
            }
        }
    }
}

// Rows that meet a slice together; the first `dropped` of them also met it before.
struct Dealt {
    int row, rows, dropped;
};

#if defined(__AVX512VNNI__) && !defined(OUTRIDER_PLAIN_DOTS)

// Rows of which both sums, of integers and of float32, stay in registers.
constexpr int DOT_ROWS = 6;

template <Steps STEPS, bool HAS_MIN, int ROWS>
void add_by_dots(const Meeting& m, float* to) {
    constexpr int SETS = sets_of(STEPS), QUADS = UNIT / DOT_INPUTS / SETS;
    const int8_t* x[ROWS];
    Vec sums[ROWS][BLOCK_VECS];
    unrolled<ROWS>([&](auto r) {
        x[r] = m.inputs.values_of(m.row + r) + m.first * UNIT;
        unrolled<BLOCK_VECS>([&](auto v) {
            sums[r][v] = m.first == 0 ? Vec{} : load(to + r * UNIT_BLOCK + v * LANES);
        });
    });
    for (int u = m.first; u < m.last; ++u) {
        const Unpacked& unit = m.units[u - m.first];
        const float* xs = m.scales_of(u);
        const Begin* begins = m.begins_of<SETS>(u);
        const int64_t apart = m.inputs.num_rows;
        m.ask(u);
        Vec found[ROWS][BLOCK_VECS][SETS];
        unrolled<SETS>([&](auto set) INLINED {
            BitVec part[ROWS][BLOCK_VECS];
            unrolled<ROWS>([&](auto r) {
                const uint32_t below = HAS_MIN ? 0 : begins[set * apart + r].modulo();
                unrolled<BLOCK_VECS>([&](auto v) { part[r][v] = below - BitVec{}; });
            });
            unrolled<QUADS>([&](auto quad) INLINED {
                constexpr int AT = set * QUADS + quad;
                BitVec codes[BLOCK_VECS];
                unrolled<BLOCK_VECS>(
                    [&](auto v) { codes[v] = load_bytes(unit.codes[AT][v * LANES]); });
                unrolled<ROWS>([&](auto r) {
                    const BitVec inputs = splat_inputs(x[r] + AT * DOT_INPUTS);
                    unrolled<BLOCK_VECS>([&](auto v) {
                        part[r][v] = add_dots(part[r][v], codes[v], inputs);
                    });
                });
            });
            unrolled<ROWS>([&](auto r) {
                unrolled<BLOCK_VECS>(
                    [&](auto v) { found[r][v][set] = floats(cast<IntVec>(part[r][v])); });
            });
        });
        unrolled<BLOCK_VECS>([&](auto v) {
            const UnitFactors<STEPS, HAS_MIN> by(unit, v * LANES);
            unrolled<ROWS>([&](auto r) {
                sums[r][v] = by.add(found[r][v], xs[r], begins + r, apart, sums[r][v]);
            });
        });
        unrolled<ROWS>([&](auto r) { x[r] += UNIT; });
    }
    unrolled<ROWS>([&](auto r) {
        unrolled<BLOCK_VECS>([&](auto v) { store(to + r * UNIT_BLOCK + v * LANES, sums[r][v]); });
    });
}

template <Steps STEPS, bool HAS_MIN>
Add dots_of(int rows) {
    constexpr Add OF[] = {
        add_by_dots<STEPS, HAS_MIN, 1>, add_by_dots<STEPS, HAS_MIN, 2>,
        add_by_dots<STEPS, HAS_MIN, 3>, add_by_dots<STEPS, HAS_MIN, 4>,
        add_by_dots<STEPS, HAS_MIN, 5>, add_by_dots<STEPS, HAS_MIN, 6>,
    };
    return OF[rows - 1];
}

Add dots_of(const Format& f, int rows) {
    switch (steps_of(f)) {
        case ONE: return f.has_min ? dots_of<ONE, true>(rows) : dots_of<ONE, false>(rows);
        case JOINED: return f.has_min ? dots_of<JOINED, true>(rows) : dots_of<JOINED, false>(rows);
        default: return dots_of<TWO, false>(rows);
    }
}

// Tiles of nearly equal height.
struct ByDots {
    static constexpr int ROWS = DOT_ROWS;
    static constexpr int64_t CACHED_BYTES = 128 * 1024;
    const Format& format;
    const int num_rows, count;

    ByDots(const Format& format, int num_rows)
        : format(format), num_rows(num_rows), count((num_rows + ROWS - 1) / ROWS) {}

    Dealt deal(int tile) const {
        const int row = num_rows * tile / count;
        return {row, num_rows * (tile + 1) / count - row, 0};
    }
    void add(const Meeting& m, float* sums) const { dots_of(format, m.rows)(m, sums); }
};

#define OUTRIDER_HAS_DOTS 1
#endif

#if defined(OUTRIDER_HAS_TILES)

// A block is whole column tiles.
constexpr bool FITS_TILES = UNIT_BLOCK % TILE_COLUMNS == 0;
// Pairs of units whose sums are kept: one is multiplied while the sums of the other are used.
constexpr int PAIRS = 2;

using Products = int32_t[TILE_ROWS][TILE_COLUMNS];

// Both units of a pair have registers of their own.
template <int ODD>
ALWAYS_INLINE void multiply(const int8_t* x, int64_t stride, const uint8_t* codes, Products& to) {
    constexpr int ROWS = TileShapes::ROWS_0 + ODD, COLUMNS = TileShapes::COLUMNS_0 + ODD;
    tiles::zero<ODD>();
    tiles::load<ROWS>(x, stride);
    tiles::load<COLUMNS>(codes, UNIT_BLOCK * DOT_INPUTS);
    tiles::dot_signed<ODD, ROWS, COLUMNS>();
    tiles::store<ODD>(to, TILE_BYTES);
}

// One column tile, of types with one set a unit. ROWS are at least those of the tile, whose others are not
// used. What the loop reads is copied first: instructions of tiles are taken to write any memory.
template <bool HAS_MIN, int ROWS>
void add_column(const Meeting& m, int column, float* to) {
    constexpr int VECS = TILE_COLUMNS / LANES;
    const int64_t stride = m.inputs.stride, apart = m.inputs.num_rows;
    const int num_units = m.last - m.first, pace = column == 0 ? m.pace : 0;
    const int8_t* x = m.inputs.values_of(m.row) + m.first * UNIT;
    const Unpacked* units = m.units;
    const float* xs = m.scales_of(m.first);
    const Begin* begins = m.begins_of<1>(m.first);
    const uint8_t* asked = m.asked;
    alignas(CACHE_LINE) Products products[PAIRS][2];
    Vec sums[ROWS][VECS];
    unrolled<ROWS>([&](auto r) {
        unrolled<VECS>([&](auto v) {
            sums[r][v] = m.first == 0 ? Vec{} : load(to + r * UNIT_BLOCK + v * LANES);
        });
    });
    const auto take = [&](auto odd, int u, Products(&pair)[2]) INLINED {
        if (u < num_units)
            multiply<odd>(x + u * UNIT, stride, &units[u].codes[0][column][0], pair[odd]);
    };
    unrolled<2>([&](auto odd) INLINED { take(odd, odd, products[0]); });
    for (int first = 0; first < num_units; first += 2) {
        unrolled<2>([&](auto odd) INLINED {
            const int u = first + odd;
            take(odd, u + 2, products[(first / 2 + 1) % PAIRS]);
            if (u >= num_units) return;
            for (int line = 0; line < pace; line += CACHE_LINE) __builtin_prefetch(asked + line);
            const Products& own = products[first / 2 % PAIRS][odd];
            unrolled<VECS>([&](auto v) INLINED {
                const UnitFactors<ONE, HAS_MIN> by(units[u], column + v * LANES);
                unrolled<ROWS>([&](auto r) INLINED {
                    IntVec some;
                    std::memcpy(&some, own[r] + v * LANES, sizeof(some));
                    const Vec found = floats(some);
                    sums[r][v] = by.add(&found, xs[r], begins + r, apart, sums[r][v]);
                });
            });
            xs += apart;
            begins += apart;
            asked += pace;
        });
    }
    unrolled<ROWS>([&](auto r) {
        unrolled<VECS>([&](auto v) { store(to + r * UNIT_BLOCK + v * LANES, sums[r][v]); });
    });
}

template <bool HAS_MIN, int ROWS>
void add_by_tiles(const Meeting& m, float* to) {
    for (int column = 0; column < UNIT_BLOCK; column += TILE_COLUMNS)
        add_column<HAS_MIN, ROWS>(m, column, to + column);
}

template <bool HAS_MIN>
Add tiles_of(int rows) {
    constexpr Add OF[] = {add_by_tiles<HAS_MIN, 4>, add_by_tiles<HAS_MIN, 8>,
                          add_by_tiles<HAS_MIN, 12>, add_by_tiles<HAS_MIN, 16>};
    return OF[(rows + 3) / 4 - 1];
}

struct ByTiles {
    static constexpr int ROWS = TILE_ROWS;
    static constexpr int64_t CACHED_BYTES = BAND_BYTES;
    const Format& format;
    const RowTiles tiles;
    const int count;
    const Tiles in_use;

    ByTiles(const Format& format, int num_rows)
        : format(format), tiles(num_rows), count(tiles.count), in_use({tiles.height, UNIT}) {}

    Dealt deal(int tile) const {
        return {tiles.first(tile), tiles.height, tiles.num_dropped(tile)};
    }
    void add(const Meeting& m, float* sums) const {
        (format.has_min ? tiles_of<true>(m.rows) : tiles_of<false>(m.rows))(m, sums);
    }
};

#endif

}  // namespace

#if defined(OUTRIDER_HAS_TILES)
bool many_by_tiles(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                   Scratch& scratch) {
    const Unpack unpack = unpacks_of(job.part->type).as_numbers;
    if (!FITS_TILES || unpack == nullptr) return false;
    by_bands<ByTiles>(to, inputs, job, unpack, first, last, scratch);
    return true;
}
#else
bool many_by_tiles(const Output&, const Inputs&, const Job&, int, int, Scratch&) { return false; }
#endif

#if defined(OUTRIDER_HAS_DOTS)
bool many_by_dots(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                  Scratch& scratch) {
    const Unpack unpack = unpacks_of(job.part->type).as_stored;
    if (unpack == nullptr) return false;
    by_bands<ByDots>(to, inputs, job, unpack, first, last, scratch);
    return true;
}
#else
bool many_by_dots(const Output&, const Inputs&, const Job&, int, int, Scratch&) { return false; }
#endif

}  // namespace outrider
