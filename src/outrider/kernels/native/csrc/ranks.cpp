#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#endif

#include "pass.h"

using namespace outrider;

extern "C" int outrider_forward(const void* decoder, const Pass* pass, const int32_t* tokens,
                                const int32_t* wanted, int num_wanted, float* logits);

namespace outrider {

namespace {

using Clock = std::chrono::steady_clock;

// Between two sums of a pass lie microseconds, between two passes of a text a millisecond.
constexpr auto SPIN = std::chrono::microseconds(50);
constexpr auto YIELD = std::chrono::milliseconds(2);
// A core that was given to others for so long is wanted: so many waits then sleep after SPIN, since a
// thread that wakes up is served before those that never slept.
constexpr auto DISPLACED = std::chrono::microseconds(200);
constexpr int SLEEPY_WAITS = 256;
// What is there as soon as a core was offered was made on that core: so many waits then offer it at
// once.
constexpr int CROWDED_WAITS = 16;
#if defined(__linux__)
constexpr auto SLEEP = std::chrono::milliseconds(100);
#else
constexpr auto SLEEP = std::chrono::microseconds(200);
#endif

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `word` is no longer `value`, at most for `seconds`, less than one.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
#if defined(__linux__)
    timespec limit{0, static_cast<long>(1e9 * seconds)};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

Ranks::Ranks(void* memory, int rank, int size, double patience)
    : shared_(static_cast<Shared*>(memory)),
      sums_(reinterpret_cast<float*>(shared_ + 1)),
      streams_(reinterpret_cast<Stream*>(sums_ + 2 * size * SUM_SIZE)),
      rank_(rank),
      size_(size),
      patience_(patience) {}

int64_t Ranks::bytes(int size) {
    return sizeof(Shared) + sizeof(float) * 2 * size * SUM_SIZE +
           sizeof(Stream) * static_cast<int64_t>(size) * size;
}

void Ranks::wake(int rank) {
    Bell& bell = shared_->bells[rank];
    // Whoever sleeps said so before it looked; here it is the other way round.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (bell.asleep.load(std::memory_order_relaxed) == 0) return;
    bell.rings.fetch_add(1, std::memory_order_seq_cst);
    wake_all(bell.rings);
}

void Ranks::end() {
    shared_->ended.store(1, std::memory_order_seq_cst);
    for (int rank = 0; rank < size_; ++rank) wake(rank);
}

// False at the end, or after `patience` seconds if that is not 0. Sleeps are counted, since the time
// while a process is stopped is none of it.
template <class Ready>
bool Ranks::await(const Ready& ready, double patience) {
    if (ready()) return true;
    const auto start = Clock::now();
    const auto counts_down = [](std::atomic<int>& waits) {
        const int left = waits.load(std::memory_order_relaxed);
        if (left > 0) waits.store(left - 1, std::memory_order_relaxed);
        return left > 0;
    };
    const auto limit = counts_down(sleepy_) ? SPIN : YIELD;
    const bool is_crowded = counts_down(crowded_);
    for (auto before = start, now = start; now - start < limit; before = now) {
        for (int spins = 0; spins < 32; ++spins) {
            if (ready()) return true;
            pause();
        }
        if (ended()) return false;
        if (is_crowded || now - start > SPIN) {
            std::this_thread::yield();
            if (ready()) {
                crowded_.store(CROWDED_WAITS, std::memory_order_relaxed);
                return true;
            }
        }
        now = Clock::now();
        if (now - before > DISPLACED) {
            sleepy_.store(SLEEPY_WAITS, std::memory_order_relaxed);
            break;
        }
    }
    Bell& bell = shared_->bells[rank_];
    constexpr double longest = std::chrono::duration<double>(SLEEP).count();
    bool found = false;
    for (double waited = 0, nap; !found && !ended(); waited += nap) {
        if (patience > 0 && waited >= patience) break;
        nap = patience > 0 ? std::min(longest, patience - waited) : longest;
        const uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
        bell.asleep.fetch_add(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        found = ready();
        if (!found && !ended()) sleep_on(bell.rings, rings, nap);
        bell.asleep.fetch_sub(1, std::memory_order_seq_cst);
        found = found || ready();
    }
    return found;
}

// Sums take turns between two places: a rank that writes to one has seen that all others arrived at
// the sum in the other one, hence had read this one.
void Ranks::sum(float* x, int64_t count) {
    for (int64_t start = 0; start < count && !ended(); start += SUM_SIZE) {
        const int64_t size = std::min(count - start, SUM_SIZE);
        const uint64_t turn = shared_->arrived[rank_].value.load(std::memory_order_relaxed);
        float* place = sums_ + static_cast<int64_t>(turn & 1) * size_ * SUM_SIZE;
        std::memcpy(place + rank_ * SUM_SIZE, x + start, sizeof(float) * size);
        shared_->arrived[rank_].value.store(turn + 1, std::memory_order_release);
        for (int rank = 0; rank < size_; ++rank)
            if (rank != rank_) wake(rank);
        const auto all_arrived = [&] {
            for (int rank = 0; rank < size_; ++rank)
                if (shared_->arrived[rank].value.load(std::memory_order_acquire) <= turn)
                    return false;
            return true;
        };
        if (!await(all_arrived, patience_)) return end();
        float* total = x + start;
        std::memcpy(total, place, sizeof(float) * size);
        for (int rank = 1; rank < size_; ++rank) {
            const float* summand = place + rank * SUM_SIZE;
            for (int64_t i = 0; i < size; ++i) total[i] += summand[i];
        }
    }
}

int64_t Ranks::put(int to, const void* data, int64_t bytes, double patience) {
    Stream& stream = this->stream(rank_, to);
    const uint64_t written = stream.written.value.load(std::memory_order_relaxed);
    int64_t room = 0;
    const auto has_room = [&] {
        const uint64_t read = stream.read.value.load(std::memory_order_acquire);
        room = STREAM_SIZE - static_cast<int64_t>(written - read);
        return room > 0;
    };
    if (ended() || !await(has_room, patience)) return ended() ? -1 : 0;
    const int64_t at = written % STREAM_SIZE;
    const int64_t count = std::min({bytes, room, STREAM_SIZE - at});
    std::memcpy(stream.bytes + at, data, count);
    stream.written.value.store(written + count, std::memory_order_release);
    wake(to);
    return count;
}

int64_t Ranks::take(int from, void* data, int64_t bytes, double patience) {
    Stream& stream = this->stream(from, rank_);
    const uint64_t read = stream.read.value.load(std::memory_order_relaxed);
    int64_t there = 0;
    const auto has_some = [&] {
        there = static_cast<int64_t>(stream.written.value.load(std::memory_order_acquire) - read);
        return there > 0;
    };
    if (!await(has_some, patience)) return ended() ? -1 : 0;
    const int64_t at = read % STREAM_SIZE;
    const int64_t count = std::min({bytes, there, STREAM_SIZE - at});
    std::memcpy(data, stream.bytes + at, count);
    stream.read.value.store(read + count, std::memory_order_release);
    wake(from);
    return count;
}

void Ranks::write(int to, const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const int64_t count = put(to, from, bytes, patience_);
        if (count <= 0) return end();
        from += count, bytes -= count;
    }
}

void Ranks::read(int from, void* data, int64_t bytes) {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
        const int64_t count = take(from, to, bytes, patience_);
        if (count <= 0) return end();
        to += count, bytes -= count;
    }
}

void Ranks::gather(float* rows, int num_rows, int own_size, int whole_size) {
    const int64_t whole = whole_size;
    if (!leads()) return write(0, rows, sizeof(float) * num_rows * static_cast<int64_t>(own_size));
    // From the last row on, since a row moves to where a later one lay.
    for (int64_t m = num_rows - 1; m > 0; --m)
        std::memmove(rows + m * whole, rows + m * own_size, sizeof(float) * own_size);
    for (int rank = 1; rank < size_; ++rank) {
        const int64_t first = whole * rank / size_, end = whole * (rank + 1) / size_;
        for (int64_t m = 0; m < num_rows; ++m)
            read(rank, rows + m * whole + first, sizeof(float) * (end - first));
    }
}

namespace {

// What the stream from rank 0 holds: a message of numbers, or what `announce` writes.
enum Kind : int64_t { NUMBERS, PASS };

// Counts of int32 that follow, in this order; no extra keys are -1 offsets.
struct PassHead {
    int32_t num_tokens, num_wanted, num_rows, num_columns, num_offsets, num_extra;
};

void write_numbers(std::vector<int32_t>& to, const int32_t* numbers, int64_t count) {
    to.insert(to.end(), numbers, numbers + count);
}

}  // namespace

// Tells the other ranks of a pass, which they then run along.
void announce(Ranks& ranks, const Pass& pass, const int32_t* tokens, const int32_t* wanted,
              int num_wanted) {
    thread_local std::vector<int32_t> told;
    const int num = pass.num_tokens, size = pass.page_size;
    PassHead head{num, num_wanted, 0, 0, 0, 0};
    for (int n = 0; n < num; ++n) {
        head.num_rows = std::max(head.num_rows, pass.seq[n] + 1);
        head.num_columns = std::max(head.num_columns, (pass.visible[n] + size - 1) / size);
    }
    if (pass.extra_offsets != nullptr) {
        head.num_offsets = num + 1;
        head.num_extra = pass.extra_offsets[num];
    }
    told.clear();
    write_numbers(told, tokens, num);
    for (const int32_t* column : {pass.positions, pass.slots, pass.seq, pass.visible})
        write_numbers(told, column, num);
    write_numbers(told, wanted, num_wanted);
    for (int row = 0; row < head.num_rows; ++row)
        write_numbers(told, pass.pages + static_cast<int64_t>(row) * pass.num_page_columns,
                      head.num_columns);
    if (head.num_offsets > 0) {
        write_numbers(told, pass.extra_offsets, head.num_offsets);
        write_numbers(told, pass.extra_slots, head.num_extra);
    }
    const int64_t kind = PASS;
    for (int rank = 1; rank < ranks.size(); ++rank) {
        ranks.write(rank, &kind, sizeof(kind));
        ranks.write(rank, &head, sizeof(head));
        ranks.write(rank, told.data(), sizeof(int32_t) * told.size());
    }
}

namespace {

// Runs a pass that was announced, over this rank's share. `blank` has the shape of its passes.
void follow(Ranks& ranks, const void* decoder, const Pass& blank, float* logits) {
    thread_local std::vector<int32_t> told;
    PassHead head{};
    ranks.read(0, &head, sizeof(head));
    if (ranks.ended()) return;
    const int64_t num = head.num_tokens, num_pages = static_cast<int64_t>(head.num_rows) * head.num_columns;
    told.resize(5 * num + head.num_wanted + num_pages + head.num_offsets + head.num_extra);
    ranks.read(0, told.data(), sizeof(int32_t) * told.size());
    if (ranks.ended()) return;
    const int32_t* tokens = told.data();
    Pass pass = blank;
    pass.num_tokens = head.num_tokens, pass.num_page_columns = head.num_columns;
    pass.positions = tokens + num, pass.slots = tokens + 2 * num;
    pass.seq = tokens + 3 * num, pass.visible = tokens + 4 * num;
    const int32_t* wanted = tokens + 5 * num;
    pass.pages = wanted + head.num_wanted;
    if (head.num_offsets > 0) {
        pass.extra_offsets = pass.pages + num_pages;
        pass.extra_slots = pass.extra_offsets + head.num_offsets;
    }
    outrider_forward(decoder, &pass, tokens, wanted, head.num_wanted, logits);
}

}  // namespace

}  // namespace outrider

