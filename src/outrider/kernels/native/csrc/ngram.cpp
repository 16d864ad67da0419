// Prompt lookup: where the text ended as it ends now, and what followed (drafters/ngram.py).
#include <algorithm>
#include <limits>

#include "lookups.h"

namespace outrider {

namespace {

constexpr int NUM_KINDS = 6, NUM_LENGTHS = 16, NOWHERE = -1;

// Mirrored by `NgramSettings` in kernels/native/rounds.py.
struct NgramSettings {
    double first[NUM_KINDS], weight, evenness, fade, highest, least_begun, least_gone_on;
    int32_t kinds[NUM_LENGTHS], max_n, min_n;
};

// Of `n` tokens that end before this place of the text.
struct Run {
    int32_t end, n;
};

// For every run of min_n to max_n tokens of a text, the place after its latest one.
class Index {
  public:
    Index(const NgramSettings& settings, int64_t prompt_length)
        : s_(&settings), prompt_length_(prompt_length) {}

    void read(int32_t token) {
        bool followed = false;
        if (length_ > 0) {
            followed = text_[place_] == token;
            const int kind = kind_of(length_);
            if (static_cast<int64_t>(text_.size()) >= prompt_length_)
                rates_.add(s_->fade, kind, followed, s_->first[kind]);
        }
        text_.push_back(token);
        find(followed);
    }

    int draft(int depth, const LookupRoom& room) const {
        if (length_ == 0) return 0;
        double probability = rate(length_);
        if (probability < s_->least_begun) return 0;
        const auto size = static_cast<int>(text_.size());
        int count = 0;
        for (; probability >= s_->least_gone_on && count < depth; ++count) {
            const int from = place_ + count;
            room.tokens[count] = from < size ? text_[from] : room.tokens[from - size];
            room.kept[count] = probability;
            probability *= rate(length_ + count + 1);
        }
        return count;
    }

  private:
    void find(bool followed) {
        const auto end = static_cast<int32_t>(text_.size());
        int32_t found = NOWHERE, length = 0;
        for (int n = s_->max_n; n >= s_->min_n; --n) {
            if (n > end) continue;
            const int32_t before = note({end, n});
            if (found != NOWHERE || before == NOWHERE) continue;
            found = before;
            length = n;
        }
        const bool goes_on = followed && found != NOWHERE && found == place_ + 1;
        length_ = goes_on ? std::max(length_ + 1, length) : length;
        place_ = found;
    }

    // Notes the run as the latest of its tokens; where it ended before.
    int32_t note(Run run) {
        const int32_t* own = start(run);
        const size_t place = runs_.place(hash(run), [&](int32_t number) {
            const Run other = run_of(number);
            return other.n == run.n && std::equal(own, own + run.n, start(other));
        });
        const int32_t before = runs_[place], number = run.end * num_sizes() + s_->max_n - run.n;
        if (before == HashTable::NONE) {
            runs_.add(place, number, [&](int32_t one) { return hash(run_of(one)); });
            return NOWHERE;
        }
        runs_.change(place, number);
        return run_of(before).end;
    }

    int32_t num_sizes() const { return s_->max_n - s_->min_n + 1; }
    Run run_of(int32_t number) const {
        return {number / num_sizes(), s_->max_n - number % num_sizes()};
    }
    const int32_t* start(Run run) const { return text_.data() + run.end - run.n; }

    uint64_t hash(Run run) const {
        uint64_t hash = 0;
        for (const int32_t* at = start(run); at < text_.data() + run.end; ++at)
            hash = mixed(hash ^ static_cast<uint32_t>(*at));
        return hash;
    }

    int kind_of(int length) const { return length < NUM_LENGTHS ? s_->kinds[length] : NUM_KINDS - 1; }

    double rate(int length) const {
        const int kind = kind_of(length);
        constexpr double NO_BOUND = std::numeric_limits<double>::infinity();
        const double rate = rates_.rate(kind, s_->first[kind], s_->weight, s_->evenness, NO_BOUND);
        return std::min(rate, s_->highest);
    }

    const NgramSettings* s_;
    int64_t prompt_length_;
    std::vector<int32_t> text_;
    HashTable runs_;
    RequestRates<NUM_KINDS> rates_;
    int32_t place_ = NOWHERE, length_ = 0;
};

class Ngrams : public Lookup {
  public:
    explicit Ngrams(const NgramSettings& settings) : settings_(settings) {}

    void open(int64_t seq_id, int64_t prompt_length) override {
        indexes_.insert_or_assign(seq_id, Index(settings_, prompt_length));
    }

    int offer(int64_t seq_id, int num_unread, LookupBudget budget, const LookupRoom& room) override {
        Index& index = indexes_.at(seq_id);
        for (int i = 0; i < num_unread; ++i) index.read(room.unread[i]);
        return index.draft(budget.depth, room);
    }

    void close(int64_t seq_id) override { indexes_.erase(seq_id); }

  private:
    const NgramSettings settings_;
    std::unordered_map<int64_t, Index> indexes_;
};

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

Lookup* outrider_ngram(const NgramSettings* settings) { return new Ngrams(*settings); }

void outrider_lookup_open(Lookup* lookup, int64_t seq_id, int64_t prompt_length) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    lookup->open(seq_id, prompt_length);
}

int outrider_lookup_offer(Lookup* lookup, int64_t seq_id, int num_unread, int depth, int size,
                          const LookupRoom* room) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    return lookup->offer(seq_id, num_unread, {depth, size}, *room);
}

void outrider_lookup_close(Lookup* lookup, int64_t seq_id) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    lookup->close(seq_id);
}

void outrider_lookup_free(Lookup* lookup) { delete lookup; }
}
