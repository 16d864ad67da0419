// The recurrence of one layer, token by token: kernels/reference/delta.py defines it.
//
// Key heads are independent of each other, with their value heads and their channels of the
// convolution, so each is one work item, or several if there are few of them; within one, columns of a state are independent, so a block
// of them stays in the first cache for all tokens up to the next that leaves its state in a cell. A
// replayed token goes through the same functions as one that is read, so its bits are the same
// whatever the compiler fuses.
#include <algorithm>
#include <cmath>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "delta.h"
#include "unrolled.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr int VECS = 2, COLUMNS = VECS * LANES;
constexpr float NORM_EPS = 1e-6f;

struct Run {
    int first, stop, source, fold, replay_first, replay_stop;
    int count() const { return stop - first; }
    int num_replayed() const { return replay_stop - replay_first; }
};

int round_up(int size) { return (size + LANES - 1) / LANES * LANES; }

// What a token does to a column block of S [K, COLUMNS], a row at a time: plus key change^T, then
// read by `query` into `out`; and the first half of what the next one does: scaled by `decay`, then
// read by `next` into `seen`. Each half can be left out, and does not depend on the other. Sums of
// alternate rows (`WAYS`) hide how long one sum takes; sums of rows from the `first` on go on from
// those of the rows before.
struct Step {
    const float *key, *query;
    const Vec* change;
    Vec* out;
    const float* next;
    float decay;
    Vec* seen;
};

template <int WAYS, bool CHANGES, bool GOES_ON>
__attribute__((noinline)) void advance(float* __restrict block, int first, int stop,
                                       const Step& step) {
    const float *__restrict key = step.key, *__restrict query = step.query,
                *__restrict next = step.next;
    const Vec decay = splat(step.decay);
    Vec change[VECS], found[WAYS * VECS] = {}, seen[WAYS * VECS] = {};
    unrolled<VECS>([&](auto v) {
        if constexpr (CHANGES) change[v] = step.change[v];
        if (CHANGES && first) found[v] = step.out[v];
        if (GOES_ON && first) seen[v] = step.seen[v];
    });
    for (int i = first; i < stop; i += WAYS)
        unrolled<WAYS * VECS>([&](auto part) {
            constexpr int way = part / VECS, v = part % VECS;
            float* at = block + (i + way) * COLUMNS + v * LANES;
            Vec x = load(at);
            if constexpr (CHANGES) {
                x = fused(change[v], splat(key[i + way]), x);
                found[part] = fused(x, splat(query[i + way]), found[part]);
            }
            if constexpr (GOES_ON) {
                x = x * decay;
                seen[part] = fused(x, splat(next[i + way]), seen[part]);
            }
            store(at, x);
        });
    unrolled<VECS>([&](auto v) {
        unrolled<WAYS - 1>([&](auto way) {
            found[v] += found[(way + 1) * VECS + v];
            seen[v] += seen[(way + 1) * VECS + v];
        });
        if constexpr (CHANGES) step.out[v] = found[v];
        if constexpr (GOES_ON) step.seen[v] = seen[v];
    });
}

// A single row that is left goes by itself: within the loop's function it would cost registers.
template <bool CHANGES, bool GOES_ON>
void advance(float* block, int key_dim, const Step& step) {
    const int even = key_dim / 2 * 2;
    advance<2, CHANGES, GOES_ON>(block, 0, even, step);
    if (even < key_dim) advance<1, CHANGES, GOES_ON>(block, even, key_dim, step);
}

// Past the caches, so that what is overwritten need not be read first. States of a large model are
// not found in a cache when they are asked for again, because its weights came in between.
constexpr int64_t STREAMED_BYTES = 1 << 19;

bool can_stream(const float* to, int row_size) {
    return reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0 && row_size % COLUMNS == 0;
}

inline void stream(float* to, Vec vec) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, cast<__m512>(vec));
#elif defined(__AVX__)
    _mm256_stream_ps(to, cast<__m256>(vec));
#else
    store(to, vec);
#endif
}

// Before other threads may read what was streamed.
inline void end_streams() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

