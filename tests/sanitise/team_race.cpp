// Drives the thread team from several lanes at once, for ThreadSanitizer: `scripts/sanitise thread`.
//
// It asks what the engine asks: callers that share a team take turns, lanes with a team of their own
// name another, lists of all lengths come in quick succession and after pauses in which the workers
// fall asleep, and scratch memory grows. Every answer is checked. PyTorch's own threads are not
// instrumented, so the program has no Python in it.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "team.h"

using outrider::Team;

extern "C" {
void* outrider_team(int num_threads, const int* pinned);
void outrider_lane_team(void* team);
uint64_t outrider_stream(Team* team, const char* data, int64_t bytes, int times);
void outrider_rms_norm(Team* team, const float* x, const float* weight, float eps, float* out,
                       int num_rows, int size);
void outrider_argmax(Team* team, const float* logits, int64_t* out, int num_rows, int64_t size);
}

namespace {

constexpr int NUM_TURNS = 400;

void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

// A list of `items`, each of which writes its own place, from scratch memory of its thread.
void list(Team& named, int items, int grain) {
    Team& team = named.here();
    std::lock_guard<std::mutex> lock(team.entry());
    int* shared = static_cast<int*>(team.shared().take(sizeof(int) * (items + 1)));
    team.run(items, grain, [&](int first, int last, int thread) {
        int* own = static_cast<int*>(team.own(thread).take(sizeof(int) * (last - first + 1)));
        for (int i = first; i < last; ++i) own[i - first] = 3 * i;
        std::memcpy(shared + first, own, sizeof(int) * (last - first));
    });
    for (int i = 0; i < items; ++i) check(shared[i] == 3 * i, "a list");
}

void kernels(Team* team, int num_rows) {
    const int size = 700;
    std::vector<float> x(num_rows * size), weight(size, 1.0f), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % size == i / size);
    outrider_rms_norm(team, x.data(), weight.data(), 1e-5f, out.data(), num_rows, size);
    std::vector<int64_t> best(num_rows);
    outrider_argmax(team, out.data(), best.data(), num_rows, size);
    for (int n = 0; n < num_rows; ++n) check(best[n] == n, "argmax");
}

void stream(Team* team, const std::vector<char>& data, uint64_t expected) {
    check(outrider_stream(team, data.data(), data.size(), 1) == expected, "a read of memory");
}

void lane(Team* shared, bool has_own, int seed, const std::vector<char>& data, uint64_t sum) {
    if (has_own) outrider_lane_team(outrider_team(2 + seed % 2, nullptr));
    for (int turn = 0; turn < NUM_TURNS; ++turn) {
        list(*shared, 1 + (turn * 37 + seed * 11) % 900, 1 + turn % 7);
        if (turn % 5 == 0) kernels(shared, 1 + turn % 40);
        if (turn % 50 == 0) stream(shared, data, sum);
        if (turn % 40 == seed % 40)
            std::this_thread::sleep_for(std::chrono::microseconds(100 + 300 * (turn % 3)));
    }
    outrider_lane_team(nullptr);
}

#ifdef PLANTED_RACE
// What ThreadSanitizer must find: items that add to one place.
void race(Team& team) {
    int sum = 0;
    for (int turn = 0; turn < 20; ++turn)
        team.run(16, 1, [&](int first, int last, int) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that all take part
            sum += last - first;
        });
    std::fprintf(stderr, "%d\n", sum);
}
#endif

}  // namespace

int main() {
    std::vector<char> data(3 << 20);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 2654435761u >> 13);
    auto* alone = static_cast<Team*>(outrider_team(1, nullptr));
    const uint64_t sum = outrider_stream(alone, data.data(), data.size(), 1);
    for (int num_threads : {2, 4}) {
        auto* shared = static_cast<Team*>(outrider_team(num_threads, nullptr));
#ifdef PLANTED_RACE
        race(*shared);
#endif
        std::vector<std::thread> lanes;
        for (int seed = 0; seed < 4; ++seed)
            lanes.emplace_back(lane, shared, seed % 2 == 0, seed, std::cref(data), sum);
        for (auto& one : lanes) one.join();
    }
    std::puts("the team is free of races");
    return 0;
}
