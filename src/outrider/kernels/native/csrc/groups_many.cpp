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
    const int most_units = std::min(
        Way::MOST_UNITS, slice_units(units, UNIT_BLOCK * (UNIT + num_floats * sizeof(float))));
    const int num_slices = (units + most_units - 1) / most_units;
    const int slice = (units + num_slices - 1) / num_slices;
    const int64_t row_bytes = inputs.stride + units * (sizeof(float) + f.sets * sizeof(Begin));
    const int most = std::max<int64_t>(1, Way::CACHED_BYTES / row_bytes / Way::ROWS) * Way::ROWS;
    const int num_steps = (last - first) * num_slices;
    for (int begin = 0; begin < to.num_rows; begin += most) {
        Way way(f, std::min(most, to.num_rows - begin));
        auto* unpacked = static_cast<Unpacked*>(
            scratch.take(sizeof(Unpacked) * slice * Way::SLICES +
                         sizeof(float) * UNIT_BLOCK * Way::ROWS * way.count));
        auto* sums = reinterpret_cast<float*>(unpacked + slice * Way::SLICES);
        const int pace = f.unit_bytes() / way.count + 1;
        const auto block_of = [&](int step) { return first + step / num_slices; };
        const auto packed = [&](int step) {
            return job.part->packed + block_of(step) * job.block_bytes;
        };
        const auto first_of = [&](int step) { return step % num_slices * slice; };
        const auto last_of = [&](int step) { return std::min(first_of(step) + slice, units); };
        const auto kept = [&](int step) { return unpacked + step % Way::SLICES * slice; };
        for (int step = 1 - Way::SLICES; step < num_steps; ++step) {
            if (const int next = step + Way::SLICES - 1; next < num_steps)
                unpack(job, packed(next), first_of(next), last_of(next), kept(next));
            if (step < 0) continue;
            const int u = first_of(step), end = last_of(step);
            // Each tile asks for its share of a slice, so that memory is never idle.
            const uint8_t* asked =
                packed(step) + f.unit_at(end) + (Way::SLICES - 1) * slice * f.unit_bytes();
            for (int t = 0; t < way.count; ++t, asked += (end - u) * pace) {
                const auto dealt = way.deal(t);
                const int row = begin + dealt.row;
                float* own = sums + t * Way::ROWS * UNIT_BLOCK;
                way.add({inputs, job, kept(step), row, dealt.rows, u, end, asked, pace}, own);
                if (end == units) finish(to, job, own, row, dealt.rows, block_of(step));
            }
        }
    }
}

// Rows that meet a slice together.
struct Dealt {
    int row, rows;
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
    static constexpr int ROWS = DOT_ROWS, MOST_UNITS = 1 << 20, SLICES = 1;
    static constexpr int64_t CACHED_BYTES = 128 * 1024;
    const Format& format;
    const int num_rows, count;

    ByDots(const Format& format, int num_rows)
        : format(format), num_rows(num_rows), count((num_rows + ROWS - 1) / ROWS) {}

    Dealt deal(int tile) const {
        const int row = num_rows * tile / count;
        return {row, num_rows * (tile + 1) / count - row};
    }
    void add(const Meeting& m, float* sums) const { dots_of(format, m.rows)(m, sums); }
};

#define OUTRIDER_HAS_DOTS 1
#endif

#if defined(OUTRIDER_HAS_TILES)

// A block is whole column tiles.
constexpr bool FITS_TILES = UNIT_BLOCK % TILE_COLUMNS == 0;
constexpr int COLUMNS = UNIT_BLOCK / TILE_COLUMNS;
// Units that are multiplied before their sums are used. While tiles work, vectors of 512 bits take twice
// the time on an Emerald Rapids, so the two take turns; all that they share stays in the first-level cache.
constexpr int CHUNK = 6;
// Rows whose sums stay in registers.
constexpr int SUM_ROWS = 8;
static_assert(TILE_ROWS % SUM_ROWS == 0);

using Products = int32_t[TILE_ROWS][UNIT_BLOCK];

// A tile of rows by a unit, on sums of its own: those of unit before are stored meanwhile.
template <int ODD>
ALWAYS_INLINE void multiply(const int8_t* x, const Unpacked& unit, Products* before) {
    using Shapes = TileShapes;
    constexpr int LINE = UNIT_BLOCK * DOT_INPUTS, OWN = 2 * ODD, OTHER = 2 - OWN;
    static_assert(COLUMNS <= 2);
    tiles::load<Shapes::ROWS_0 + ODD>(x, UNIT);
    unrolled<COLUMNS>([&](auto column) INLINED {
        tiles::load<Shapes::COLUMNS_0 + column>(unit.codes[0][column * TILE_COLUMNS], LINE);
        tiles::zero<OWN + column>();
        tiles::dot_signed<OWN + column, Shapes::ROWS_0 + ODD, Shapes::COLUMNS_0 + column>();
    });
    if (before != nullptr)
        unrolled<COLUMNS>([&](auto column) INLINED {
            tiles::store<OTHER + column>(&(*before)[0][column * TILE_COLUMNS], LINE);
        });
}

