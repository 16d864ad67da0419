// Reads memory as fast as it comes and does nothing with it: the ceiling of a pass that reads every
// weight once.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "team.h"

namespace outrider {

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

constexpr int64_t CHUNK = 1 << 18;
constexpr int LINES = 8, AHEAD = 4096;

uint64_t read(const char* from, int64_t bytes) {
    Line sums[LINES] = {};
    for (int64_t at = 0; at + LINES * 64 <= bytes; at += LINES * 64) {
        for (int i = 0; i < LINES; ++i) {
            __builtin_prefetch(from + at + i * 64 + AHEAD, 0, 2);
            Line line;
            std::memcpy(&line, from + at + i * 64, sizeof(line));
            sums[i] ^= line;
        }
    }
    for (int i = 1; i < LINES; ++i) sums[0] ^= sums[i];
    uint64_t sum = 0;
    for (int i = 0; i < 8; ++i) sum ^= sums[0][i];
    return sum;
}

}  // namespace

}  // namespace outrider

using namespace outrider;

// The exclusive or of all whole runs of 512 bytes, so that nothing can be left out.
extern "C" uint64_t outrider_stream(Team* team, const char* data, int64_t bytes) {
    std::lock_guard<std::mutex> lock(team->entry());
    std::atomic<uint64_t> sum{0};
    const int chunks = static_cast<int>((bytes + CHUNK - 1) / CHUNK);
    team->run(chunks, 1, [&](int first, int last, int) {
        uint64_t found = 0;
        for (int64_t at = first * CHUNK; at < last * CHUNK; at += CHUNK)
            found ^= read(data + at, std::min(CHUNK, bytes - at));
        sum.fetch_xor(found);
    });
    return sum;
}
