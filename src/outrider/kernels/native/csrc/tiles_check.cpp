// A trial of the tile kernels, made to be run in a process that may crash (cpu.py).
//
// Small whole numbers, scales that are sums of a few powers of two: every product and sum is exact,
// so the right answer is known without another kernel.
#include <cstring>
#include <vector>

#include "team.h"
#include "tiles.h"

extern "C" int outrider_tiles_permit();

// Mirrored by `_VERDICTS` in cpu.py.
namespace {
enum Verdict { SOUND = 0, FORBIDDEN = 3, WRONG = 4 };
}

#if defined(OUTRIDER_HAS_TILES)

#include "integers.h"
#include "tiles_blocks.h"

using namespace outrider;

extern "C" {

void outrider_pack_bfloat16_tiles(Team*, const BFloat16*, BFloat16*, int num_out, int num_in);
void outrider_linear_bfloat16_tiles(const TileWeights*, const float* x, float* out, int num_rows,
                                    int accumulate);
void outrider_linear_int8_tiles(const ByteMatrix*, const float* x, float* out, int num_rows,
                                int accumulate);
}

namespace {


// Tails of blocks and of steps; one tile of rows, several, and a height that is odd.
constexpr int NUM_OUT = 70, NUM_IN = 160;
constexpr int NUM_BLOCKS = (NUM_OUT + TILE_BLOCK - 1) / TILE_BLOCK;
constexpr int ROW_COUNTS[] = {1, 7, 16, 37};
constexpr int MOST_ROWS = 37;

int whole(int a, int b, int low, int high) { return low + (a * 31 + b * 17) % (high - low + 1); }

BFloat16 to_bfloat16(float value) {
    return {static_cast<uint16_t>(cast<uint32_t>(value) >> 16)};
}

struct Matrix {
    int low, high;
    bool has_scales;

    int value(int o, int i) const { return o < NUM_OUT ? whole(o, i, low, high) : 0; }
    float scale(int o) const { return has_scales ? 0.25f * (1 + o % 3) : 1; }
};

// Rows have an integer scale of 1: their largest magnitude is that of the integers.
std::vector<float> inputs(int largest) {
    std::vector<float> x(MOST_ROWS * NUM_IN);
    for (int r = 0; r < MOST_ROWS; ++r)
        for (int i = 0; i < NUM_IN; ++i)
            x[r * NUM_IN + i] =
                static_cast<float>(i == 0 ? largest : whole(r, i, -largest, largest));
    return x;
}

template <class Weights>
bool gives_exact_sums(Team& team, void (*linear)(const Weights*, const float*, float*, int, int),
                      const Matrix& matrix, const uint8_t* packed,
                      const std::vector<float>& x) {
    const Weights weights{&team, packed, NUM_IN, NUM_OUT};
    std::vector<float> out(MOST_ROWS * NUM_OUT);
    for (const int num_rows : ROW_COUNTS) {
        linear(&weights, x.data(), out.data(), num_rows, 0);
        linear(&weights, x.data(), out.data(), num_rows, 1);
        for (int r = 0; r < num_rows; ++r)
            for (int o = 0; o < NUM_OUT; ++o) {
                double sum = 0;
                for (int i = 0; i < NUM_IN; ++i)
                    sum += static_cast<double>(x[r * NUM_IN + i]) * matrix.value(o, i) *
                           matrix.scale(o);
                if (out[r * NUM_OUT + o] != static_cast<float>(2 * sum)) return false;
            }
    }
    return true;
}

bool bfloat16_is_sound(Team& team) {
    const Matrix matrix{-8, 7, false};
    std::vector<BFloat16> rows(NUM_OUT * NUM_IN), packed(NUM_BLOCKS * TILE_BLOCK * NUM_IN);
    for (int o = 0; o < NUM_OUT; ++o)
        for (int i = 0; i < NUM_IN; ++i)
            rows[o * NUM_IN + i] = to_bfloat16(static_cast<float>(matrix.value(o, i)));
    outrider_pack_bfloat16_tiles(&team, rows.data(), packed.data(), NUM_OUT, NUM_IN);
    return gives_exact_sums(team, outrider_linear_bfloat16_tiles, matrix,
                            reinterpret_cast<const uint8_t*>(packed.data()), inputs(9));
}

template <class T>
void append(std::vector<uint8_t>& to, T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    to.insert(to.end(), bytes, bytes + sizeof(value));
}

bool int8_is_sound(Team& team) {
    const Matrix matrix{-127, 127, true};
    constexpr int PADDED_IN = (NUM_IN + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES;
    std::vector<uint8_t> packed;
    for (int block = 0; block < NUM_BLOCKS; ++block) {
        const int output = block * TILE_BLOCK;
        for (int c = 0; c < TILE_BLOCK; ++c) append(packed, matrix.scale(output + c));
        for (int i = 0; i < PADDED_IN; i += 4)
            for (int c = 0; c < TILE_BLOCK; ++c)
                for (int byte = 0; byte < 4; ++byte) {
                    const int value = i < NUM_IN ? matrix.value(output + c, i + byte) + 128 : 0;
                    append(packed, static_cast<uint8_t>(value));
                }
    }
    return gives_exact_sums(team, outrider_linear_int8_tiles, matrix, packed.data(), inputs(127));
}

}  // namespace

extern "C" int outrider_tiles_check() {
    if (!outrider_tiles_permit()) return FORBIDDEN;
    auto* team = new Team(2, nullptr);  // never freed: its thread may still run while the process ends
    const bool is_sound = bfloat16_is_sound(*team) && int8_is_sound(*team);
    return is_sound ? SOUND : WRONG;
}

#else

extern "C" int outrider_tiles_check() { return FORBIDDEN; }

#endif
