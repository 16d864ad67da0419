// out_NO (+)= x_NI W_OI^T over matrices of groups (groups.h), bit for bit the same for a row
// whatever rows it comes with. groups_add.h has the arithmetic.
#include <algorithm>

#include "groups_add.h"
#include "tiles.h"

namespace outrider {

namespace {

constexpr int64_t CACHED_ROWS_BYTES = 128 * 1024;
// Measured on an Emerald Rapids: tiles are faster from so many rows and multiply-adds on.
constexpr int FEWEST_ON_TILES = 32;
#if defined(OUTRIDER_SOFTWARE_TILES)
constexpr int64_t LEAST_TILED_WORK = 0;
#else
constexpr int64_t LEAST_TILED_WORK = 3 << 23;
#endif
// Of blocks, for each thread, on tiles.
constexpr int RANGES = 4;

// As many rows unpack codes anew for each of their tiles: the more a code takes to unpack, the fewer.
constexpr int most_packed_rows(Codes codes) {
    return ADD_ROWS * (codes == U8 ? 4 : codes == U5 || codes == U6 ? 1 : 2);
}

const Kernels& kernels_of(int type) {
    const Kernels* common = common_kernels(type);
    return common == nullptr ? *other_kernels(type) : *common;
}

}  // namespace

const Unpacks& unpacks_of(int type) { return kernels_of(type).unpacks; }

void finish(const Output& to, const Job& job, const float* sums, int row, int rows, int block) {
    for (int r = 0; r < rows; ++r) {
        float* out = to.out + static_cast<int64_t>(row + r) * to.num_out + job.part->first_out;
        for (int v = 0; v < BLOCK_VECS; ++v) {
            const int first = block * UNIT_BLOCK + v * LANES, count = job.part->num_out - first;
            if (count <= 0) break;
            const Vec sum = load(sums + r * UNIT_BLOCK + v * LANES) * splat(job.part->factor);
            const Vec result = to.accumulate ? load_some(out + first, count) + sum : sum;
            store_some(out + first, result, count);
        }
    }
}

namespace {

// All rows fit one tile: whole blocks, one after the other.
void one_tile(const Output& to, const Inputs& inputs, const Job& job, int first, int last) {
    const Tile tile{inputs, job, 0, 0, inputs.num_units, BYTES_AHEAD, job.format->unit_bytes()};
    const Add add = kernels_of(job.part->type).adds[to.num_rows - 1];
    Vec sums[ADD_ROWS * BLOCK_VECS];
    for (int block = first; block < last; ++block) {
        add(tile, job.part->packed + block * job.block_bytes, sums);
        finish(to, job, reinterpret_cast<const float*>(sums), 0, to.num_rows, block);
    }
}

// As many rows as the second-level cache holds; tiles of them, of nearly equal height, take turns on
// a slice of one block.
void many_tiles(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                Scratch& scratch) {
    constexpr int TILE_VECS = ADD_ROWS * BLOCK_VECS;
    const Adds& of = kernels_of(job.part->type).adds;
    const int unit_bytes = job.format->unit_bytes(), units = inputs.num_units;
    // Whole heads of floats.
    const int whole = job.format->is_float() ? job.format->units_of_head() : 1;
    const int slice = (slice_units(units, unit_bytes) + whole - 1) / whole * whole;
    const int64_t row_bytes = job.format->is_float()
                                  ? inputs.num_in * static_cast<int64_t>(sizeof(float))
                                  : inputs.stride + units * (sizeof(float) + sizeof(Begin));
    const int most = std::max<int64_t>(1, CACHED_ROWS_BYTES / row_bytes / ADD_ROWS) * ADD_ROWS;
    for (int begin = 0; begin < to.num_rows; begin += most) {
        const int num_rows = std::min(most, to.num_rows - begin);
        const int num_tiles = (num_rows + ADD_ROWS - 1) / ADD_ROWS;
        const auto tile_row = [&](int tile) { return begin + num_rows * tile / num_tiles; };
        const int pace = unit_bytes / num_tiles;
        auto* sums = static_cast<Vec*>(scratch.take(sizeof(Vec) * TILE_VECS * num_tiles));
        for (int block = first; block < last; ++block) {
            const uint8_t* from = job.part->packed + block * job.block_bytes;
            for (int u = 0; u < units; u += slice) {
                const int end = std::min(u + slice, units);
                for (int t = 0; t < num_tiles; ++t) {
                    const int row = tile_row(t), rows = tile_row(t + 1) - row;
                    // Each asks for its share of the next slice, so that memory is never idle.
                    const int ahead = (end - u) * unit_bytes + t * (end - u) * pace;
                    Vec* tile_sums = sums + t * TILE_VECS;
                    of[rows - 1]({inputs, job, row, u, end, ahead, pace}, from, tile_sums);
                    if (end == units) finish(to, job, reinterpret_cast<const float*>(tile_sums), row, rows,
                               block);
                }
            }
        }
    }
}

// Lane i is what `op` makes of all lanes of vector i.
template <int COUNT = LANES, class Op>
ALWAYS_INLINE IntVec across(const IntVec* of, const Op& op) {
    if constexpr (COUNT == 1) {
        return of[0];
    } else {
        const IntVec a = across<COUNT / 2>(of, op), b = across<COUNT / 2>(of + COUNT / 2, op);
        return op(even_lanes(a, b), odd_lanes(a, b));
    }
}

// Units of all rows, LANES at a time: row by row, in each unit by unit. What takes a step for a unit then takes one
// for all of them.
struct Quantiser {
    const float* x;
    const Inputs& to;
    const Job* jobs;
    int num_jobs;