ALWAYS_INLINE void multiply_units(const int8_t* x, const Unpacked* units, int count,
                                  Products* to) {
    constexpr int UNIT_BYTES = TILE_ROWS * UNIT;
    for (int u = 0; u < count; u += 2) {
        multiply<0>(x + u * UNIT_BYTES, units[u], u == 0 ? nullptr : to + u - 1);
        if (u + 1 < count) multiply<1>(x + (u + 1) * UNIT_BYTES, units[u + 1], to + u);
    }
    unrolled<COLUMNS>([&](auto column) INLINED {
        void* last = &to[count - 1][0][column * TILE_COLUMNS];
        if (count % 2 == 0) tiles::store<2 + column>(last, sizeof(to[0][0]));
        else tiles::store<column>(last, sizeof(to[0][0]));
    });
}

// Adds the products of `count` units to the sums of SUM_ROWS rows.
template <bool HAS_MIN>
void add_products(const Unpacked* units, const Products* products, int count, const float* xs,
                  const Begin* begins, int64_t apart, bool is_first, const uint8_t* asked, int pace,
                  float* to) {
    Vec sums[SUM_ROWS][BLOCK_VECS];
    unrolled<SUM_ROWS>([&](auto r) INLINED {
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            sums[r][v] = is_first ? Vec{} : load(to + r * UNIT_BLOCK + v * LANES);
        });
    });
    for (int u = 0; u < count; ++u, xs += apart, begins += apart, asked += pace) {
        for (int line = 0; line < pace; line += CACHE_LINE) __builtin_prefetch(asked + line);
        unrolled<BLOCK_VECS>([&](auto v) INLINED {
            const UnitFactors<ONE, HAS_MIN> by(units[u], v * LANES);
            unrolled<SUM_ROWS>([&](auto r) INLINED {
                IntVec some;
                std::memcpy(&some, products[u][r] + v * LANES, sizeof(some));
                const Vec found = floats(some);
                sums[r][v] = by.add(&found, xs[r], begins + r, apart, sums[r][v]);
            });
        });
    }
    unrolled<SUM_ROWS>([&](auto r) INLINED {
        unrolled<BLOCK_VECS>([&](auto v) INLINED { store(to + r * UNIT_BLOCK + v * LANES, sums[r][v]); });
    });
}

// Of types with one set a unit. Rows that the tile lacks are added like others, and not used.
template <bool HAS_MIN>
void add_by_tiles(const Meeting& m, Products* products, float* sums) {
    const int count = m.last - m.first, groups = (m.rows + SUM_ROWS - 1) / SUM_ROWS;
    const int pace = m.pace / groups;
    multiply_units(m.inputs.tiled_of(m.row, m.first), m.units, count, products);
    for (int group = 0; group < groups; ++group) {
        const int row = group * SUM_ROWS;
        add_products<HAS_MIN>(m.units, reinterpret_cast<const Products*>(products[0][row]), count,
                              m.scales_of(m.first) + row, m.begins_of<1>(m.first) + row,
                              m.inputs.num_rows, m.first == 0, m.asked + group * count * pace, pace,
                              sums + row * UNIT_BLOCK);
    }
}

class ByTiles {
  public:
    // A slice is unpacked before the one at hand is multiplied: tiles wait for what was just stored.
    static constexpr int ROWS = TILE_ROWS, MOST_UNITS = CHUNK, SLICES = 2;
    // CPUs with tiles have 2 MB of second-level cache.
    static constexpr int64_t CACHED_BYTES = 1280 * 1024;
    const int num_rows, count;

    ByTiles(const Format& format, int num_rows)
        : num_rows(num_rows),
          count((num_rows + ROWS - 1) / ROWS),
          has_min_(format.has_min),
          in_use_({std::min(num_rows, ROWS), UNIT}) {
        if (num_rows < ROWS) std::memset(products_, 0, sizeof(products_));
    }

    Dealt deal(int tile) const { return {tile * ROWS, std::min(ROWS, num_rows - tile * ROWS)}; }
    void add(const Meeting& m, float* sums) {
        has_min_ ? add_by_tiles<true>(m, products_, sums) : add_by_tiles<false>(m, products_, sums);
    }

  private:
    const bool has_min_;
    const Tiles in_use_;
    alignas(CACHE_LINE) Products products_[CHUNK];
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