void unit(float* x, int size, float scale) {
    Vec sums = {};
    for (int i = 0; i < size; i += LANES) {
        const Vec part = load_some(x + i, size - i);
        sums += part * part;
    }
    const float length = std::sqrt(sum_of_lanes(sums) + NORM_EPS) * scale;
    for (int i = 0; i < size; i += LANES)
        store_some(x + i, load_some(x + i, size - i) / length, size - i);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The rows that a convolution reads in a run: those before it, null where there were none yet.
void find_lines(const DeltaPass& pass, const DeltaLayer& layer, const Run& run, int index,
                const float* rows, int row_size, const float** lines) {
    const int window = layer.taps - 1, recent = std::min(run.num_replayed(), window);
    const int64_t channels = layer.channels;
    for (int r = 0; r < window - recent; ++r)
        lines[r] = run.source < 0 ? nullptr
                                  : reinterpret_cast<float*>(pass.state_cells[2 * run.source])
                                        + (index * window + r + recent) * channels;
    for (int r = 0; r < recent; ++r) {
        const int cell = pass.replayed[run.replay_stop - recent + r];
        lines[window - recent + r] =
            reinterpret_cast<float*>(pass.input_cells[4 * cell]) + index * channels;
    }
    for (int t = 0; t < run.count(); ++t)
        lines[window + t] = rows + static_cast<int64_t>(run.first + t) * row_size;
}

// The convolution of one vector of channels from `at` on, from the line of its first tap.
Vec convolved(const DeltaLayer& layer, const float* const* lines, int at, int left) {
    Vec sum = {};
    if (layer.conv_bias != nullptr) sum = load_some(layer.conv_bias + at, left);
    for (int tap = 0; tap < layer.taps; ++tap) {
        if (lines[tap] == nullptr) continue;
        const float* weight = layer.conv + static_cast<int64_t>(tap) * layer.channels + at;
        sum += load_some(lines[tap] + at, left) * load_some(weight, left);
    }
    return sum;
}

// Part of the value heads of one key head of one layer, through all runs of a pass.
class Head {
  public:
    Head(const DeltaPass& pass, const DeltaLayer& layer, const float* rows, int row_size, int gates,
         int index, float* out, int head, int first, int stop, Scratch& scratch)
        : pass_(pass), layer_(layer), rows_(rows), row_size_(row_size), gates_(gates),
          index_(index), out_(out), head_(head), first_(first), scratch_(scratch),
          shared_(stop - first), window_(layer.taps - 1),
          key_size_(round_up(layer.key_dim)), value_size_(round_up(shared_ * layer.value_dim)) {}

    void go(const Run& run) {
        const int count = run.count();
        // Whole vectors each, so that a state's rows do not cross cache lines.
        const size_t gates = round_up(count * shared_);
        const size_t pointers = sizeof(const float*) * round_up(window_ + count);
        const size_t floats = static_cast<size_t>(count) * (2 * key_size_ + value_size_) + 2 * gates
                            + static_cast<size_t>(layer_.key_dim) * value_blocks() * COLUMNS;
        char* memory = static_cast<char*>(scratch_.take(pointers + sizeof(float) * floats + 64));
        lines_ = reinterpret_cast<const float**>(memory);
        query_ = reinterpret_cast<float*>(memory + pointers);
        key_ = query_ + static_cast<size_t>(count) * key_size_;
        value_ = key_ + static_cast<size_t>(count) * key_size_;
        rate_ = value_ + static_cast<size_t>(count) * value_size_;
        decay_ = rate_ + gates;
        state_ = decay_ + gates;
        find_lines(pass_, layer_, run, index_, rows_, row_size_, lines_);
        if (run.fold >= 0) keep_window(run.fold, 0);
        for (int t = 0; t < count; ++t) prepare(run, t);
        for (int h = 0; h < shared_; ++h) recur(run, h);
    }

  private:
    void prepare(const Run& run, int t) {
        const int n = run.first + t, key_dim = layer_.key_dim, h0 = first_;
        float *query = query_ + t * key_size_, *key = key_ + t * key_size_;
        convolve(t, query_at(), key_dim, query);
        convolve(t, key_at(), key_dim, key);
        convolve(t, value_at(), shared_ * layer_.value_dim, value_ + t * value_size_);
        if (!layer_.scans()) {
            unit(query, key_dim, std::sqrt(static_cast<float>(key_dim)));
            unit(key, key_dim, 1.0f);
        }
        const float* gates = lines_[window_ + t] + gates_;
        const int steps = layer_.scans() ? 0 : layer_.heads;
        for (int h = 0; h < shared_; ++h) {
            const float step = softplus(gates[steps + h0 + h] + layer_.dt_bias[h0 + h]);
            rate_[t * shared_ + h] = layer_.scans() ? step : sigmoid(gates[h0 + h]);
            decay_[t * shared_ + h] = std::exp(-layer_.rate[h0 + h] * step);
        }
        if (pass_.states[n] >= 0) keep_window(pass_.states[n], t + 1);
        if (pass_.inputs[n] < 0) return;
        float* line = input(pass_.inputs[n], 0) + index_ * channels();
        copy_channels(lines_[window_ + t], line);
        const int64_t keys = static_cast<int64_t>(index_) * layer_.key_heads + head_;
        if (owns_keys()) std::copy(key, key + key_dim, input(pass_.inputs[n], 1) + keys * key_dim);
        float* decays = input(pass_.inputs[n], 3) + static_cast<int64_t>(index_) * layer_.heads;
        std::copy(decay_ + t * shared_, decay_ + (t + 1) * shared_, decays + h0);
    }

    // silu of the convolution at `size` channels from `at` on, for token t of the run.
    void convolve(int t, int at, int size, float* to) {
        for (int c = 0; c < size; c += LANES) {
            const Vec sum = convolved(layer_, lines_ + t, at + c, size - c);
            store_some(to + c, sum / (exp(-sum) + 1.0f), size - c);
        }
    }

    // What one token of a run brings to a value head, replayed ones first.
    struct Token {
        const float *key, *query;
        float decay;
    };

    Token token(const Run& run, int h, int j) const {
        const int t = j - run.num_replayed();
        if (t >= 0)
            return {key_ + t * key_size_, query_ + t * key_size_, decay_[t * shared_ + h]};
        const int cell = pass_.replayed[run.replay_first + j];
        const int64_t keys = static_cast<int64_t>(index_) * layer_.key_heads + head_;
        const float* key = input(cell, 1) + keys * layer_.key_dim;
        return {key, key, input(cell, 3)[number(h)]};
    }

    // Value head h through a run, from one token after which the state is kept to the next.
    void recur(const Run& run, int h) {
        const int replays = run.num_replayed(), stop = replays + run.count();
        fetch(run.source, h);
        if (run.fold >= 0 && replays == 0) keep_state(run.fold, h);
        for (int start = 0; start < stop;) {
            int end = start + 1;
            while (end < stop && kept_after(run, end - 1) < 0) ++end;
            for (int block = 0; block < value_blocks(); ++block) recur(run, h, block, start, end);
            const int kept = kept_after(run, end - 1);
            if (kept >= 0) keep_state(kept, h);
            start = end;
        }
    }

    // A block of columns through tokens `start` to `end`.
    void recur(const Run& run, int h, int block, int start, int end) {
        const int key_dim = layer_.key_dim, column = block * COLUMNS;
        const int width = std::min(COLUMNS, layer_.value_dim - column);
        float* rows = state_ + static_cast<size_t>(block) * key_dim * COLUMNS;
        Vec seen[VECS], change[VECS], out[VECS];
        Token now = token(run, h, start);
        advance<false, true>(rows, key_dim,
                             {nullptr, nullptr, nullptr, nullptr, now.key, now.decay, seen});
        for (int j = start; j < end; ++j) {
            change_of(run, h, j, column, width, seen, change);
            const bool goes_on = j + 1 < end;
            const Token next = token(run, h, goes_on ? j + 1 : j);
            const Step step = {now.key, now.query, change, out, next.key, next.decay, seen};
            if (goes_on) advance<true, true>(rows, key_dim, step);
            else advance<true, false>(rows, key_dim, step);
            now = next;
            const int n = run.first + j - run.num_replayed();
            if (n < run.first) continue;
            if (layer_.scans()) skip(h, n - run.first, column, width, out);
            const int64_t row = static_cast<int64_t>(n) * layer_.heads + first_ + h;
            give(out, width, out_ + row * layer_.value_dim + column);
            if (pass_.inputs[n] < 0) continue;
            give(change, width, input(pass_.inputs[n], 2) + number(h) * layer_.value_dim + column);
        }
    }

    // The cell that the state goes to after token j of a run, or -1.
    int kept_after(const Run& run, int j) const {
        const int t = j - run.num_replayed();
        return t >= 0 ? pass_.states[run.first + t] : t == -1 ? run.fold : -1;
    }

    void change_of(const Run& run, int h, int j, int column, int width, const Vec* seen,
                   Vec* change) const {
        const int t = j - run.num_replayed();
        if (t < 0) {
            const float* changes = input(pass_.replayed[run.replay_first + j], 2);
            return take(changes + number(h) * layer_.value_dim + column, width, change);
        }
        take(value_ + t * value_size_ + h * layer_.value_dim + column, width, change);
        const float rate = rate_[t * shared_ + h];
        for (int v = 0; v < VECS; ++v)
            change[v] = (layer_.scans() ? change[v] : change[v] - seen[v]) * rate;
    }

    // Add to the output of value head h what goes past the state.
    void skip(int h, int t, int column, int width, Vec* out) const {
        Vec value[VECS];
        take(value_ + t * value_size_ + h * layer_.value_dim + column, width, value);
        for (int v = 0; v < VECS; ++v) out[v] += value[v] * layer_.skip[first_ + h];
    }

    // The whole matrix of value head h, in the order in which it lies in memory, which is what
    // memory does fast; here, block by block.
    void fetch(int cell, int h) {
        const int key_dim = layer_.key_dim;
        if (cell < 0) {
            std::fill(state_, state_ + static_cast<size_t>(key_dim) * value_blocks() * COLUMNS, 0.0f);
            return;
        }
        for (int i = 0; i < key_dim; ++i)
            for (int block = 0; block < value_blocks(); ++block) {
                const int column = block * COLUMNS;
                Vec part[VECS];
                take(state(cell, h, i) + column, layer_.value_dim - column, part);
                float* row = state_ + (static_cast<size_t>(block) * key_dim + i) * COLUMNS;
                for (int v = 0; v < VECS; ++v) store(row + v * LANES, part[v]);
            }
    }

    void keep_state(int cell, int h) {
        const int key_dim = layer_.key_dim, value_dim = layer_.value_dim;
        const bool streams = can_stream(state(cell, h, 0), value_dim)
                          && int64_t{4} * layer_.heads * key_dim * value_dim >= STREAMED_BYTES;
        for (int i = 0; i < key_dim; ++i)
            for (int block = 0; block < value_blocks(); ++block) {
                const int column = block * COLUMNS;
                const float* row = state_ + (static_cast<size_t>(block) * key_dim + i) * COLUMNS;
                float* to = state(cell, h, i) + column;
                Vec part[VECS];
                take(row, COLUMNS, part);
                if (streams)
                    for (int v = 0; v < VECS; ++v) stream(to + v * LANES, part[v]);
                else give(part, std::min(COLUMNS, value_dim - column), to);
            }
    }

    // What the convolution remembers before token t of the run.
    void keep_window(int cell, int t) {
        for (int r = 0; r < window_; ++r)
            copy_channels(lines_[t + r], window(cell) + r * channels());
    }

    // This head's channels of one row; a row that never was is zeros.
    void copy_channels(const float* from, float* to) {
        const int sizes[3] = {layer_.key_dim, layer_.key_dim, shared_ * layer_.value_dim};
        const int places[3] = {query_at(), key_at(), value_at()};
        for (int part = owns_keys() ? 0 : 2; part < 3; ++part) {
            float* there = to + places[part];
            if (from == nullptr) std::fill(there, there + sizes[part], 0.0f);
            else std::copy(from + places[part], from + places[part] + sizes[part], there);
        }
    }

    static void take(const float* from, int width, Vec* to) {
        for (int v = 0; v < VECS; ++v) {
            const int left = width - v * LANES;
            to[v] = left > 0 ? load_some(from + v * LANES, left) : Vec{};
        }
    }

    static void give(const Vec* from, int width, float* to) {
        for (int v = 0; v < VECS; ++v)
            if (width > v * LANES) store_some(to + v * LANES, from[v], width - v * LANES);
    }

    int64_t channels() const { return layer_.channels; }
    // Of value head h among those of all layers.
    int64_t number(int h) const {
        return static_cast<int64_t>(index_) * layer_.heads + first_ + h;
    }
    // Of the parts of a key head, the first writes its keys to cells.
    bool owns_keys() const { return first_ == head_ * (layer_.heads / layer_.key_heads); }
    int query_at() const { return layer_.query_at() + head_ * layer_.key_dim; }
    int key_at() const { return layer_.key_at() + head_ * layer_.key_dim; }
    int value_at() const { return layer_.value_at() + first_ * layer_.value_dim; }
    float* input(int cell, int part) const {
        return reinterpret_cast<float*>(pass_.input_cells[4 * cell + part]);
    }
    float* window(int cell) const {
        return reinterpret_cast<float*>(pass_.state_cells[2 * cell])
             + index_ * window_ * channels();
    }
    float* state(int cell, int h, int i) const {
        return reinterpret_cast<float*>(pass_.state_cells[2 * cell + 1])
             + (number(h) * layer_.key_dim + i) * layer_.value_dim;
    }
    int value_blocks() const { return (layer_.value_dim + COLUMNS - 1) / COLUMNS; }

    const DeltaPass& pass_;
    const DeltaLayer& layer_;
    const float* rows_;
    const int row_size_, gates_;
    const int index_;
    float* out_;
    const int head_, first_;
    Scratch& scratch_;
    const int shared_, window_, key_size_, value_size_;
    const float** lines_ = nullptr;
    float *query_ = nullptr, *key_ = nullptr, *value_ = nullptr, *rate_ = nullptr;
    float *decay_ = nullptr, *state_ = nullptr;
};

// Work items of a layer with one key head, enough for many threads; channels of a convolution, in
// vectors, that one thread takes at a time.
constexpr int MOST_PARTS = 16, VECTORS_AT_ONCE = 8;

// A convolution alone: channels `first` to `stop` of one layer, through a run.
void convolve_run(const DeltaPass& pass, const DeltaLayer& layer, const Run& run, int index,
                  const float* rows, int row_size, float* out, int first, int stop,
                  Scratch& scratch) {
    const int window = layer.taps - 1;
    const int64_t channels = layer.channels;
    const auto lines = static_cast<const float**>(
        scratch.take(sizeof(const float*) * static_cast<size_t>(window + run.count())));
    find_lines(pass, layer, run, index, rows, row_size, lines);
    const auto keep = [&](const float* from, float* to) {
        if (from == nullptr) std::fill(to + first, to + stop, 0.0f);
        else std::copy(from + first, from + stop, to + first);
    };
    const auto keep_window = [&](int cell, int t) {
        float* to = reinterpret_cast<float*>(pass.state_cells[2 * cell]) + index * window * channels;
        for (int r = 0; r < window; ++r) keep(lines[t + r], to + r * channels);
    };
    if (run.fold >= 0) keep_window(run.fold, 0);
    for (int t = 0; t < run.count(); ++t) {
        const int n = run.first + t;
        for (int c = first; c < stop; c += LANES)
            store_some(out + n * channels + c, convolved(layer, lines + t, c, stop - c), stop - c);
        if (pass.states[n] >= 0) keep_window(pass.states[n], t + 1);
        if (pass.inputs[n] >= 0)
            keep(lines[window + t],
                 reinterpret_cast<float*>(pass.input_cells[4 * pass.inputs[n]]) + index * channels);
    }
}

Run run_of(const DeltaPass& pass, int number) {
    const int32_t* run = pass.runs + 6 * number;
    return {run[0], run[1], run[2], run[3], run[4], run[5]};
}

// Whether a run goes on from a cell that an earlier run of the pass writes. Then parts of a key head
// would need keys that another thread is about to write.
bool reads_own_cells(const DeltaPass& pass) {
    const auto among = [](const int32_t* cells, int count, int cell) {
        return std::find(cells, cells + count, cell) != cells + count;
    };
    for (int r = 1; r < pass.num_runs; ++r) {
        const Run run = run_of(pass, r);
        if (run.source >= 0 && among(pass.states, run.first, run.source)) return true;
        for (int q = 0; q < r; ++q)
            if (run.source >= 0 && run_of(pass, q).fold == run.source) return true;
        for (int i = run.replay_first; i < run.replay_stop; ++i)
            if (among(pass.inputs, run.first, pass.replayed[i])) return true;
    }
    return false;
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

// `rows` of `row_size` floats hold a token's channels first and, at `gates`, b and a of every value
// head, or Mamba-2's steps; `out` is [tokens, value heads, value size], or [tokens, channels] if
// there are no heads. `index` is the layer's among the recurrent ones.
void outrider_delta(const DeltaPass* pass, const DeltaLayer* layer, const float* rows, int row_size,
                    int gates, int index, float* out) {
    Team& team = pass->team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    if (layer->heads == 0) {
        const int num_vectors = round_up(layer->channels) / LANES;
        team.run(num_vectors, VECTORS_AT_ONCE, [&](int first, int stop, int thread) {
            for (int r = 0; r < pass->num_runs; ++r)
                convolve_run(*pass, *layer, run_of(*pass, r), index, rows, row_size, out,
                             first * LANES, std::min(stop * LANES, layer->channels),
                             team.own(thread));
        });
        return;
    }
    const int shared = layer->heads / layer->key_heads;
    const int most = reads_own_cells(*pass) ? 1 : std::max(1, MOST_PARTS / layer->key_heads);
    const int parts = std::min(shared, most);
    team.run(layer->key_heads * parts, 1, [&](int first, int last, int thread) {
        for (int item = first; item < last; ++item) {
            const int head = item / parts, part = item % parts, start = head * shared;
            Head one(*pass, *layer, rows, row_size, gates, index, out, head,
                     start + shared * part / parts, start + shared * (part + 1) / parts,
                     team.own(thread));
            for (int r = 0; r < pass->num_runs; ++r) one.go(run_of(*pass, r));
            end_streams();
        }
    });
}
}
