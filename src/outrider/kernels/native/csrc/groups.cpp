// out_NO (+)= x_NI W_OI^T over matrices of groups (groups.h), bit for bit the same for a row
// whatever rows it comes with. groups_add.h has the arithmetic.
#include <algorithm>

#include "groups_add.h"

namespace outrider {

namespace {

// As in quantised.cpp.
constexpr int SLICE_BYTES = 16 * 1024;
constexpr int64_t MIN_SPLIT_WORK = 1 << 18;
constexpr int64_t CACHED_ROWS_BYTES = 128 * 1024;

constexpr int blocks_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

const Adds& adds_of(int type) {
    const Adds* common = common_adds(type);
    return common == nullptr ? *other_adds(type) : *common;
}

Add add_for(const Adds& of, int rows, int blocks) {
    if (blocks == 4) return of[NUM_HEIGHTS];
    if (blocks == 2) return of[NUM_HEIGHTS + 1];
    int place = 0;
    while (HEIGHTS[place] < rows) ++place;
    return of[place];
}

struct Output {
    float* out;
    int num_rows, num_out;
    bool accumulate;
};

void finish(const Output& to, const Job& job, const Vec* sums, int row, int rows, int block,
            int blocks) {
    const int vecs = blocks * BLOCK_VECS;
    for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < vecs; ++v) {
            const int first = block * UNIT_BLOCK + v * LANES, count = job.part->num_out - first;
            if (count <= 0) break;
            float* out = to.out + static_cast<int64_t>(row + r) * to.num_out +
                         job.part->first_out + first;
            const Vec sum = sums[r * vecs + v];
            store_some(out, to.accumulate ? load_some(out, count) + sum : sum, count);
        }
    }
}

// All rows fit one tile: whole blocks, one after the other.
void one_tile(const Output& to, const Inputs& inputs, const Job& job, int first, int last) {
    const Tile tile{inputs, job, 0, to.num_rows, 0, inputs.num_units};
    const Adds& of = adds_of(job.part->type);
    Vec sums[std::max(MAX_ROWS, 4) * BLOCK_VECS];
    for (int block = first, blocks; block < last; block += blocks) {
        blocks = blocks_at_once(to.num_rows);
        if (blocks > last - block) blocks = 1;
        const uint8_t* from = job.part->packed + block * job.block_bytes;
        add_for(of, to.num_rows, blocks)(tile, from, sums);
        finish(to, job, sums, 0, to.num_rows, block, blocks);
    }
}

// As many rows as the second-level cache holds; tiles of them, of nearly equal height, take turns on
// a slice of one block.
void many_tiles(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                Scratch& scratch) {
    constexpr int TILE_VECS = MAX_ROWS * BLOCK_VECS;
    const Adds& of = adds_of(job.part->type);
    const int slice = std::max(1, SLICE_BYTES / job.format->unit_bytes());
    const int64_t row_bytes = inputs.stride + inputs.num_units * (sizeof(float) + sizeof(Begin));
    const int most = std::max<int64_t>(1, CACHED_ROWS_BYTES / row_bytes / MAX_ROWS) * MAX_ROWS;
    for (int begin = 0; begin < to.num_rows; begin += most) {
        const int num_rows = std::min(most, to.num_rows - begin);
        const int num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
        const auto tile_row = [&](int tile) { return begin + num_rows * tile / num_tiles; };
        auto* sums = static_cast<Vec*>(scratch.take(sizeof(Vec) * TILE_VECS * num_tiles));
        for (int block = first; block < last; ++block) {
            const uint8_t* from = job.part->packed + block * job.block_bytes;
            for (int u = 0; u < inputs.num_units; u += slice) {
                const int end = std::min(u + slice, inputs.num_units);
                for (int t = 0; t < num_tiles; ++t) {
                    const int row = tile_row(t), rows = tile_row(t + 1) - row;
                    Vec* tile_sums = sums + t * TILE_VECS;
                    add_for(of, rows, 1)({inputs, job, row, rows, u, end}, from, tile_sums);
                    if (end == inputs.num_units) finish(to, job, tile_sums, row, rows, block, 1);
                }
            }
        }
    }
}

