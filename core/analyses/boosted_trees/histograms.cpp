// Histograms of gradients and rows' way down a tree. Rows lie one after the other, a bin for each feature. On one
// thread. Compiled once a machine by row_kernels.py, which has the same in NumPy: the same whole numbers.

#include <algorithm>
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

// A bin's gradient, and its Hessian with the count of rows above it.
typedef int64_t Sum __attribute__((vector_size(16)));

template <typename T>
void add_rows(const T* bins, int64_t features, const int64_t* offsets, const int64_t* rows, int64_t count,
              const Pair* pairs, int64_t width, int64_t* out) {
    std::vector<Sum> sums(width);
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t stop = start + BLOCK < count ? start + BLOCK : count;
        std::fill(sums.begin(), sums.end(), Sum{0, 0});
        for (int64_t place = start; place < stop; ++place) {
            if (place + AHEAD < count) {
                const int64_t later = rows[place + AHEAD];
                const char* line = reinterpret_cast<const char*>(bins + later * features);
                for (int64_t byte = 0; byte < features * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(line + byte);
                __builtin_prefetch(pairs + later);
            }
            const int64_t row = rows[place];
            const T* own = bins + row * features;
            const Sum added = {pairs[row].gradient, int64_t(pairs[row].hessian) + (int64_t(1) << COUNT_AT)};
            for (int64_t feature = 0; feature < features; ++feature) sums[offsets[feature] + own[feature]] += added;
        }
        for (int64_t bin = 0; bin < width; ++bin) {
            out[3 * bin] += sums[bin][0];
            out[3 * bin + 1] += sums[bin][1] & ((int64_t(1) << COUNT_AT) - 1);
            out[3 * bin + 2] += sums[bin][1] >> COUNT_AT;
        }
    }
}

// Of the rows in each node the histogram at its slot; slot −1: none is asked for.
template <typename T>
void histograms(const T* bins, int64_t count, int64_t features, const int64_t* offsets, const int32_t* nodes,
                const int64_t* slot_of, int64_t slots, const Pair* pairs, int64_t* out) {
    const int64_t width = offsets[features];
    std::vector<int64_t> starts(slots + 1, 0), next, rows(count);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = slot_of[nodes[row]];
        if (slot >= 0) ++starts[slot + 1];
    }
    for (int64_t slot = 0; slot < slots; ++slot) starts[slot + 1] += starts[slot];
    next = starts;
    for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = slot_of[nodes[row]];
        if (slot >= 0) rows[next[slot]++] = row;
    }
    for (int64_t slot = 0; slot < slots; ++slot)
        add_rows(bins, features, offsets, rows.data() + starts[slot], starts[slot + 1] - starts[slot], pairs, width,
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
    extern "C" void histograms_##NAME(const T* bins, int64_t rows, int64_t features, const int64_t* offsets,         \
                                      const int32_t* nodes, const int64_t* slot_of, int64_t slots,                   \
                                      const void* pairs, int64_t* out) {                                             \
        histograms<T>(bins, rows, features, offsets, nodes, slot_of, slots, static_cast<const Pair*>(pairs), out);   \
    }                                                                                                                \
    extern "C" void descend_##NAME(const T* bins, int64_t rows, int64_t features, const int64_t* offsets,            \
                                   const int64_t* feature, const int64_t* cut, const int64_t* missing_left,          \
                                   int32_t* nodes) {                                                                 \
        descend<T>(bins, rows, features, offsets, feature, cut, missing_left, nodes);                                \
    }

EXPORT(uint8_t, uint8)
EXPORT(uint16_t, uint16)