// Never freed: a thread may still wait while the process ends.
extern "C" void* outrider_ranks(void* memory, int rank, int size, double patience) {
    return new Ranks(memory, rank, size, patience);
}

extern "C" int64_t outrider_ranks_bytes(int size) { return size > MAX_RANKS ? -1 : Ranks::bytes(size); }

extern "C" void outrider_ranks_end(Ranks* ranks) { ranks->end(); }

// Of these, whether the ranks are still together.
extern "C" int outrider_ranks_sum(Ranks* ranks, float* x, int64_t count) {
    ranks->sum(x, count);
    return !ranks->ended();
}

extern "C" int outrider_ranks_send(Ranks* ranks, int to, const void* data, int64_t bytes) {
    ranks->write(to, data, bytes);
    return !ranks->ended();
}

extern "C" int outrider_ranks_receive(Ranks* ranks, int from, void* data, int64_t bytes) {
    ranks->read(from, data, bytes);
    return !ranks->ended();
}

// Some of the bytes, as soon as there is room for or are any: how many, 0 after `patience` seconds,
// -1 at the end.
extern "C" int64_t outrider_ranks_put(Ranks* ranks, int to, const void* data, int64_t bytes,
                                      double patience) {
    return ranks->put(to, data, bytes, patience);
}

extern "C" int64_t outrider_ranks_take(Ranks* ranks, int from, void* data, int64_t bytes,
                                       double patience) {
    return ranks->take(from, data, bytes, patience);
}

