// A trial of the tile kernels, made to be run in a process that may crash (cpu.py).
//
// Small whole numbers, scales that are sums of a few powers of two: every product and sum is exact,
// so the right answer is known without another kernel.
#include <cstring>
#include <cmath>
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
#include "pass.h"
#include "tiles_blocks.h"

using namespace outrider;

extern "C" {

void outrider_pack_bfloat16_tiles(Team*, const BFloat16*, BFloat16*, int num_out, int num_in);
void outrider_linear_bfloat16_tiles(const TileWeights*, const float* x, float* out, int num_rows,
                                    int accumulate);
void outrider_linear_int8_tiles(const ByteMatrix*, const float* x, float* out, int num_rows,
                                int accumulate);
void outrider_attention_bfloat16_tiles(const Pass*, const float* qkv, BFloat16* keys,
                                       BFloat16* values, const Look*, float* out);
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

// The newest tokens of a text, whose scores are whole numbers times a scale at which all weights but
// those of the best keys, which are equal, are zero.
bool attention_is_sound(Team& team) {
    constexpr int NUM_KEYS = 50, MOST_TOKENS = 12, PAGE = 16, DIM = 64, HEADS = 3;
    constexpr int NUM_PAGES = (NUM_KEYS + PAGE - 1) / PAGE, NUM_SLOTS = NUM_PAGES * PAGE;
    const Look look{128.0f, 0.0f, 0, 0, nullptr};
    int32_t pages[NUM_PAGES], seq[MOST_TOKENS] = {}, visible[MOST_TOKENS];
    for (int page = 0; page < NUM_PAGES; ++page) pages[page] = NUM_PAGES - 1 - page;
    const auto slot = [&](int t) { return pages[t / PAGE] * PAGE + t % PAGE; };
    std::vector<BFloat16> keys(NUM_SLOTS * DIM), values(NUM_SLOTS * DIM);
    for (int t = 0; t < NUM_KEYS; ++t)
        for (int d = 0; d < DIM; ++d) {
            keys[slot(t) * DIM + d] = to_bfloat16(static_cast<float>(whole(t * t, d, -8, 7)));
            values[slot(t) * DIM + d] = to_bfloat16(static_cast<float>(whole(t, d * d, -9, 9)));
        }
    const auto number = [](BFloat16 value) { return cast<float>(uint32_t{value.bits} << 16); };
    for (const int num : {1, MOST_TOKENS}) {
        for (int n = 0; n < num; ++n) visible[n] = NUM_KEYS - num + n + 1;
        const Pass pass{&team, NUM_SLOTS * DIM, DIM, (HEADS + 2) * DIM, HEADS, 1, DIM, PAGE, num,
                        NUM_PAGES, 0, nullptr, nullptr, seq, visible, pages, nullptr, nullptr};
        std::vector<float> qkv(num * pass.row_size), out(num * HEADS * DIM);
        for (size_t i = 0; i < qkv.size(); ++i)
            qkv[i] = static_cast<float>(whole(static_cast<int>(i), num, -5, 5));
        outrider_attention_bfloat16_tiles(&pass, qkv.data(), keys.data(), values.data(), &look,
                                          out.data());
        for (int row = 0; row < num * HEADS; ++row) {
            const float* q = &qkv[row / HEADS * pass.row_size + row % HEADS * DIM];
            std::vector<float> sums(DIM);
            float best = 0, count = 0;
            for (int t = 0; t < visible[row / HEADS]; ++t) {
                float score = 0;
                for (int d = 0; d < DIM; ++d) score += q[d] * number(keys[slot(t) * DIM + d]);
                if (count > 0 && score < best) continue;
                if (count == 0 || score > best) sums.assign(DIM, 0.0f), count = 0;
                best = score, count += 1;
                for (int d = 0; d < DIM; ++d) sums[d] += number(values[slot(t) * DIM + d]);
            }
            const float scale = 1.0f / count;
            for (int d = 0; d < DIM; ++d)
                if (!(std::abs(out[row * DIM + d] - sums[d] * scale) < 1e-4f)) return false;
        }
    }
    return true;
}

}  // namespace

extern "C" int outrider_tiles_check() {
    if (!outrider_tiles_permit()) return FORBIDDEN;
    auto* team = new Team(2, nullptr);  // never freed: its thread may still run while the process ends
    const bool is_sound = bfloat16_is_sound(*team) && int8_is_sound(*team) &&
                          attention_is_sound(*team);
    return is_sound ? SOUND : WRONG;
}

#else

extern "C" int outrider_tiles_check() { return FORBIDDEN; }

#endif
