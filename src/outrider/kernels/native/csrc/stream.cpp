// Reads memory as fast as it comes and does nothing with it: the ceiling of a pass that reads every
// weight once.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

// Of a register's width: of a wider type compilers make loads through the stack.
typedef uint64_t Words __attribute__((vector_size(sizeof(Vec))));

constexpr int64_t CHUNK = 1 << 18, RUN = 512, AHEAD = 4096;
constexpr int SUMS = 8;

uint64_t read(const char* from, int64_t bytes) {
    Words sums[SUMS] = {};
    for (int64_t at = 0; at + RUN <= bytes; at += RUN) {
        for (int64_t i = 0; i < RUN; i += CACHE_LINE) __builtin_prefetch(from + at + i + AHEAD, 0, 2);
        for (int i = 0; i < static_cast<int>(RUN / sizeof(Words)); ++i) {
            Words words;
            std::memcpy(&words, from + at + i * sizeof(Words), sizeof(words));
            sums[i % SUMS] ^= words;
        }
    }
    for (int i = 1; i < SUMS; ++i) sums[0] ^= sums[i];
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof(Words) / sizeof(sum); ++i) sum ^= sums[0][i];
    return sum;
}

}  // namespace

}  // namespace outrider

using namespace outrider;

// The exclusive or of all whole runs of 512 bytes, so that nothing can be left out; read `times`
// times, of which the last counts.
extern "C" uint64_t outrider_stream(Team* team, const char* data, int64_t bytes, int times) {
    std::lock_guard<std::mutex> lock(team->entry());
    std::atomic<uint64_t> sum{0};
    const int chunks = static_cast<int>((bytes + CHUNK - 1) / CHUNK);
    for (int time = 0; time < times; ++time) {
        sum.store(0, std::memory_order_relaxed);
        team->run(chunks, 1, [&](int first, int last, int) {
            uint64_t found = 0;
            for (int64_t at = first * CHUNK; at < last * CHUNK; at += CHUNK)
                found ^= read(data + at, std::min(CHUNK, bytes - at));
            sum.fetch_xor(found);
        });
    }
    return sum;
}