extern "C" void outrider_ranks_turn(Ranks* ranks, int begins) {
    begins ? ranks->turn().lock() : ranks->turn().unlock();
}

// Sends a message of numbers to all other ranks.
extern "C" int outrider_ranks_tell(Ranks* ranks, const int64_t* numbers, int64_t count) {
    std::lock_guard<std::recursive_mutex> turn(ranks->turn());
    const int64_t head[] = {NUMBERS, count};
    for (int rank = 1; rank < ranks->size(); ++rank) {
        ranks->write(rank, head, sizeof(head));
        ranks->write(rank, numbers, sizeof(int64_t) * count);
    }
    return !ranks->ended();
}

// Runs all passes that rank 0 announces until it sends a message: how many numbers are to be
// received then, or -1 at the end.
extern "C" int64_t outrider_ranks_follow(Ranks* ranks, const void* decoder, const Pass* blank,
                                         float* logits) {
    for (;;) {
        int64_t kind = NUMBERS, count = -1;
        ranks->read(0, &kind, sizeof(kind));
        if (ranks->ended()) return -1;
        if (kind == PASS) {
            follow(*ranks, decoder, *blank, logits);
            continue;
        }
        ranks->read(0, &count, sizeof(count));
        return ranks->ended() ? -1 : count;
    }
}
