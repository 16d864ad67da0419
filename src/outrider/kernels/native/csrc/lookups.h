// What drafters that look up share: hash tables, rates that are learnt, and how they are called.
// estimate/acceptance.py and drafters/ have the definitions; P has the same bits as there.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace outrider {

// Numbers of things that are kept elsewhere, by their hashes: open addressing, half full at most.
class HashTable {
  public:
    static constexpr int32_t NONE = -1;

    // Where the number is for which `same` holds, or where it would be.
    template <class Same>
    size_t place(uint64_t hash, const Same& same) const {
        const size_t mask = numbers_.size() - 1;
        size_t at = hash >> 32 & mask;
        while (numbers_[at] != NONE && !same(numbers_[at])) at = (at + 1) & mask;
        return at;
    }

    int32_t operator[](size_t place) const { return numbers_[place]; }
    void change(size_t place, int32_t number) { numbers_[place] = number; }

    template <class HashOf>
    void add(size_t place, int32_t number, const HashOf& hash_of) {
        numbers_[place] = number;
        if (2 * ++count_ < numbers_.size()) return;
        const std::vector<int32_t> old =
            std::exchange(numbers_, std::vector<int32_t>(2 * numbers_.size(), NONE));
        for (const int32_t one : old)
            if (one != NONE) change(this->place(hash_of(one), [](int32_t) { return false; }), one);
    }

  private:
    size_t count_ = 0;
    std::vector<int32_t> numbers_ = std::vector<int32_t>(16, NONE);
};

inline uint64_t mixed(uint64_t hash) { return hash * 0x9E3779B97F4A7C15u; }

// Keeps the compiler from fusing a product into the addition that follows.
inline double rounded(double product) {
    asm volatile("" : "+m"(product));
    return product;
}

struct FadingRate {
    double hits = 0, trials = 0;

    void add(double fade, double hit, double trial = 1) {
        hits = rounded(fade * hits) + hit;
        trials = rounded(fade * trials) + trial;
    }
};

template <int KINDS>
struct RequestRates {
    FadingRate kinds[KINDS], all;

    void add(double fade, int kind, double hit, double expected) {
        all.add(fade, hit, expected);
        kinds[kind].add(fade, hit);
    }

    double rate(int kind, double expected, double weight, double evenness, double highest) const {
        double prior = (evenness + all.hits) / (evenness + all.trials) * expected;
        if (prior > highest) prior = highest;
        return (rounded(weight * prior) + kinds[kind].hits) / (weight + kinds[kind].trials);
    }
};

// Mirrored by `LookupRoom` in kernels/native/rounds.py: what is new in a text, and room for a draft,
// its parents where it is a tree, and P of each node.
struct LookupRoom {
    const int32_t* unread;
    int32_t *tokens, *parents;
    double* kept;
};

// A draft of more nodes than it may be deep may branch.
struct LookupBudget {
    int depth, size;
};

// A lane drafts while requests come and go on another thread: every call from outside holds `entry`.
class Lookup {
  public:
    std::mutex entry;

    virtual ~Lookup() = default;
    virtual void open(int64_t seq_id, int64_t prompt_length) = 0;
    // Reads on in a text and drafts; how many nodes.
    virtual int offer(int64_t seq_id, int num_unread, LookupBudget budget,
                      const LookupRoom& room) = 0;
    virtual void close(int64_t seq_id) = 0;
};

}  // namespace outrider
