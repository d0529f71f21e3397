// Histograms of gradients, cut into digits while they are in the nearest cache, and rows' way down a tree. On one
// thread. Compiled once a machine by row_kernels.py, which has the same in NumPy: the same whole numbers.
//
// Rows lie in groups of `LANES` features, [groups, rows, LANES]: the bins of a group's features fit into the
// first cache, where rows come at random, and its part of the rows into the second.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bins are taken out of words, the lowest byte first"
#endif

namespace {

constexpr int64_t LANES = 8;
constexpr int64_t APART = 260;        // sums from a feature's first to the next one's, where none has more bins
constexpr int64_t AHEAD = 32;         // rows from the one in work to the one that memory is asked for
constexpr int64_t BLOCK = 1 << 16;    // rows whose Hessians and count share one word
constexpr int64_t COUNT_AT = 47;      // the bit from which that word counts rows
constexpr int64_t CHANNELS = 3;       // gradient, Hessian, rows

struct Pair {
    int32_t gradient;
    uint32_t hessian;  // below 2^31
};
typedef int32_t Half __attribute__((vector_size(8)));

// A bin's gradient, and its Hessian with the count of rows above it.
typedef int64_t Sum __attribute__((vector_size(16)));

// Where digits go: plane after plane of `cells` values, those of the rows first.
struct Planes {
    float* out;
    int64_t cells, bits, count_digits, whole_digits, channels;
};

// `rows` has AHEAD more than `count`; the sums of a lane lie at `at`, lane × APART where ALIKE.
template <typename T, bool ALIKE, int64_t USED>
void add_rows(const T* bins, const int64_t* at, const int32_t* rows, const Pair* pairs, int64_t count, Sum* sums) {
    for (int64_t place = 0; place < count; ++place) {
        __builtin_prefetch(bins + int64_t(rows[place + AHEAD]) * LANES);
        // A group's bins in words: loads are what a row has most of.
        constexpr int64_t IN_WORD = sizeof(uint64_t) / sizeof(T), BITS = 8 * sizeof(T);
        uint64_t words[LANES / IN_WORD];
        std::memcpy(words, bins + int64_t(rows[place]) * LANES, sizeof words);
        Half pair;
        std::memcpy(&pair, pairs + place, sizeof pair);
        const Sum added = __builtin_convertvector(pair, Sum) + Sum{0, int64_t(1) << COUNT_AT};
#pragma GCC unroll 8
        for (int64_t lane = 0; lane < USED; ++lane)
            sums[(ALIKE ? lane * APART : at[lane]) + int64_t(T(words[lane / IN_WORD] >> lane % IN_WORD * BITS))] += added;
    }
}

template <typename T, bool ALIKE>
void add_rows(int64_t used, const T* bins, const int64_t* at, const int32_t* rows, const Pair* pairs, int64_t count,
              Sum* sums) {
    switch (used) {
        case 1: return add_rows<T, ALIKE, 1>(bins, at, rows, pairs, count, sums);
        case 2: return add_rows<T, ALIKE, 2>(bins, at, rows, pairs, count, sums);
        case 3: return add_rows<T, ALIKE, 3>(bins, at, rows, pairs, count, sums);
        case 4: return add_rows<T, ALIKE, 4>(bins, at, rows, pairs, count, sums);
        case 5: return add_rows<T, ALIKE, 5>(bins, at, rows, pairs, count, sums);
        case 6: return add_rows<T, ALIKE, 6>(bins, at, rows, pairs, count, sums);
        case 7: return add_rows<T, ALIKE, 7>(bins, at, rows, pairs, count, sums);
        default: return add_rows<T, ALIKE, 8>(bins, at, rows, pairs, count, sums);
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

// A feature's sums as gradients, Hessians and rows, [3, count]; the sums are 0 afterwards.
void take(Sum* sums, int64_t count, int64_t* out) {
    int64_t *const gradient = out, *const hessian = gradient + count, *const held = hessian + count;
    for (int64_t bin = 0; bin < count; ++bin) {
        const uint64_t both = uint64_t(sums[bin][1]);
        gradient[bin] = sums[bin][0];
        hessian[bin] = int64_t(both & ((uint64_t(1) << COUNT_AT) - 1));
        held[bin] = int64_t(both >> COUNT_AT);
    }
    std::fill(sums, sums + count, Sum{0, 0});
}

// Writes the digits of such numbers to their planes, from `place` on. Returns 0 unless one is beyond what they hold.
uint64_t write(const int64_t* numbers, int64_t count, const Planes& planes, int64_t place) {
    const int64_t offset = int64_t(1) << (planes.whole_digits * planes.bits - 1);
    float* out = planes.out + place;
    uint64_t beyond = cut(numbers + 2 * count, count, 0, planes.count_digits, planes.bits, planes.cells, out);
    for (int64_t channel = 0; channel < planes.channels; ++channel) {
        const int64_t plane = planes.count_digits + channel * planes.whole_digits;
        beyond |= cut(numbers + channel * count, count, offset, planes.whole_digits, planes.bits, planes.cells,
                      out + plane * planes.cells);
    }
    return beyond;
}

// Of the rows in each node the histogram, whose digits go where its slot has its place; slot −1: none is asked for.
// Returns 1 where a number is beyond its digits, else 0.
template <typename T>
int64_t histograms(const T* bins, int64_t count, int64_t features, const int64_t* offsets, const int32_t* nodes,
                   const int64_t* slot_of, int64_t slots, const int64_t* place_of, const Pair* pairs,
                   const Planes& planes) {
    const int64_t width = offsets[features];
    // Rows that nobody asks for come last: a branch would be guessed wrong as often as not.
    std::vector<int64_t> starts(slots + 2, 0), next;
    const auto slot_at = [=](int64_t row) { const int64_t slot = slot_of[nodes[row]]; return slot < 0 ? slots : slot; };
    for (int64_t row = 0; row < count; ++row) ++starts[slot_at(row) + 1];
    for (int64_t slot = 0; slot <= slots; ++slot) starts[slot + 1] += starts[slot];
    next = starts;
    std::vector<int32_t> rows(count + AHEAD, 0);
    std::vector<Pair> ordered(count);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t place = next[slot_at(row)]++;
        rows[place] = int32_t(row);
        ordered[place] = pairs[row];
    }
    int64_t widest = 0;
    for (int64_t feature = 0; feature < features; ++feature)
        widest = std::max(widest, offsets[feature + 1] - offsets[feature]);
    const bool alike = widest <= APART;
    const int64_t apart = alike ? APART : widest;
    std::vector<Sum> sums(LANES * apart, Sum{0, 0});
    // A feature's numbers, and those of a group where a node's rows take several blocks.
    std::vector<int64_t> total(CHANNELS * widest), several(count > BLOCK ? CHANNELS * widest * LANES : 0, 0);
    int64_t at[LANES];
    for (int64_t lane = 0; lane < LANES; ++lane) at[lane] = lane * apart;
    uint64_t beyond = 0;
    for (int64_t first = 0; first < features; first += LANES) {
        const int64_t used = std::min(LANES, features - first);
        const T* group = bins + first * count;
        for (int64_t slot = 0; slot < slots; ++slot) {
            const int64_t stop = starts[slot + 1];
            for (int64_t start = starts[slot], end; start < stop || start == starts[slot]; start = end) {
                end = std::min(start + BLOCK, stop);
                const auto add = alike ? add_rows<T, true> : add_rows<T, false>;
                add(used, group, at, rows.data() + start, ordered.data() + start, end - start, sums.data());
                for (int64_t lane = 0; lane < used; ++lane) {
                    const int64_t place = offsets[first + lane], own = offsets[first + lane + 1] - place;
                    take(sums.data() + at[lane], own, total.data());
                    if (stop - starts[slot] > BLOCK) {
                        int64_t* sum = several.data() + lane * CHANNELS * widest;
                        for (int64_t bin = 0; bin < CHANNELS * own; ++bin) total[bin] = sum[bin] += total[bin];
                        if (end == stop) std::fill(sum, sum + CHANNELS * own, 0);
                    }
                    if (end == stop) beyond |= write(total.data(), own, planes, place_of[slot] * width + place);
                }
                if (end == stop) break;
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
