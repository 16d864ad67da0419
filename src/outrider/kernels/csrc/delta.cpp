// The gated delta rule of one layer, token by token: kernels/delta/torch.py defines it.
//
// Key heads are independent of each other, with their value heads and their channels of the
// convolution, so each is one work item; within one, columns of a state are independent, so a block
// of them stays in the first cache for all tokens of a run. A replayed token goes through the same
// two functions as one that is read: so its bits are the same whatever the compiler fuses.
#include <algorithm>
#include <cmath>

#include "team.h"
#include "vectors.h"

namespace outrider {

// One layer's weights and sizes: see DeltaWeights and StateShape.
struct DeltaLayer {
    const float *conv, *rate, *dt_bias;
    int32_t taps, channels, key_heads, heads, key_dim, value_dim;
};

// A pass's runs, and where cells are: addresses of a state cell's two tensors, and of an input
// cell's four. Absent cells are -1.
struct DeltaPass {
    Team* team;
    const int32_t* runs;  // first, stop, source, fold, first replayed, end of replayed
    const int32_t *states, *inputs, *replayed;
    const int64_t *state_cells, *input_cells;
    int32_t num_runs;
};

namespace {

constexpr int VECS = 2, COLUMNS = VECS * LANES;
constexpr float NORM_EPS = 1e-6f;

struct Run {
    int first, stop, source, fold, replay_first, replay_stop;
    int count() const { return stop - first; }
};

int round_up(int size) { return (size + LANES - 1) / LANES * LANES; }

// Column block of S [K, COLUMNS]: scaled by `decay`, then read by `key` into `seen`.
__attribute__((noinline)) void decay_and_read(float* state, int key_dim, const float* key,
                                              float decay, Vec* seen) {
    Vec sums[VECS] = {};
    for (int i = 0; i < key_dim; ++i)
        for (int v = 0; v < VECS; ++v) {
            const Vec scaled = load(state + i * COLUMNS + v * LANES) * decay;
            store(state + i * COLUMNS + v * LANES, scaled);
            sums[v] += scaled * key[i];
        }
    for (int v = 0; v < VECS; ++v) seen[v] = sums[v];
}

// The block plus key change^T, then read by `query` into `out`.
__attribute__((noinline)) void change_and_read(float* state, int key_dim, const float* key,
                                               const float* query, const Vec* change, Vec* out) {
    Vec sums[VECS] = {};
    for (int i = 0; i < key_dim; ++i)
        for (int v = 0; v < VECS; ++v) {
            const Vec changed = load(state + i * COLUMNS + v * LANES) + change[v] * key[i];
            store(state + i * COLUMNS + v * LANES, changed);
            sums[v] += changed * query[i];
        }
    for (int v = 0; v < VECS; ++v) out[v] = sums[v];
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

// One key head of one layer, through all runs of a pass.
class Head {
  public:
    Head(const DeltaPass& pass, const DeltaLayer& layer, const float* rows, int row_size, int gates,
         int index, float* out, int head, Scratch& scratch)
        : pass_(pass), layer_(layer), rows_(rows), row_size_(row_size), gates_(gates),
          index_(index), out_(out), head_(head), scratch_(scratch),
          shared_(layer.heads / layer.key_heads), window_(layer.taps - 1),
          key_size_(round_up(layer.key_dim)), value_size_(round_up(shared_ * layer.value_dim)) {}

    void go(const Run& run) {
        const int count = run.count();
        const size_t floats = static_cast<size_t>(count) * (2 * key_size_ + value_size_ + 2 * shared_)
                            + static_cast<size_t>(layer_.key_dim) * COLUMNS;
        const size_t pointers = sizeof(const float*) * (window_ + count);
        char* memory = static_cast<char*>(scratch_.take(pointers + sizeof(float) * floats + 64));
        lines_ = reinterpret_cast<const float**>(memory);
        query_ = reinterpret_cast<float*>(memory + pointers);
        key_ = query_ + static_cast<size_t>(count) * key_size_;
        value_ = key_ + static_cast<size_t>(count) * key_size_;
        rate_ = value_ + static_cast<size_t>(count) * value_size_;
        decay_ = rate_ + static_cast<size_t>(count) * shared_;
        block_ = decay_ + static_cast<size_t>(count) * shared_;
        remember(run);
        if (run.fold >= 0) keep_window(run.fold, 0);
        for (int t = 0; t < count; ++t) prepare(run, t);
        for (int h = 0; h < shared_; ++h)
            for (int column = 0; column < layer_.value_dim; column += COLUMNS)
                recur(run, h, column);
    }

  private:
    // The rows that the convolution reads: those before the run, null where there were none yet.
    void remember(const Run& run) {
        const int num_replayed = run.replay_stop - run.replay_first;
        const int recent = std::min(num_replayed, window_);
        for (int r = 0; r < window_ - recent; ++r)
            lines_[r] = run.source < 0 ? nullptr : window(run.source) + (r + recent) * channels();
        for (int r = 0; r < recent; ++r)
            lines_[window_ - recent + r] =
                input(pass_.replayed[run.replay_stop - recent + r], 0) + index_ * channels();
        for (int t = 0; t < run.count(); ++t)
            lines_[window_ + t] = rows_ + static_cast<int64_t>(run.first + t) * row_size_;
    }

    void prepare(const Run& run, int t) {
        const int n = run.first + t, key_dim = layer_.key_dim, h0 = head_ * shared_;
        float *query = query_ + t * key_size_, *key = key_ + t * key_size_;
        convolve(t, query_at(), key_dim, query);
        convolve(t, key_at(), key_dim, key);
        convolve(t, value_at(), shared_ * layer_.value_dim, value_ + t * value_size_);
        unit(query, key_dim, std::sqrt(static_cast<float>(key_dim)));
        unit(key, key_dim, 1.0f);
        const float* gates = lines_[window_ + t] + gates_;
        for (int h = 0; h < shared_; ++h) {
            const float step = softplus(gates[layer_.heads + h0 + h] + layer_.dt_bias[h0 + h]);
            rate_[t * shared_ + h] = sigmoid(gates[h0 + h]);
            decay_[t * shared_ + h] = std::exp(-layer_.rate[h0 + h] * step);
        }
        if (pass_.states[n] >= 0) keep_window(pass_.states[n], t + 1);
        if (pass_.inputs[n] < 0) return;
        float* line = input(pass_.inputs[n], 0) + index_ * channels();
        copy_channels(lines_[window_ + t], line);
        const int64_t keys = static_cast<int64_t>(index_) * layer_.key_heads + head_;
        std::copy(key, key + key_dim, input(pass_.inputs[n], 1) + keys * key_dim);
        float* decays = input(pass_.inputs[n], 3) + static_cast<int64_t>(index_) * layer_.heads;
        std::copy(decay_ + t * shared_, decay_ + (t + 1) * shared_, decays + h0);
    }

    // silu of the convolution at `size` channels from `at` on, for token t of the run.
    void convolve(int t, int at, int size, float* to) {
        for (int c = 0; c < size; c += LANES) {
            Vec sum = {};
            for (int tap = 0; tap < layer_.taps; ++tap) {
                const float* line = lines_[t + tap];
                if (line == nullptr) continue;
                const float* weight = layer_.conv + static_cast<int64_t>(tap) * channels() + at;
                sum += load_some(line + at + c, size - c) * load_some(weight + c, size - c);
            }
            store_some(to + c, sum / (exp(-sum) + 1.0f), size - c);
        }
    }

    // A block of columns of value head h through a run.
    void recur(const Run& run, int h, int column) {
        const int key_dim = layer_.key_dim, value_dim = layer_.value_dim, head = head_ * shared_ + h;
        const int width = std::min(COLUMNS, value_dim - column);
        fetch(run.source, head, column, width);
        Vec seen[VECS], change[VECS], out[VECS];
        for (int r = run.replay_first; r < run.replay_stop; ++r) {
            const int cell = pass_.replayed[r];
            const int64_t keys = static_cast<int64_t>(index_) * layer_.key_heads + head_;
            const int64_t heads = static_cast<int64_t>(index_) * layer_.heads + head;
            const float* key = input(cell, 1) + keys * key_dim;
            take(input(cell, 2) + heads * value_dim + column, width, change);
            decay_and_read(block_, key_dim, key, input(cell, 3)[heads], seen);
            change_and_read(block_, key_dim, key, key, change, out);
        }
        if (run.fold >= 0) keep_state(run.fold, head, column, width);
        for (int t = 0; t < run.count(); ++t) {
            const float *key = key_ + t * key_size_, *query = query_ + t * key_size_;
            const int n = run.first + t;
            const float rate = rate_[t * shared_ + h];
            decay_and_read(block_, key_dim, key, decay_[t * shared_ + h], seen);
            take(value_ + t * value_size_ + h * value_dim + column, width, change);
            for (int v = 0; v < VECS; ++v) change[v] = (change[v] - seen[v]) * rate;
            change_and_read(block_, key_dim, key, query, change, out);
            const int64_t row = static_cast<int64_t>(n) * layer_.heads + head;
            give(out, width, out_ + row * value_dim + column);
            if (pass_.states[n] >= 0) keep_state(pass_.states[n], head, column, width);
            if (pass_.inputs[n] < 0) continue;
            const int64_t heads = static_cast<int64_t>(index_) * layer_.heads + head;
            give(change, width, input(pass_.inputs[n], 2) + heads * value_dim + column);
        }
    }

    void fetch(int cell, int head, int column, int width) {
        for (int i = 0; i < layer_.key_dim; ++i)
            for (int v = 0; v < VECS; ++v) {
                Vec part = {};
                const int left = width - v * LANES;
                if (cell >= 0 && left > 0)
                    part = load_some(state(cell, head, i, column) + v * LANES, left);
                store(block_ + i * COLUMNS + v * LANES, part);
            }
    }

    void keep_state(int cell, int head, int column, int width) {
        for (int i = 0; i < layer_.key_dim; ++i)
            std::copy(block_ + i * COLUMNS, block_ + i * COLUMNS + width,
                      state(cell, head, i, column));
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
        for (int part = 0; part < 3; ++part) {
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
    int query_at() const { return head_ * layer_.key_dim; }
    int key_at() const { return (layer_.key_heads + head_) * layer_.key_dim; }
    int value_at() const {
        return 2 * layer_.key_heads * layer_.key_dim + head_ * shared_ * layer_.value_dim;
    }
    float* input(int cell, int part) const {
        return reinterpret_cast<float*>(pass_.input_cells[4 * cell + part]);
    }
    float* window(int cell) const {
        return reinterpret_cast<float*>(pass_.state_cells[2 * cell])
             + index_ * window_ * channels();
    }
    float* state(int cell, int head, int i, int column) const {
        const int64_t row = (static_cast<int64_t>(index_) * layer_.heads + head) * layer_.key_dim + i;
        return reinterpret_cast<float*>(pass_.state_cells[2 * cell + 1])
             + row * layer_.value_dim + column;
    }

    const DeltaPass& pass_;
    const DeltaLayer& layer_;
    const float* rows_;
    const int row_size_, gates_;
    const int index_;
    float* out_;
    const int head_;
    Scratch& scratch_;
    const int shared_, window_, key_size_, value_size_;
    const float** lines_ = nullptr;
    float *query_ = nullptr, *key_ = nullptr, *value_ = nullptr, *rate_ = nullptr;
    float *decay_ = nullptr, *block_ = nullptr;
};

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

// `rows` of `row_size` floats hold a token's channels first and, at `gates`, b and a of every value
// head; `out` is [tokens, value heads, value size]. `index` is the layer's among the recurrent ones.
void outrider_delta(const DeltaPass* pass, const DeltaLayer* layer, const float* rows, int row_size,
                    int gates, int index, float* out) {
    Team& team = pass->team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    team.run(layer->key_heads, 1, [&](int first, int last, int thread) {
        for (int head = first; head < last; ++head) {
            Head one(*pass, *layer, rows, row_size, gates, index, out, head, team.own(thread));
            for (int r = 0; r < pass->num_runs; ++r) {
                const int32_t* run = pass->runs + 6 * r;
                one.go({run[0], run[1], run[2], run[3], run[4], run[5]});
            }
        }
    });
}
}
