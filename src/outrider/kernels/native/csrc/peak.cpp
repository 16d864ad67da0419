// Arithmetic as fast as it goes, on numbers that stay in registers: the ceiling of a pass over many
// rows. Each kind is the instructions that one step of such a pass takes for its products.
#include "dots.h"
#include "pairs.h"
#include "team.h"
#include "tiles.h"
#include "unrolled.h"
#include "vectors.h"

#include <cstring>

namespace outrider {

namespace {

// In the order of `ARITHMETIC` in kernels/native/tuning.py.
enum Kind { PRODUCTS, PAIRS, BYTES, NIBBLES, TILED_PAIRS, TILED_BYTES };

// Chains that hide the latency of an addition and fit the registers; of 16, those of integers are copied.
constexpr int sums_of(Kind kind) { return NUM_REGISTERS == 32 ? 16 : kind == NIBBLES ? 6 : 10; }
// Work items a thread: one that wakes late leaves its own to the others.
constexpr int ITEMS = 8;

// As if the value were another one each time, so that nothing is computed once for all steps.
template <class V>
inline void vary(V& vec) {
#if defined(__x86_64__) || defined(__i386__)
    asm volatile("" : "+v"(vec));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(vec));
#else
    asm volatile("" : "+m"(vec));
#endif
}

template <class V, int SUMS, class Step>
void repeat(int64_t steps, const Step& step) {
    V sums[SUMS] = {};
    BitVec input = 0x04030201u - BitVec{};
    for (int64_t i = 0; i < steps; ++i)
        unrolled<SUMS>([&](auto s) __attribute__((always_inline)) {
            vary(input);
            sums[s] = step(sums[s], input);
        });
    unrolled<SUMS>([&](auto s) __attribute__((always_inline)) { vary(sums[s]); });
}

#if defined(OUTRIDER_HAS_TILES) && !defined(OUTRIDER_SOFTWARE_TILES)
constexpr bool TIMES_TILES = true;

// A dot a step, to four sums in turn. Products of zeros take less power, and so less time, than a
// model's: no operand is zero.
void work_on_tiles(Kind kind, int64_t steps) {
    const Tiles in_use({TILE_ROWS, TILE_BYTES});
    uint8_t numbers[TILE_ROWS][TILE_BYTES];
    std::memset(numbers, 0x3f, sizeof(numbers));
    unrolled<TileShapes::NUM>([&](auto tile) { tiles::load<tile>(numbers, TILE_BYTES); });
    const auto dot = [&](auto sum) INLINED {
        constexpr int ROWS = TileShapes::ROWS_0 + sum / 2, COLUMNS = TileShapes::COLUMNS_0 + sum % 2;
        if (kind == TILED_PAIRS) tiles::dot_bfloat16<sum, ROWS, COLUMNS>();
        else tiles::dot_signed<sum, ROWS, COLUMNS>();
    };
    int64_t step = 0;
    for (; step + 4 <= steps; step += 4) unrolled<4>(dot);
    for (; step < steps; ++step) dot(std::integral_constant<int, 0>{});
}
#else
constexpr bool TIMES_TILES = false;

void work_on_tiles(Kind, int64_t) {}
#endif

void work(Kind kind, int64_t steps) {
    BitVec weights = 0x01070605u - BitVec{};
    vary(weights);
    switch (kind) {
        case PRODUCTS:
            return repeat<Vec, sums_of(PRODUCTS)>(steps, [&](Vec sum, BitVec input) {
                return fused(cast<Vec>(weights), cast<Vec>(input), sum);
            });
        case PAIRS:
#if defined(OUTRIDER_HAS_PAIRS)
            return repeat<Vec, sums_of(PAIRS)>(steps, [&](Vec sum, BitVec input) {
                return add_pair_dots(sum, weights, cast<Pair>(static_cast<uint32_t>(input[0])));
            });
#endif
            return;
        case BYTES:
            return repeat<BitVec, sums_of(BYTES)>(steps, [&](BitVec sum, BitVec input) {
                if constexpr (HAS_SIGNED) return add_signed(sum, weights, weights, input);
                else return add_dots(sum, weights, input);
            });
        case NIBBLES:
            return repeat<BitVec, sums_of(NIBBLES)>(steps, [&](BitVec sum, BitVec input) {
                return add_products<4>(sum, weights, input);
            });
        case TILED_PAIRS:
        case TILED_BYTES: return work_on_tiles(kind, steps);
    }
}

constexpr int inputs_of(Kind kind) { return kind == PRODUCTS ? 1 : kind == PAIRS ? 2 : DOT_INPUTS; }

}  // namespace

}  // namespace outrider

using namespace outrider;

// Multiplications and additions, together, that `steps` steps an item take; 0 if the CPU lacks the
// instruction. Only a process that may use tiles asks for them.
extern "C" int64_t outrider_peak(Team* team, int kind, int64_t steps) {
#if !defined(OUTRIDER_HAS_PAIRS)
    if (kind == PAIRS) return 0;
#endif
    const bool is_tiled = kind == TILED_PAIRS || kind == TILED_BYTES;
    if (is_tiled && !TIMES_TILES) return 0;
    std::lock_guard<std::mutex> lock(team->entry());
    const int items = ITEMS * team->num_threads();
    team->run(items, 1, [&](int first, int last, int) {
        for (int i = first; i < last; ++i) work(static_cast<Kind>(kind), steps);
    });
    if (is_tiled)
        return 2 * items * steps * TILE_ROWS * TILE_COLUMNS * TILE_BYTES / (kind == TILED_PAIRS ? 2 : 1);
    const int num_sums = sums_of(static_cast<Kind>(kind)), inputs = inputs_of(static_cast<Kind>(kind));
    return 2 * items * steps * num_sums * LANES * inputs;
}
