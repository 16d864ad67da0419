// Suffix lookup: what followed the text's longest suffix that occurred in any text. The definitions
// are drafters/common/suffix_automaton.py, of the automaton, and drafters/suffix.py, of all else.
#include <algorithm>
#include <memory>

#include "lookups.h"

namespace outrider {

namespace {

constexpr int32_t ROOT = 0, NONE = HashTable::NONE;
constexpr int NUM_LENGTHS = 5, NUM_SHARES = 4, NUM_KINDS = NUM_LENGTHS * NUM_SHARES;

// Mirrored by `SuffixSettings` in kernels/native/rounds.py.
struct SuffixSettings {
    double first_hits[NUM_KINDS], first_trials, fade, shared_fade, likeness, evenness, highest;
    double least_kept, least_in_tree;
    int64_t most_states;
    int32_t most_children, unused;
};

struct State {
    int32_t length, link, total = 0, newest = NONE, likeliest = NONE;
};

struct Edge {
    int32_t state, token, target, count, older;
};

class Automaton {
  public:
    Automaton() { add_state(0, NONE); }

    int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
    const State& state(int32_t number) const { return states_[number]; }
    const Edge& edge(int32_t number) const { return edges_[number]; }

    // The edge by which `token` leaves `state`; NONE if it never followed.
    int32_t find(int32_t state, int32_t token) const { return by_token_[place(state, token)]; }

    int32_t extend(int32_t last, int32_t token) {
        int32_t edge = find(last, token), state = last;
        if (edge != NONE) return take(last, edge);
        const int32_t added = add_state(states_[last].length + 1, ROOT);
        while (edge == NONE) {
            add_edge(state, token, added, 1);
            state = states_[state].link;
            if (state == NONE) return added;
            edge = find(state, token);
        }
        const int32_t link = take(state, edge);
        states_[added].link = link;
        return added;
    }

    void note(int32_t state, int32_t edge) {
        if (state == ROOT) return;
        State& from = states_[state];
        const int32_t count = ++edges_[edge].count;
        ++from.total;
        if (count >= edges_[from.likeliest].count) from.likeliest = edge;
    }

    // The state that says what followed the runs of `state`; ROOT if nothing did.
    int32_t foremost(int32_t state) const {
        while (state != ROOT && states_[state].likeliest == NONE) state = states_[state].link;
        return state;
    }

  private:
    static uint64_t hash(int32_t state, int32_t token) {
        return mixed(static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token));
    }

    size_t place(int32_t state, int32_t token) const {
        return by_token_.place(hash(state, token), [&](int32_t edge) {
            return edges_[edge].state == state && edges_[edge].token == token;
        });
    }

    int32_t take(int32_t state, int32_t edge) {
        note(state, edge);
        const int32_t target = edges_[edge].target, length = states_[state].length + 1;
        if (states_[target].length == length) return target;
        const int32_t token = edges_[edge].token;
        const int32_t split = add_state(length, states_[target].link);
        copy_edges(target, split);
        states_[target].link = split;
        while (edge != NONE && edges_[edge].target == target) {
            edges_[edge].target = split;
            state = states_[state].link;
            edge = state == NONE ? NONE : find(state, token);
        }
        return split;
    }

    int32_t add_state(int32_t length, int32_t link) {
        states_.push_back({length, link});
        return static_cast<int32_t>(states_.size()) - 1;
    }

    void add_edge(int32_t state, int32_t token, int32_t target, int32_t count) {
        const auto edge = static_cast<int32_t>(edges_.size());
        const size_t free = place(state, token);
        State& from = states_[state];
        edges_.push_back({state, token, target, count, from.newest});
        by_token_.add(free, edge, [&](int32_t e) { return hash(edges_[e].state, edges_[e].token); });
        from.newest = edge;
        from.total += count;
        if (from.likeliest == NONE || count >= edges_[from.likeliest].count) from.likeliest = edge;
    }

    void copy_edges(int32_t source, int32_t to) {
        copied_.clear();
        for (int32_t e = states_[source].newest; e != NONE; e = edges_[e].older)
            copied_.push_back(edges_[e]);
        for (auto edge = copied_.rbegin(); edge != copied_.rend(); ++edge)
            add_edge(to, edge->token, edge->target, edge->count);
    }

    std::vector<State> states_;
    std::vector<Edge> edges_, copied_;
    HashTable by_token_;
};

// Of a text beside an automaton that does not grow.
struct Cursor {
    int32_t state = ROOT, length = 0;

