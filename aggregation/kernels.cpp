// Column kernels of the aggregation rules. Each works on a block of n rows, `stride` elements apart, on one
// thread, and allocates nothing that grows with the number of columns. Compiled once a machine by kernels.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t WIDTH = 128;  // columns sorted together: n rows of it stay in the first-level cache
constexpr int64_t DEPTH = 256;  // columns whose products are accumulated from one converted panel
constexpr int64_t LANES = 8;

typedef double Lanes __attribute__((vector_size(LANES * sizeof(double)), aligned(8)));

enum Kind { MEAN_OF_WIRES = 0, AROUND_MEDIAN = 1 };

// Values are known to be finite where it matters: see `tainted`. Without that promise GCC makes three
// instructions of each comparator where the processor has two.
#if defined(__GNUC__) && !defined(__clang__)
#define FINITE __attribute__((optimize("finite-math-only", "no-signed-zeros")))
#else
#define FINITE
#endif

template <typename T>
FINITE __attribute__((noinline)) void sort_columns(T* tile, const int32_t* network, int64_t comparators) {
    for (int64_t c = 0; c < comparators; ++c) {
        T* __restrict low = tile + network[2 * c] * WIDTH;
        T* __restrict high = tile + network[2 * c + 1] * WIDTH;
        for (int64_t k = 0; k < WIDTH; ++k) {
            const T a = low[k], b = high[k];
            low[k] = a < b ? a : b;
            high[k] = a < b ? b : a;
        }
    }
}

// Asks for the columns that come next: many rows at once are more than the processor foresees.
template <typename T>
void fetch(const T* from, int64_t count) {
    for (int64_t k = 0; k < count; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k);
}

// Copies a full row of a tile. x * 0 is 0 for every finite x and NaN for every other.
template <typename T>
void load_row(const T* __restrict from, T* __restrict wire, T* __restrict tainted) {
    for (int64_t k = 0; k < WIDTH; ++k) {
        wire[k] = from[k];
        tainted[k] += from[k] * T(0);
    }
}

template <typename T>
void mean_of_wires(const T* tile, int64_t first, int64_t last, double* __restrict sums) {
    for (int64_t row = first; row <= last; ++row)
        for (int64_t k = 0; k < WIDTH; ++k) sums[k] += static_cast<double>(tile[row * WIDTH + k]);
    for (int64_t k = 0; k < WIDTH; ++k) sums[k] /= static_cast<double>(last - first + 1);
}

// The `keep` sorted values nearest to the median are a window; a value leaves it on the left as long as the
// one that would enter on the right is strictly nearer.
template <typename T>
void mean_around_median(const T* tile, int64_t n, int64_t keep, double* sums) {
    for (int64_t k = 0; k < WIDTH; ++k) {
        const auto at = [&](int64_t row) { return static_cast<double>(tile[row * WIDTH + k]); };
        const double median = (at((n - 1) / 2) + at(n / 2)) / 2;
        int64_t first = 0;
        while (first + keep < n && median - at(first) > at(first + keep) - median) ++first;
        for (int64_t row = first; row < first + keep; ++row) sums[k] += at(row);
        sums[k] /= static_cast<double>(keep);
    }
}

template <typename T>
int64_t column_statistic(const T* x, int64_t stride, int64_t n, int64_t columns, const int32_t* network,
                         int64_t comparators, int64_t kind, int64_t first, int64_t last, T* out) {
    std::vector<T> tile(n * WIDTH);
    T tainted[WIDTH] = {};
    for (int64_t start = 0; start < columns; start += WIDTH) {
        const int64_t width = std::min(WIDTH, columns - start);
        for (int64_t row = 0; row < n; ++row) {
            const T* from = x + row * stride + start;
            T* wire = tile.data() + row * WIDTH;
            if (width == WIDTH) {
                fetch(from + WIDTH, std::min(WIDTH, columns - start - WIDTH));
                load_row(from, wire, tainted);
                continue;
            }
            T rest[WIDTH] = {};
            std::memcpy(rest, from, width * sizeof(T));
            load_row(rest, wire, tainted);
        }
        sort_columns(tile.data(), network, comparators);
        double sums[WIDTH] = {};
        if (kind == MEAN_OF_WIRES) mean_of_wires(tile.data(), first, last, sums);
        else mean_around_median(tile.data(), n, last - first + 1, sums);
        for (int64_t k = 0; k < width; ++k) out[start + k] = static_cast<T>(sums[k]);
    }
    for (int64_t k = 0; k < WIDTH; ++k)
        if (!(tainted[k] == T(0))) return 1;
    return 0;
}

