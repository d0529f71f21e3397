// Histograms of gradients, cut into digits while they are in the nearest cache, and rows' way down a tree. On one
// thread. Compiled once a machine by row_kernels.py, which has the same in NumPy: the same whole numbers.
//
// Rows lie in groups of `LANES` features, [groups, rows, LANES]: the bins of a group's features fit into the
// first cache, where rows come at random, and its part of the rows into the second.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t LANES = 8;
constexpr int64_t AHEAD = 12;         // rows from the one in work to the one that memory is asked for
constexpr int64_t BLOCK = 1 << 16;    // rows whose Hessians and count share one word
constexpr int64_t COUNT_AT = 47;      // the bit from which that word counts rows
constexpr int64_t CHANNELS = 3;       // gradient, Hessian, rows

struct Pair {
    int32_t gradient;
    uint32_t hessian;
};

// A bin's gradient, and its Hessian with the count of rows above it.
typedef int64_t Sum __attribute__((vector_size(16)));

// Where digits go: plane after plane of `cells` values, those of the rows first.
struct Planes {
    float* out;
    int64_t cells, bits, count_digits, whole_digits, channels;
};

template <typename T, int64_t USED>
void add_rows(const T* bins, const int64_t* at, const int32_t* rows, const Pair* pairs, int64_t count, Sum* sums) {
    Sum* lanes[USED];
    for (int64_t lane = 0; lane < USED; ++lane) lanes[lane] = sums + at[lane];
    for (int64_t place = 0; place < count; ++place) {
        if (place + AHEAD < count) __builtin_prefetch(bins + rows[place + AHEAD] * LANES);
        const T* own = bins + rows[place] * LANES;
        const Sum added = {pairs[place].gradient, int64_t(pairs[place].hessian) + (int64_t(1) << COUNT_AT)};
        for (int64_t lane = 0; lane < USED; ++lane) lanes[lane][own[lane]] += added;
    }
}

template <typename T>
void add_rows(int64_t used, const T* bins, const int64_t* at, const int32_t* rows, const Pair* pairs, int64_t count,
              Sum* sums) {
    switch (used) {
        case 1: return add_rows<T, 1>(bins, at, rows, pairs, count, sums);
        case 2: return add_rows<T, 2>(bins, at, rows, pairs, count, sums);
        case 3: return add_rows<T, 3>(bins, at, rows, pairs, count, sums);
        case 4: return add_rows<T, 4>(bins, at, rows, pairs, count, sums);
        case 5: return add_rows<T, 5>(bins, at, rows, pairs, count, sums);
        case 6: return add_rows<T, 6>(bins, at, rows, pairs, count, sums);
        case 7: return add_rows<T, 7>(bins, at, rows, pairs, count, sums);
        default: return add_rows<T, 8>(bins, at, rows, pairs, count, sums);
    }
}

// Writes the digits of whole numbers, each to its plane. Returns 0 unless one is beyond what they hold.
template <int64_t DIGITS>
uint64_t cut(const int64_t* values, int64_t count, int64_t offset, int64_t bits, int64_t cells, float* out) {
    const uint32_t mask = (uint32_t(1) << bits) - 1;
    uint64_t beyond = 0;
    for (int64_t bin = 0; bin < count; ++bin) {
        const uint64_t raised = uint64_t(values[bin] + offset);
        beyond |= raised >> (DIGITS * bits);
        for (int64_t digit = 0; digit < DIGITS; ++digit)
            out[digit * cells + bin] = float(int32_t(uint32_t(raised >> digit * bits) & mask));
    }
    return beyond;
}

uint64_t cut(const int64_t* values, int64_t count, int64_t offset, int64_t digits, int64_t bits, int64_t cells,
             float* out) {
    switch (digits) {
        case 2: return cut<2>(values, count, offset, bits, cells, out);
        case 3: return cut<3>(values, count, offset, bits, cells, out);
        default: return cut<4>(values, count, offset, bits, cells, out);
    }
}