    void follow(Automaton& automaton, int32_t token) {
        int32_t edge = automaton.find(state, token);
        while (edge == NONE && state != ROOT) {
            state = automaton.state(state).link;
            length = automaton.state(state).length;
            edge = automaton.find(state, token);
        }
        if (edge == NONE) return;
        automaton.note(state, edge);
        state = automaton.edge(edge).target;
        ++length;
    }
};

int kind_of(int64_t length, int64_t count, int64_t total) {
    int size = 0;
    while (size < NUM_LENGTHS - 1 && length >> (size + 1) != 0) ++size;
    int share = 0;
    if (total != 1) share = 2 * count < total ? 1 : 5 * count < 4 * total ? 2 : 3;
    return size * NUM_SHARES + share;
}

// What a text's end says of its next token, by its longest run that anything followed: `token` did
// most often, and trials of that kind are told apart. Nothing without an automaton.
struct Match {
    const Automaton* automaton = nullptr;
    int32_t state = ROOT, length = 0, token = 0, kind = 0;
};

// A node that may be drafted next: P, when it was found, and the run that ends there.
struct Ahead {
    double probability;
    int32_t found, token, parent, depth;
    int32_t state, length;

    bool operator<(const Ahead& other) const {
        return probability != other.probability ? probability < other.probability
                                                : found > other.found;
    }
};

struct Reader {
    int64_t prompt_length, num_read = 0, generation;
    int32_t written = ROOT;  // the state of the whole text
    Cursor in_corpus, in_kept;
    Match match;
    RequestRates<NUM_KINDS> rates;
};

class Suffixes : public Lookup {
  public:
    explicit Suffixes(const SuffixSettings& settings) : s_(settings) { forget(); }

    // Reads a text of the corpus.
    void learn(const int32_t* tokens, int64_t count) {
        if (corpus_ == nullptr) corpus_ = std::make_unique<Automaton>();
        int32_t last = ROOT;
        for (int64_t i = 0; i < count; ++i) last = corpus_->extend(last, tokens[i]);
    }

    void forget() {
        kept_.reset();
        growing_ = std::make_unique<Automaton>();
        generation_ = 0;
        for (int kind = 0; kind < NUM_KINDS; ++kind)
            shared_[kind] = {s_.first_hits[kind], s_.first_trials};
    }

    int64_t num_states() const {
        int64_t sum = growing_->num_states();
        for (const auto* other : {corpus_.get(), kept_.get()})
            if (other != nullptr) sum += other->num_states();
        return sum;
    }

    void open(int64_t seq_id, int64_t prompt_length) override {
        Reader reader{};
        reader.prompt_length = prompt_length;
        reader.generation = generation_;
        readers_.insert_or_assign(seq_id, reader);
    }

    int offer(int64_t seq_id, int num_unread, LookupBudget budget, const LookupRoom& room) override {
        Reader& reader = readers_.at(seq_id);
        if (growing_->num_states() > s_.most_states) {
            kept_ = std::exchange(growing_, std::make_unique<Automaton>());
            ++generation_;
        }
        if (reader.generation != generation_) move(reader);
        for (int i = 0; i < num_unread; ++i) read(reader, room.unread[i]);
        if (reader.match.automaton == nullptr || budget.depth == 0) return 0;
        if (rate(reader, reader.match.kind) < s_.least_kept) return 0;
        return budget.size > budget.depth ? tree(reader, budget, room)
                                          : chain(reader, budget.depth, room);
    }

    void close(int64_t seq_id) override { readers_.erase(seq_id); }

  private:
    void read(Reader& reader, int32_t token) {
        // Every token of output is a trial of what was foreseen, drafted or not.
        if (reader.match.automaton != nullptr) learn(reader, reader.match.token == token);
        reader.written = growing_->extend(reader.written, token);
        if (corpus_ != nullptr) reader.in_corpus.follow(*corpus_, token);
        if (kept_ != nullptr) reader.in_kept.follow(*kept_, token);
        reader.match = ++reader.num_read >= reader.prompt_length ? found(reader) : Match{};
    }

    // Goes on in the newest generation; in the one before from where the text stands there.
    void move(Reader& reader) {
        const bool in_step = reader.generation + 1 == generation_;
        reader.in_kept = {};
        if (in_step) reader.in_kept = {reader.written, kept_->state(reader.written).length};
        reader.written = ROOT;
        reader.generation = generation_;
        reader.match = found(reader);
    }

    Match found(const Reader& reader) const {
        Match match;
        match.state = growing_->foremost(reader.written);
        if (match.state != ROOT) match.automaton = growing_.get();
        match.length = growing_->state(match.state).length;
        find_longer(corpus_.get(), reader.in_corpus, match);
        find_longer(kept_.get(), reader.in_kept, match);
        if (match.automaton == nullptr) return match;
        const State& state = match.automaton->state(match.state);
        const Edge& best = match.automaton->edge(state.likeliest);
        match.token = best.token;
        match.kind = kind_of(match.length, best.count, state.total);
        return match;
    }