// products[i][j] += <a_i, b_j> over DEPTH columns for a 4 by 4 patch of rows.
inline void patch(const double* a, const double* b, double* products, int64_t n) {
    Lanes sums[4][4] = {};
    for (int64_t k = 0; k < DEPTH; k += LANES) {
        Lanes left[4], right[4];
        for (int i = 0; i < 4; ++i) left[i] = *reinterpret_cast<const Lanes*>(a + i * DEPTH + k);
        for (int j = 0; j < 4; ++j) right[j] = *reinterpret_cast<const Lanes*>(b + j * DEPTH + k);
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) sums[i][j] += left[i] * right[j];
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            double total = 0;
            for (int k = 0; k < LANES; ++k) total += sums[i][j][k];
            products[i * n + j] += total;
        }
}

template <typename T>
void gram_cells(const T* x, int64_t stride, int64_t n, int64_t columns, int64_t cell, double* out) {
    const int64_t padded = (n + 3) / 4 * 4;
    std::vector<double> panel(padded * DEPTH), products(padded * padded);
    for (int64_t begin = 0; begin < columns; begin += cell, out += n * n) {
        const int64_t end = std::min(begin + cell, columns);
        std::fill(products.begin(), products.end(), 0.0);
        for (int64_t start = begin; start < end; start += DEPTH) {
            const int64_t width = std::min(DEPTH, end - start);
            for (int64_t row = 0; row < n; ++row) {
                double* to = panel.data() + row * DEPTH;
                const T* from = x + row * stride + start;
                fetch(from + width, std::min(DEPTH, columns - start - width));
                for (int64_t k = 0; k < width; ++k) to[k] = static_cast<double>(from[k]);
                std::fill(to + width, to + DEPTH, 0.0);
            }
            for (int64_t i = 0; i < padded; i += 4)
                for (int64_t j = i; j < padded; j += 4)
                    patch(panel.data() + i * DEPTH, panel.data() + j * DEPTH, &products[i * padded + j], padded);
        }
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = i; j < n; ++j) out[i * n + j] = out[j * n + i] = products[i * padded + j];
    }
}

template <typename T>
void norm_cells(const T* x, int64_t stride, int64_t n, int64_t columns, int64_t cell, double* out) {
    for (int64_t begin = 0; begin < columns; begin += cell, out += n) {
        const int64_t end = std::min(begin + cell, columns);
        for (int64_t row = 0; row < n; ++row) {
            const T* from = x + row * stride;
            double sums[4 * LANES] = {};
            int64_t k = begin;
            for (; k + 4 * LANES <= end; k += 4 * LANES)
                for (int64_t lane = 0; lane < 4 * LANES; ++lane) {
                    const double value = static_cast<double>(from[k + lane]);
                    sums[lane] += value * value;
                }
            for (; k < end; ++k) sums[0] += static_cast<double>(from[k]) * static_cast<double>(from[k]);
            double total = 0;
            for (const double sum : sums) total += sum;
            out[row] = total;
        }
    }
}

template <typename T>
void combine(const T* x, int64_t stride, int64_t n, int64_t columns, const double* factors, T* out) {
    constexpr int64_t tile = 1024;
    double sums[tile];
    for (int64_t start = 0; start < columns; start += tile) {
        const int64_t width = std::min(tile, columns - start);
        std::fill(sums, sums + width, 0.0);
        for (int64_t row = 0; row < n; ++row) {
            const double factor = factors[row];
            if (factor == 0) continue;
            const T* __restrict from = x + row * stride + start;
            for (int64_t k = 0; k < width; ++k) sums[k] += factor * static_cast<double>(from[k]);
        }
        for (int64_t k = 0; k < width; ++k) out[start + k] = static_cast<T>(sums[k]);
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                          \
    extern "C" int64_t column_statistic_##NAME(const T* x, int64_t stride, int64_t n, int64_t columns,           \
                                               const int32_t* network, int64_t comparators, int64_t kind,        \
                                               int64_t first, int64_t last, T* out) {                            \
        return column_statistic<T>(x, stride, n, columns, network, comparators, kind, first, last, out);         \
    }                                                                                                            \
    extern "C" void gram_cells_##NAME(const T* x, int64_t stride, int64_t n, int64_t columns, int64_t cell,      \
                                      double* out) {                                                             \
        gram_cells<T>(x, stride, n, columns, cell, out);                                                         \
    }                                                                                                            \
    extern "C" void norm_cells_##NAME(const T* x, int64_t stride, int64_t n, int64_t columns, int64_t cell,      \
                                      double* out) {                                                             \
        norm_cells<T>(x, stride, n, columns, cell, out);                                                         \
    }                                                                                                            \
    extern "C" void combine_##NAME(const T* x, int64_t stride, int64_t n, int64_t columns, const double* factors,\
                                   T* out) {                                                                     \
        combine<T>(x, stride, n, columns, factors, out);                                                         \
    }

EXPORT(float, float32)
EXPORT(double, float64)