// Ties round to even; a unit with a NaN or an infinity gets the scale NaN. `totals` has the sums of
// each 16 integers.
void quantise_unit(const float* x, int8_t* values, float* scale, int32_t* totals) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float largest = largest_magnitude(x, UNIT);
    const bool is_finite = largest < __builtin_inff();
    const float inverse = is_finite && largest >= TINY ? 127.0f / largest : 0.0f;
    *scale = is_finite ? largest / 127.0f : __builtin_nanf("");
    totals[0] = totals[1] = 0;
    for (int first = 0; first < UNIT; first += LANES) {
        const Vec some = is_finite ? load(x + first) : Vec{};
        const Vec shifted = rounded(some * inverse) + TO_INTEGER;
        const IntVec integers = cast<IntVec>(shifted) - cast<int32_t>(TO_INTEGER);
        const ByteVec bytes = __builtin_convertvector(integers, ByteVec);
        std::memcpy(values + first, &bytes, sizeof(bytes));
        totals[first / 16] += sum_of_lanes(integers);
    }
}

void begin_row(const Format& f, const Inputs& inputs, int row, const int32_t* totals, Begin* to) {
    for (int u = 0; u < inputs.num_units; ++u)
        for (int set = 0; set < f.sets; ++set) {
            const int32_t* own = totals + 2 * u;
            const int total = f.sets == 1 ? own[0] + own[1] : own[set];
            Begin& begin = to[static_cast<int64_t>(u * f.sets + set) * inputs.num_rows + row];
            if (f.has_min) begin.total = *inputs.scales_of(u, row) * static_cast<float>(total);
            else begin.below = (f.has_zeros() ? 1 : f.zero) * -total;
        }
}

// All units of a row; zeros fill the last one.
void quantise_units(const float* x, int num_in, const Inputs& to, int row, int32_t* totals) {
    for (int u = 0; u < to.num_units; ++u) {
        float padded[UNIT] = {};
        const float* from = x + u * UNIT;
        if (num_in - u * UNIT < UNIT) {
            std::copy(from, x + num_in, padded);
            from = padded;
        }
        quantise_unit(from, to.values_of(row) + u * UNIT, to.scales_of(u, row), totals + 2 * u);
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
    const int64_t totals = rows * units * 2;
    auto* memory = static_cast<int8_t*>(team.shared().take(
        rows * stride + sizeof(float) * (rows * units + totals + num_begins + MAX_ROWS)));
    const Inputs inputs{memory, reinterpret_cast<float*>(memory + rows * stride), units,
                        to.num_rows, stride};
    auto* sums = reinterpret_cast<int32_t*>(inputs.scales + rows * units);
    auto* begins = reinterpret_cast<Begin*>(sums + totals);
    for (int p = 0; p < w.num_parts; ++p) {
        jobs[p].begins = begins;
        begins += rows * units * jobs[p].format->sets;
    }
    team.run(to.num_rows, std::max(1, MIN_SPLIT_INPUTS / w.num_in), [&](int first, int last, int) {
        for (int64_t row = first; row < last; ++row) {
            int32_t* own = sums + row * units * 2;
            quantise_units(x + row * w.num_in, w.num_in, inputs, row, own);
            for (int p = 0; p < w.num_parts; ++p) {
                const Format& f = *jobs[p].format;
                begin_row(f, inputs, row, own, const_cast<Begin*>(jobs[p].begins));
            }
        }
    });
    const int64_t block_work = rows * w.num_in * UNIT_BLOCK;
    const int64_t worthwhile =
        std::min<int64_t>(MIN_SPLIT_WORK / std::max<int64_t>(block_work, 1), num_blocks);
    team.run(num_blocks, std::max(blocks_at_once(to.num_rows), static_cast<int>(worthwhile)),
             [&](int first, int last, int thread) {
                 for (int p = 0; p < w.num_parts; ++p) {
                     const Job& job = jobs[p];
                     const int begin = std::max(first - job.first_block, 0);
                     const int end = std::min(last - job.first_block, job.num_blocks);
                     if (begin >= end) continue;
                     if (to.num_rows <= MAX_ROWS) one_tile(to, inputs, job, begin, end);
                     else many_tiles(to, inputs, job, begin, end, team.own(thread));
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