    static void find_longer(const Automaton* automaton, const Cursor& cursor, Match& match) {
        if (automaton == nullptr) return;
        const int32_t state = automaton->foremost(cursor.state);
        const int32_t length =
            state == cursor.state ? cursor.length : automaton->state(state).length;
        if (length <= match.length) return;
        match.automaton = automaton;
        match.state = state;
        match.length = length;
    }

    double expected(int kind) const { return shared_[kind].hits / shared_[kind].trials; }

    double rate(const Reader& reader, int kind) const {
        return reader.rates.rate(kind, expected(kind), s_.likeness, s_.evenness, s_.highest);
    }

    void learn(Reader& reader, bool right) {
        const int kind = reader.match.kind;
        reader.rates.add(s_.fade, kind, right, expected(kind));
        shared_[kind].add(s_.shared_fade, right);
    }

    int chain(const Reader& reader, int depth, const LookupRoom& room) const {
        const Automaton& automaton = *reader.match.automaton;
        int32_t state = reader.match.state;
        double probability = 1;
        int count = 0;
        for (; count < depth; ++count) {
            state = automaton.foremost(state);
            if (state == ROOT) break;
            const Edge& best = automaton.edge(automaton.state(state).likeliest);
            const int64_t total = automaton.state(state).total;
            probability *= rate(reader, kind_of(reader.match.length + count, best.count, total));
            if (probability < s_.least_kept) break;
            room.tokens[count] = best.token;
            room.kept[count] = probability;
            state = best.target;
        }
        return count;
    }

    int tree(const Reader& reader, LookupBudget budget, const LookupRoom& room) {
        ahead_.clear();
        num_found_ = 0;
        Ahead node{1, 0, 0, 0, 0, reader.match.state, reader.match.length};
        int count = 0;
        while (true) {
            if (node.depth < budget.depth) look_ahead(reader, node, count - 1);
            if (ahead_.empty() || count == budget.size) break;
            std::pop_heap(ahead_.begin(), ahead_.end());
            node = ahead_.back();
            ahead_.pop_back();
            room.tokens[count] = node.token;
            room.parents[count] = node.parent;
            room.kept[count++] = node.probability;
        }
        return count > 0 && room.kept[0] >= s_.least_kept ? count : 0;
    }

    // What followed the run of `node`, whose place in the draft is `parent`, the likeliest first.
    void look_ahead(const Reader& reader, const Ahead& node, int32_t parent) {
        const Automaton& automaton = *reader.match.automaton;
        const int32_t number = automaton.foremost(node.state);
        if (number == ROOT) return;
        const State& state = automaton.state(number);
        const auto offer = [&](const Edge& edge, double share) {
            const double probability = node.probability * share;
            if (!(probability >= s_.least_in_tree)) return;
            ahead_.push_back({probability, num_found_++, edge.token, parent, node.depth + 1,
                              edge.target, node.length + 1});
            std::push_heap(ahead_.begin(), ahead_.end());
        };
        const Edge& best = automaton.edge(state.likeliest);
        const double first = rate(reader, kind_of(node.length, best.count, state.total));
        offer(best, first);
        if (best.count == state.total) return;
        const double rest = (1 - first) * first / (state.total - best.count + 1);
        int32_t other = state.newest;
        for (int i = 0; i < s_.most_children && other != NONE; ++i) {
            const Edge& edge = automaton.edge(other);
            if (other != state.likeliest) offer(edge, rest * edge.count);
            other = edge.older;
        }
    }

    const SuffixSettings s_;
    std::unique_ptr<Automaton> corpus_, kept_, growing_;
    FadingRate shared_[NUM_KINDS];
    int64_t generation_ = 0;
    std::unordered_map<int64_t, Reader> readers_;
    std::vector<Ahead> ahead_;  // a heap
    int32_t num_found_ = 0;
};

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

Lookup* outrider_suffix(const SuffixSettings* settings) { return new Suffixes(*settings); }

void outrider_suffix_learn(Lookup* lookup, const int32_t* tokens, int64_t count) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    static_cast<Suffixes*>(lookup)->learn(tokens, count);
}

void outrider_suffix_forget(Lookup* lookup) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    static_cast<Suffixes*>(lookup)->forget();
}

int64_t outrider_suffix_states(Lookup* lookup) {
    std::lock_guard<std::mutex> lock(lookup->entry);
    return static_cast<Suffixes*>(lookup)->num_states();
}
}
