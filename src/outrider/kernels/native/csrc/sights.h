// Passes in which tokens branch off: what each of them sees of its sequence.
#pragma once

#include <vector>

#include "round.h"

namespace outrider {

// What a token sees of its sequence, itself included: the first `visible` places, then these slots.
struct Sight {
    int32_t visible = 0;
    std::vector<int32_t> extra;

    int32_t num_keys() const { return visible + static_cast<int32_t>(extra.size()); }

    // What a child sees that is staged at `place` of the sequence, in `slot`.
    Sight followed_by(int32_t place, int32_t slot) const {
        Sight child = *this;
        if (place == visible) ++child.visible;
        else child.extra.push_back(slot);
        return child;
    }
};

// The next pass of a memory. Where all tokens lie on chains it is one of chains.
class SightedPass {
  public:
    explicit SightedPass(Memory& memory) : memory_(memory) { clear(); }

    // The memory is not to point to vectors that are gone.
    ~SightedPass() { memory_.pass.extra_offsets = memory_.pass.extra_slots = nullptr; }

    void clear() {
        memory_.clear();
        memory_.pass.extra_offsets = memory_.pass.extra_slots = nullptr;
        offsets_.assign(1, 0);
        extra_.clear();
    }

    // Packs a token at `place` of sequence `b`, behind one that sees `above`; what it sees itself.
    Sight pack(int b, int32_t token, int32_t place, const Sight& above, bool wants) {
        const int n = memory_.pass.num_tokens;
        memory_.pack(b, token, place, wants);
        Sight own = above.followed_by(place, memory_.slots[n]);
        memory_.positions[n] = own.num_keys() - 1;
        memory_.visible[n] = own.visible;
        extra_.insert(extra_.end(), own.extra.begin(), own.extra.end());
        offsets_.push_back(static_cast<int32_t>(extra_.size()));
        return own;
    }

    bool run() {
        if (!extra_.empty()) {
            memory_.pass.extra_offsets = offsets_.data();
            memory_.pass.extra_slots = extra_.data();
        }
        return memory_.run();
    }

  private:
    Memory& memory_;
    std::vector<int32_t> offsets_, extra_;
};

}  // namespace outrider
