// out_NO (+)= x_NI W_OI^T over matrices of groups (groups.h), bit for bit the same for a row
// whatever rows it comes with. groups_add.h has the arithmetic.
#include <algorithm>

#include "groups_add.h"

namespace outrider {

namespace {

constexpr int64_t CACHED_ROWS_BYTES = 128 * 1024;
// Measured on an Emerald Rapids: tiles are faster from so many rows on.
constexpr int FEWEST_ON_TILES = 32;
constexpr int64_t LARGE_ROWS_BYTES = 512 * 1024;
// Of blocks, for each thread, where rows are large.
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

// One unit of a row: its integers, its scale, and what the sums of each part begin with.
void quantise_unit(const float* x, int num_in, const Inputs& to, int row, int u, const Job* jobs,
                   int num_jobs) {
    float padded[UNIT] = {};
    const float* from = x + u * UNIT;
    if (num_in - u * UNIT < UNIT) {
        std::copy(from, x + num_in, padded);
        from = padded;
    }
    IntVec sums[2] = {};
    const float scale = to_integers(from, UNIT, to.values_of(row) + u * UNIT,
                                    [&](int first, IntVec some) { sums[first / 16] += some; });
    IntVec totals = pair_sums(sums[0], sums[1]);
    for (int width = LANES; width > 2; width /= 2) totals = pair_sums(totals, totals);
    *to.scales_of(u, row) = scale;
    for (int p = 0; p < num_jobs; ++p) {
        const Format& f = *jobs[p].format;
        for (int set = 0; set < f.sets; ++set) {
            const int total = f.sets == 1 ? totals[0] + totals[1] : totals[set];
            Begin& begin = jobs[p].begins[static_cast<int64_t>(u * f.sets + set) * to.num_rows + row];
            if (f.has_min) begin.total = scale * static_cast<float>(total);
            else begin.below = (f.has_zeros() ? 1 : f.zero) * -total;
        }
    }
}

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
    auto* memory = static_cast<int8_t*>(team.shared().take(
        rows * stride + sizeof(float) * (rows * units + num_begins + ADD_ROWS)));
    const Inputs inputs{memory, reinterpret_cast<float*>(memory + rows * stride), units,
                        to.num_rows, stride, x, w.num_in};
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
            for (int64_t row = 0; row < rows; ++row)
                for (int u = first; u < last; ++u)
                    quantise_unit(x + row * w.num_in, w.num_in, inputs, row, u, jobs, w.num_parts);
        });
    const int64_t block_work = rows * w.num_in * UNIT_BLOCK;
    const int64_t worthwhile =
        std::min<int64_t>(MIN_SPLIT_WORK / std::max<int64_t>(block_work, 1), num_blocks);
    const bool on_tiles = w.on_tiles != 0 && to.num_rows >= FEWEST_ON_TILES;
    // Rows that no cache holds are read for every range of blocks anew.
    const int64_t fewest = on_tiles && rows * stride > LARGE_ROWS_BYTES
                               ? num_blocks / (RANGES * team.num_threads())
                               : worthwhile;
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
