// Many rows by a block (groups.h): what the rows are, and a block's units once they are unpacked for
// all of them.
#pragma once

#include "groups.h"
#include "team.h"
#include "tiles.h"

namespace outrider {

constexpr int VEC_BYTES = LANES * DOT_INPUTS;

// Rows of x as integers, and themselves; for each part of the matrix, what sums of sets begin with and what
// its minimums are multiplied by. For tiles the integers are there once more, in the order in which they
// are read: of 16 rows one unit after the other.
struct Inputs {
    int8_t* values;
    float* scales;  // [units][rows]
    int num_units, num_rows;
    int64_t stride;
    const float* x;
    int num_in;
    int8_t* tiled;  // or null

    int8_t* values_of(int row) const { return values + row * stride; }
    int8_t* tiled_of(int row, int unit) const {
        const int64_t tile = row / TILE_ROWS * static_cast<int64_t>(num_units) + unit;
        return tiled + (tile * TILE_ROWS + row % TILE_ROWS) * UNIT;
    }
    float* scales_of(int unit, int row) const {
        return scales + static_cast<int64_t>(unit) * num_rows + row;
    }
};

// For every set of a part and every row: the integer from which its sum starts, or, where there are
// minimums, row's scale times the sum of integers.
union Begin {
    int32_t below;
    float total;

    uint32_t modulo() const { return static_cast<uint32_t>(below); }
};

struct Job {
    const Part* part;
    const Format* format;
    int64_t block_bytes;
    Begin* begins;
    int first_block, num_blocks;
};

struct Output {
    float* out;
    int num_rows, num_out;
    bool accumulate;
};

// Writes the sums, [rows][UNIT_BLOCK], of rows from `row` on.
void finish(const Output& to, const Job& job, const float* sums, int row, int rows, int block);

// How the sums of a unit's products are added to an output's sum: one sum for 32 inputs; two, which
// are multiplied by integers and added first; or two, one step after the other.
enum Steps { ONE, JOINED, TWO };

constexpr Steps steps_of(const Format& f) {
    return f.sets == 1 ? ONE : f.has_two_integers() ? JOINED : TWO;
}

// A unit with a byte for each code, as signed numbers (code - zero) or as they are stored.
struct alignas(CACHE_LINE) Unpacked {
    uint8_t codes[UNIT / DOT_INPUTS][UNIT_BLOCK][DOT_INPUTS];
    // Of ONE a scale; of TWO a scale for each set; of JOINED what multiplies both, then each set's
    // integer.
    float scales[3][UNIT_BLOCK], mins[2][UNIT_BLOCK];
};

using Unpack = void (*)(const Job& job, const uint8_t* block, int first, int last, Unpacked* to);

// For codes as numbers, which tiles multiply, null for types of two sets; and as they are stored, null for
// types that have no one zero. Both are null for floats of 8 bits.
struct Unpacks {
    Unpack as_numbers, as_stored;
};

const Unpacks& unpacks_of(int type);

// Multiplies all rows by blocks first to last of a part, on tiles or by dot products; false, and nothing
// is done, where the CPU has no such instructions or the part's type has other kernels.
bool many_by_tiles(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                   Scratch& scratch);
bool many_by_dots(const Output& to, const Inputs& inputs, const Job& job, int first, int last,
                  Scratch& scratch);

}  // namespace outrider