// Of the rows in each node the histogram, whose digits go where its slot has its place; slot −1: none is asked for.
// Returns 1 where a number is beyond its digits, else 0.
template <typename T>
int64_t histograms(const T* bins, int64_t count, int64_t features, const int64_t* offsets, const int32_t* nodes,
                   const int64_t* slot_of, int64_t slots, const int64_t* place_of, const Pair* pairs,
                   const Planes& planes) {
    const int64_t width = offsets[features];
    std::vector<int64_t> starts(slots + 1, 0), next;
    for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = slot_of[nodes[row]];
        if (slot >= 0) ++starts[slot + 1];
    }
    for (int64_t slot = 0; slot < slots; ++slot) starts[slot + 1] += starts[slot];
    next = starts;
    std::vector<int32_t> rows(starts[slots]);
    std::vector<Pair> ordered(starts[slots]);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = slot_of[nodes[row]];
        if (slot < 0) continue;
        const int64_t place = next[slot]++;
        rows[place] = int32_t(row);
        ordered[place] = pairs[row];
    }
    int64_t widest = 0;
    for (int64_t first = 0; first < features; first += LANES)
        widest = std::max(widest, offsets[std::min(first + LANES, features)] - offsets[first]);
    std::vector<Sum> sums(widest);
    std::vector<int64_t> total(CHANNELS * widest);
    int64_t *const gradient = total.data(), *const hessian = gradient + widest, *const held = hessian + widest;
    const int64_t whole = int64_t(1) << (planes.whole_digits * planes.bits - 1);
    uint64_t beyond = 0;
    for (int64_t first = 0; first < features; first += LANES) {
        const int64_t used = std::min(LANES, features - first), own = offsets[first + used] - offsets[first];
        int64_t at[LANES];
        for (int64_t lane = 0; lane < used; ++lane) at[lane] = offsets[first + lane] - offsets[first];
        const T* group = bins + first * count;
        for (int64_t slot = 0; slot < slots; ++slot) {
            if (starts[slot] == starts[slot + 1]) std::fill(total.begin(), total.end(), 0);
            for (int64_t start = starts[slot]; start < starts[slot + 1]; start += BLOCK) {
                const int64_t length = std::min(BLOCK, starts[slot + 1] - start), more = start > starts[slot] ? -1 : 0;
                std::fill(sums.begin(), sums.begin() + own, Sum{0, 0});
                add_rows(used, group, at, rows.data() + start, ordered.data() + start, length, sums.data());
                for (int64_t bin = 0; bin < own; ++bin) {
                    gradient[bin] = (gradient[bin] & more) + sums[bin][0];
                    hessian[bin] = (hessian[bin] & more) + (sums[bin][1] & ((int64_t(1) << COUNT_AT) - 1));
                    held[bin] = (held[bin] & more) + (sums[bin][1] >> COUNT_AT);
                }
            }
            float* out = planes.out + place_of[slot] * width + offsets[first];
            beyond |= cut(held, own, 0, planes.count_digits, planes.bits, planes.cells, out);
            for (int64_t channel = 0; channel < planes.channels; ++channel) {
                const int64_t plane = planes.count_digits + channel * planes.whole_digits;
                beyond |= cut(gradient + channel * widest, own, whole, planes.whole_digits, planes.bits, planes.cells,
                              out + plane * planes.cells);
            }
        }
    }
    return beyond != 0;
}
// A node's children are 2n + 1 and 2n + 2; feature −1: it has none. Left are the bins up to `cut`.
template <typename T>
void descend(const T* bins, int64_t rows, const int64_t* offsets, const int64_t* feature, const int64_t* cut,
             const int64_t* missing_left, int32_t* nodes) {
    for (int64_t row = 0; row < rows; ++row) {
        int64_t node = nodes[row];
        while (feature[node] >= 0) {
            const int64_t by = feature[node];
            const int64_t bin = bins[(by / LANES * rows + row) * LANES + by % LANES];
            const bool absent = bin == offsets[by + 1] - offsets[by] - 1;
            node = 2 * node + ((absent ? missing_left[node] != 0 : bin <= cut[node]) ? 1 : 2);
        }
        nodes[row] = int32_t(node);
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                              \
    extern "C" int64_t histograms_##NAME(const T* bins, int64_t rows, int64_t features, const int64_t* offsets,      \
                                         const int32_t* nodes, const int64_t* slot_of, int64_t slots,                \
                                         const int64_t* place_of, const void* pairs, float* out, int64_t cells,      \
                                         int64_t bits, int64_t count_digits, int64_t whole_digits,                   \
                                         int64_t channels) {                                                         \
        return histograms<T>(bins, rows, features, offsets, nodes, slot_of, slots, place_of,                         \
                             static_cast<const Pair*>(pairs),                                                        \
                             Planes{out, cells, bits, count_digits, whole_digits, channels});                        \
    }                                                                                                                \
    extern "C" void descend_##NAME(const T* bins, int64_t rows, const int64_t* offsets, const int64_t* feature,      \
                                   const int64_t* cut, const int64_t* missing_left, int32_t* nodes) {                \
        descend<T>(bins, rows, offsets, feature, cut, missing_left, nodes);                                          \
    }

EXPORT(uint8_t, uint8)
EXPORT(uint16_t, uint16)
