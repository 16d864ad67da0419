#include "team.h"

#include <algorithm>
#include <chrono>
#include <thread>
#ifdef __linux__
#include <sched.h>
#endif

namespace outrider {

namespace {

using Clock = std::chrono::steady_clock;

// A worker expects the next call within microseconds (the next operator of the same pass). It
// burns its core for the first span, offers it to others during the second, then sleeps.
constexpr auto SPIN = std::chrono::microseconds(20);
constexpr auto YIELD = std::chrono::microseconds(200);
constexpr int MAX_CHUNKS = 0xffff;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The calling thread runs on this hardware thread only; what the system refuses changes nothing.
void pin(int hardware_thread) {
#ifdef __linux__
    if (hardware_thread < 0 || hardware_thread >= CPU_SETSIZE) return;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    CPU_SET(hardware_thread, &allowed);
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)hardware_thread;
#endif
}

}  // namespace

thread_local Team* Team::lane_team_ = nullptr;

void* Scratch::take(size_t bytes) {
    constexpr size_t ALIGN = 64;
    if (bytes + ALIGN > size_) {
        size_ = 2 * bytes + ALIGN;
        memory_.reset(new char[size_]);
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<void*>((address + ALIGN - 1) / ALIGN * ALIGN);
}

Team::Team(int num_threads, const int* pinned) : num_threads_(num_threads), threads_(num_threads) {
    for (int thread = 1; thread < num_threads; ++thread)
        std::thread([this, thread, place = pinned ? pinned[thread] : -1] {
            pin(place);
            serve(thread);
        }).detach();
}

void Team::share(int items, int grain, const void* context, Call call) {
    grain = std::max(grain, (items + MAX_CHUNKS - 1) / MAX_CHUNKS);
    const int num_chunks = (items + grain - 1) / grain;
    call_ = call, context_ = context, items_ = items, grain_ = grain;
    num_done_.store(0, std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    for (int thread = 0; thread < num_threads_; ++thread) {
        const uint64_t first = static_cast<int64_t>(num_chunks) * thread / num_threads_;
        const uint64_t end = static_cast<int64_t>(num_chunks) * (thread + 1) / num_threads_;
        threads_[thread].range.store(static_cast<uint64_t>(generation) << 32 | first << 16 | end,
                                     std::memory_order_release);
    }
    generation_.store(generation, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    work(0, generation);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_chunks; ++spins) {
        if (spins < 2000) pause();
        else std::this_thread::yield();
    }
}

void Team::work(int self, uint32_t generation) {
    for (int step = 0; step < num_threads_; ++step) {
        auto& range = threads_[(self + step) % num_threads_].range;
        int chunk, done = 0;
        for (; claim(range, generation, &chunk); ++done) {
            const int first = chunk * grain_;
            call_(context_, first, std::min(first + grain_, items_), self);
        }
        if (done > 0) num_done_.fetch_add(done, std::memory_order_release);
    }
}

// The list's fields may be read only after a successful claim: until then the list may be over.
bool Team::claim(std::atomic<uint64_t>& range, uint32_t generation, int* chunk) {
    uint64_t word = range.load(std::memory_order_acquire);
    while (word >> 32 == generation && (word >> 16 & 0xffff) < (word & 0xffff)) {
        if (range.compare_exchange_weak(word, word + 0x10000, std::memory_order_acq_rel)) {
            *chunk = static_cast<int>(word >> 16 & 0xffff);
            return true;
        }
    }
    return false;
}

void Team::serve(int self) {
    for (uint32_t generation = 0;;) {
        generation = await(generation);
        work(self, generation);
    }
}

uint32_t Team::await(uint32_t last) {
    const auto start = Clock::now();
    for (auto waited = Clock::duration::zero(); waited < YIELD; waited = Clock::now() - start) {
        for (int spins = 0; spins < 32; ++spins) {
            const uint32_t now = generation_.load(std::memory_order_acquire);
            if (now != last) return now;
            pause();
        }
        if (waited > SPIN) std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != last; });
    num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    return generation_.load(std::memory_order_acquire);
}

}  // namespace outrider

// `pinned` names a hardware thread for each thread of the team, or is null; the first is the
// caller's own, which is left where it is. Never freed: its threads may still run while the process
// ends.
extern "C" void* outrider_team(int num_threads, const int* pinned) {
    return new outrider::Team(std::min(std::max(num_threads, 1), outrider::MAX_THREADS), pinned);
}

// Calls of this thread are served by `team` from now on, whatever team they name; null ends that.
extern "C" void outrider_lane_team(void* team) {
    outrider::Team::serve_here(static_cast<outrider::Team*>(team));
}
