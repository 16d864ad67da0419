// Ranks on one machine (of one model; or an engine and its drafter): all-reduce and byte streams
// through memory that their processes share. No lock is in that memory, so a rank that dies leaves none
// held; all zeros is its first state.
//
// A rank that waits spins, then offers its core to others, then sleeps until it is woken (a futex on
// Linux), and sleeps sooner where others want its core. It stops waiting once somebody has said that the ranks are at an end.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace outrider {

constexpr int MAX_RANKS = 64;
// Numbers that are added up at once, and bytes that a stream holds.
constexpr int64_t SUM_SIZE = 1 << 16, STREAM_SIZE = 1 << 18;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share no other atomics");

struct alignas(64) Counter {
    std::atomic<uint64_t> value;
};

// `rings` changes when a rank of which threads are `asleep` is to look again.
struct alignas(64) Bell {
    std::atomic<uint32_t> rings, asleep;
};

// From one rank to one other. Both counts only grow.
struct Stream {
    Counter written, read;
    char bytes[STREAM_SIZE];
};

// The beginning of the shared memory; room for sums and streams follows.
struct Shared {
    alignas(64) std::atomic<uint32_t> ended;
    Counter arrived[MAX_RANKS];
    Bell bells[MAX_RANKS];
};

// One rank's end of the memory. A rank but 0 has one thread that calls; those of rank 0 take turns, but
// one may write a stream while another reads one.
class Ranks {
  public:
    // Gives up after waiting for `patience` seconds, if that is not 0.
    Ranks(void* memory, int rank, int size, double patience);

    static int64_t bytes(int size);

    int rank() const { return rank_; }
    int size() const { return size_; }
    bool leads() const { return rank_ == 0; }
    bool ended() const { return shared_->ended.load(std::memory_order_acquire) != 0; }
    std::recursive_mutex& turn() { return turn_; }
    void end();

    // Leaves the sum over all ranks in `x`, added up in the order of ranks: the same bits in every
    // rank, whatever else is summed along. After the end numbers are left as they are.
    void sum(float* x, int64_t count);
    // Of a stream, in pieces: how many bytes were put or taken, as soon as some can be; 0 if none can
    // within `patience` seconds (0: forever), -1 at the end. What was put before that is taken first.
    int64_t put(int to, const void* data, int64_t bytes, double patience);
    int64_t take(int from, void* data, int64_t bytes, double patience);
    // The same of all bytes. A wait longer than the rank's patience is the end.
    void write(int to, const void* data, int64_t bytes);
    void read(int from, void* data, int64_t bytes);
    // Brings every rank's columns of some rows to rank 0, in whose `rows` there is room for whole
    // ones; its own columns lie packed at the front.
    void gather(float* rows, int num_rows, int own_size, int whole_size);

  private:
    Stream& stream(int from, int to) const { return streams_[from * size_ + to]; }
    void wake(int rank);
    template <class Ready>
    bool await(const Ready& ready, double patience);

    Shared* const shared_;
    float* const sums_;  // [2][size][SUM_SIZE]
    Stream* const streams_;  // [size][size]
    const int rank_, size_;
    const double patience_;
    // Waits that are yet to be short, or to offer the core at once.
    std::atomic<int> sleepy_{0}, crowded_{0};
    std::recursive_mutex turn_;
};

}  // namespace outrider