    void operator()(int first, int last) const {
        Some some;
        some.count = 0;
        for (int row = 0; row < to.num_rows; ++row)
            for (int unit = first; unit < last; ++unit) {
                some.row[some.count] = row, some.unit[some.count] = unit;
                if (++some.count == LANES) quantise(some), some.count = 0;
            }
        if (some.count > 0) quantise(some);
    }

  private:
    struct Some {
        int count, row[LANES], unit[LANES];
    };
    static constexpr int VECS = UNIT / LANES, SET_VECS = 16 / LANES;

    // A unit that ends with its row is completed by zeros.
    const float* inputs(const Some& some, int i, float* padded) const {
        const int at = some.unit[i] * UNIT;
        const float* from = x + static_cast<int64_t>(some.row[i]) * to.num_in + at;
        if (to.num_in - at >= UNIT) return from;
        std::fill(std::copy(from, from + to.num_in - at, padded), padded + UNIT, 0.0f);
        return padded;
    }

    // As `to_integers` does.
    void quantise(const Some& some) const {
        constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        const auto larger = [](IntVec a, IntVec b) INLINED { return a > b ? a : b; };
        const auto added = [](IntVec a, IntVec b) INLINED { return a + b; };
        float padded[LANES][UNIT], inverse_of[LANES], scale_of[LANES];
        uint32_t kept_of[LANES];
        const float* from[LANES];
        IntVec sizes[LANES], sums[2][LANES];
        for (int i = 0; i < some.count; ++i) {
            from[i] = inputs(some, i, padded[i]);
            IntVec size = {};
            unrolled<VECS>([&](auto v) INLINED {
                size = larger(size, cast<IntVec>(load(from[i] + v * LANES)) & 0x7fffffff);
            });
            sizes[i] = size;
        }
        for (int i = some.count; i < LANES; ++i) sizes[i] = sums[0][i] = sums[1][i] = IntVec{};
        const IntVec bits = across(sizes, larger);
        const Vec largest = cast<Vec>(bits);
        const IntVec is_finite = bits < cast<int32_t>(__builtin_inff());
        const IntVec has_inverse = is_finite & (largest >= TINY);
        store(inverse_of, has_inverse ? 127.0f / largest : Vec{});
        const Vec scale = is_finite ? largest / 127.0f : splat(__builtin_nanf(""));
        store(scale_of, scale);
        std::memcpy(kept_of, &is_finite, sizeof(kept_of));
        for (int i = 0; i < some.count; ++i) {
            const int row = some.row[i], unit = some.unit[i];
            const BitVec kept = kept_of[i] - BitVec{};
            int8_t* values = to.values_of(row) + unit * UNIT;
            int8_t* tiled = to.tiled == nullptr ? nullptr : to.tiled_of(row, unit);
            IntVec sum[2] = {};
            unrolled<VECS>([&](auto v) INLINED {
                const BitVec own = cast<BitVec>(load(from[i] + v * LANES)) & kept;
                const Vec shifted = apart(cast<Vec>(own) * splat(inverse_of[i])) + TO_INTEGER;
                const IntVec integers = cast<IntVec>(shifted) - cast<int32_t>(TO_INTEGER);
                store_bytes(values + v * LANES, integers);
                if (tiled != nullptr) store_bytes(tiled + v * LANES, integers);
                sum[v / SET_VECS] += integers;
            });
            sums[0][i] = sum[0], sums[1][i] = sum[1];
            *to.scales_of(unit, row) = scale_of[i];
        }
        const IntVec totals[2] = {across(sums[0], added), across(sums[1], added)};
        for (int p = 0; p < num_jobs; ++p)
            for (int set = 0; set < jobs[p].format->sets; ++set)
                begin(some, jobs[p], set, scale,
                      jobs[p].format->sets == 1 ? totals[0] + totals[1] : totals[set]);
    }

