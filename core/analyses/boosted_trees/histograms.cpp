// Histograms of gradients and rows' way down a tree. Rows lie one after the other, a bin for each feature. On one
// thread. Compiled once a machine by row_kernels.py, which has the same in NumPy: the same whole numbers.

#include <cstdint>
#include <vector>

namespace {

constexpr int64_t AHEAD = 12;         // rows from the one in work to the one that memory is asked for
constexpr int64_t BLOCK = 1 << 16;    // rows whose Hessians and count share one word
constexpr int64_t COUNT_AT = 47;      // the bit from which that word counts rows

struct Pair {
    int32_t gradient;
    uint32_t hessian;
};

struct Sum {
    int64_t gradient;
    int64_t both;
};

template <typename T>
void add_rows(const T* bins, int64_t features, const int64_t* offsets, const int64_t* rows, int64_t count,
              const Pair* pairs, int64_t width, int64_t* out) {
    std::vector<Sum> sums(width);
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t stop = start + BLOCK < count ? start + BLOCK : count;
        for (auto& sum : sums) sum = Sum{0, 0};
        for (int64_t place = start; place < stop; ++place) {
            if (place + AHEAD < count) {
                const int64_t later = rows[place + AHEAD];
                const char* line = reinterpret_cast<const char*>(bins + later * features);
                for (int64_t byte = 0; byte < features * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(line + byte);
                __builtin_prefetch(pairs + later);
            }
            const int64_t row = rows[place];
            const T* own = bins + row * features;
            const int64_t gradient = pairs[row].gradient;
            const int64_t both = int64_t(pairs[row].hessian) + (int64_t(1) << COUNT_AT);
            for (int64_t feature = 0; feature < features; ++feature) {
                Sum& sum = sums[offsets[feature] + own[feature]];
                sum.gradient += gradient;
                sum.both += both;
            }
        }
        for (int64_t bin = 0; bin < width; ++bin) {
            out[3 * bin] += sums[bin].gradient;
            out[3 * bin + 1] += sums[bin].both & ((int64_t(1) << COUNT_AT) - 1);
            out[3 * bin + 2] += sums[bin].both >> COUNT_AT;
        }
    }
}

template <typename T>
void histograms(const T* bins, int64_t features, const int64_t* offsets, const int64_t* rows, const int64_t* starts,
                int64_t slots, const Pair* pairs, int64_t* out) {
    const int64_t width = offsets[features];
    for (int64_t slot = 0; slot < slots; ++slot)
        add_rows(bins, features, offsets, rows + starts[slot], starts[slot + 1] - starts[slot], pairs, width,
                 out + 3 * width * slot);
}

// A node's children are 2n + 1 and 2n + 2; feature −1: it has none. Left are the bins up to `cut`.
template <typename T>
void descend(const T* bins, int64_t rows, int64_t features, const int64_t* offsets, const int64_t* feature,
             const int64_t* cut, const int64_t* missing_left, int32_t* nodes) {
    for (int64_t row = 0; row < rows; ++row) {
        int64_t node = nodes[row];
        while (feature[node] >= 0) {
            const int64_t by = feature[node];
            const int64_t bin = bins[row * features + by];
            const bool absent = bin == offsets[by + 1] - offsets[by] - 1;
            node = 2 * node + ((absent ? missing_left[node] != 0 : bin <= cut[node]) ? 1 : 2);
        }
        nodes[row] = int32_t(node);
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                              \
    extern "C" void histograms_##NAME(const T* bins, int64_t features, const int64_t* offsets, const int64_t* rows,  \
                                      const int64_t* starts, int64_t slots, const void* pairs, int64_t* out) {       \
        histograms<T>(bins, features, offsets, rows, starts, slots, static_cast<const Pair*>(pairs), out);           \
    }                                                                                                                \
    extern "C" void descend_##NAME(const T* bins, int64_t rows, int64_t features, const int64_t* offsets,            \
                                   const int64_t* feature, const int64_t* cut, const int64_t* missing_left,          \
                                   int32_t* nodes) {                                                                 \
        descend<T>(bins, rows, features, offsets, feature, cut, missing_left, nodes);                                \
    }

EXPORT(uint8_t, uint8)
EXPORT(uint16_t, uint16)
