// A small team of threads that shares one list of work items at a time.
//
// Every thread owns a range of the items and helps the others when its own is done, so weights
// stay in the caches they were read into, and a worker that is asleep or was descheduled costs
// nothing but its help: the caller can always finish alone. Which thread takes an item never
// changes the item's arithmetic.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace outrider {

constexpr int MAX_THREADS = 256;

// Memory that grows and is kept: a call allocates only when it is larger than all before it.
class Scratch {
  public:
    void* take(size_t bytes);

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

// The size of as few ranges of at most `most` items as there can be, all of nearly equal size.
inline int even_grain(int items, int most) {
    const int ranges = std::max(1, (items + most - 1) / most);
    return std::max(1, (items + ranges - 1) / ranges);
}

class Team {
  public:
    Team(int num_threads, const int* pinned);

    // The team that serves the calling thread: this one, unless the thread works for a lane and was
    // given a team of its own, since lanes that shared one would take turns.
    Team& here() { return lane_team_ == nullptr ? *this : *lane_team_; }
    static void serve_here(Team* team) { lane_team_ = team; }

    int num_threads() const { return num_threads_; }
    // Held through a call: the team serves one caller at a time.
    std::mutex& entry() { return entry_; }
    Scratch& shared() { return shared_; }
    Scratch& own(int thread) { return threads_[thread].scratch; }

    // Calls body(first, last, thread) for ranges of at most `grain` items that cover [0, items).
    template <class Body>
    void run(int items, int grain, const Body& body) {
        if (num_threads_ == 1 || items <= grain) {
            body(0, items, 0);
            return;
        }
        share(items, grain, &body, [](const void* context, int first, int last, int thread) {
            (*static_cast<const Body*>(context))(first, last, thread);
        });
    }

  private:
    using Call = void (*)(const void* context, int first, int last, int thread);

    struct alignas(64) Thread {
        // generation << 32 | next chunk << 16 | end: one word, so that a late worker's claim on a
        // list that is already finished fails.
        std::atomic<uint64_t> range{0};
        Scratch scratch;
    };

    void share(int items, int grain, const void* context, Call call);
    void work(int self, uint32_t generation);
    bool claim(std::atomic<uint64_t>& range, uint32_t generation, int* chunk);
    void serve(int self);
    uint32_t await(uint32_t last);

    static thread_local Team* lane_team_;

    const int num_threads_;
    std::vector<Thread> threads_;
    std::mutex entry_;
    Scratch shared_;

    Call call_ = nullptr;
    const void* context_ = nullptr;
    int items_ = 0, grain_ = 1;
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    std::atomic<int> num_asleep_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace outrider