    void begin(const Some& some, const Job& job, int set, Vec scale, IntVec totals) const {
        const Format& f = *job.format;
        Begin begins[LANES];
        if (f.has_min) {
            const Vec own = scale * floats(totals);
            std::memcpy(begins, &own, sizeof(begins));
        } else {
            const IntVec own = totals * -(f.has_zeros() ? 1 : f.zero);
            std::memcpy(begins, &own, sizeof(begins));
        }
        for (int i = 0; i < some.count; ++i)
            job.begins[static_cast<int64_t>(some.unit[i] * f.sets + set) * to.num_rows + some.row[i]] =
                begins[i];
    }
};

void linear(const Grouped& w, const float* x, const Output& to) {
    if (to.num_rows == 0) return;
    Team& team = w.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    const int units = units_of(w.num_in);
    const int64_t rows = to.num_rows, stride = ((w.num_in + CACHE_LINE - 1) / CACHE_LINE | 1) * CACHE_LINE;
    Job jobs[MOST_PARTS];
    int64_t num_begins = 0;
    int num_blocks = 0;
    for (int p = 0; p < w.num_parts; ++p) {
        const Format* f = format_of(w.parts[p].type);
        const int blocks = (w.parts[p].num_out + UNIT_BLOCK - 1) / UNIT_BLOCK;
        jobs[p] = {&w.parts[p], f, f->block_bytes(units), nullptr, num_blocks, blocks};
        num_blocks += blocks;
        num_begins += rows * units * f->sets;
    }
    const bool on_tiles = w.on_tiles != 0 && to.num_rows >= FEWEST_ON_TILES &&
                          rows * w.num_in * w.num_out >= LEAST_TILED_WORK;
    const bool are_tiled = on_tiles && std::any_of(jobs, jobs + w.num_parts, [](const Job& job) {
        return unpacks_of(job.part->type).as_numbers != nullptr;
    });
    const int64_t tiled_bytes =
        are_tiled ? (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * units * UNIT : 0;
    // Tiles are whole: scales behind the last rows are read, and what comes of them is left out.
    auto* memory = static_cast<int8_t*>(team.shared().take(
        tiled_bytes + rows * stride + sizeof(float) * (rows * units + num_begins + TILE_ROWS)));
    auto* tiled = are_tiled ? memory : nullptr;
    memory += tiled_bytes;
    const Inputs inputs{memory, reinterpret_cast<float*>(memory + rows * stride), units,
                        to.num_rows, stride, x, w.num_in, tiled};
    auto* begins = reinterpret_cast<Begin*>(inputs.scales + rows * units);
    for (int p = 0; p < w.num_parts; ++p) {
        jobs[p].begins = begins;
        begins += rows * units * jobs[p].format->sets;
    }
    // Units are shared out and not rows: threads then write to other cache lines.
    const int grain = std::max<int64_t>(1, MIN_SPLIT_INPUTS / UNIT / rows);
    const auto is_float = [](const Job& job) { return job.format->is_float(); };
    if (!std::all_of(jobs, jobs + w.num_parts, is_float))
        team.run(units, grain, [&](int first, int last, int) {
            Quantiser{x, inputs, jobs, w.num_parts}(first, last);
        });
    const int64_t block_work = rows * w.num_in * UNIT_BLOCK;
    const int64_t worthwhile =
        std::min<int64_t>(MIN_SPLIT_WORK / std::max<int64_t>(block_work, 1), num_blocks);
    // Tiles are set up for every range of blocks anew, which takes as long as some blocks.
    const int64_t fewest = on_tiles ? num_blocks / (RANGES * team.num_threads()) : worthwhile;
    team.run(num_blocks, std::max(1, static_cast<int>(fewest)),
             [&](int first, int last, int thread) {
                 for (int p = 0; p < w.num_parts; ++p) {
                     const Job& job = jobs[p];
                     const int begin = std::max(first - job.first_block, 0);
                     const int end = std::min(last - job.first_block, job.num_blocks);
                     if (begin >= end) continue;
                     Scratch& scratch = team.own(thread);
                     if (on_tiles && many_by_tiles(to, inputs, job, begin, end, scratch)) continue;
                     const bool is_worth = to.num_rows > most_packed_rows(job.format->codes);
                     if (is_worth && many_by_dots(to, inputs, job, begin, end, scratch)) continue;
                     if (to.num_rows <= ADD_ROWS) one_tile(to, inputs, job, begin, end);
                     else many_tiles(to, inputs, job, begin, end, scratch);
                 }
             });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" void outrider_linear_grouped(const Grouped* w, const float* x, float* out, int num_rows,
                                        int accumulate) {
    linear(*w, x, {out, num_rows, w->num_out, accumulate != 0});
}
