// Column kernels of the aggregation rules. Each works on n rows of a block whose rows lie `stride` elements apart:
// those named by `order`, or the first n where it is null. On one thread; nothing that grows with the number of
// columns is allocated. Compiled once a machine by kernels.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t WIDTH = 128;  // columns sorted together: n rows of it stay in the first-level cache
constexpr int64_t DEPTH = 128;  // columns whose products are accumulated from one converted panel
constexpr int64_t SIDE = 4;     // rows of a panel; products are formed of two panels at a time
constexpr int64_t TILE = 128;   // columns of a linear combination that are summed over all rows at a time
constexpr int64_t STRIP = 512;  // columns whose distances from one row are formed for all rows at a time
constexpr int64_t AHEAD = 1024;  // columns from those in work to those that memory is asked for

#ifdef __AVX512F__
constexpr int64_t LANES = 8, AT_ONCE = 4;  // 16 sums and 5 operands fit into 32 registers of 64 bytes
#else
constexpr int64_t LANES = 4, AT_ONCE = 2;  // 8 sums and 3 operands fit into 16 registers of 32 bytes
#endif

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(LANES * sizeof(T)), aligned(sizeof(T))));
};
typedef Vector<double>::type Lanes;

// GCC would rather read an operand from memory for each product than once into a register: that halves the speed.
#if defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

// The rows of a block in the order in which they are meant.
template <typename T>
struct Rows {
    const T* start;
    int64_t stride;
    const int64_t* order;
    const T* operator[](int64_t row) const { return start + (order ? order[row] : row) * stride; }
};

// A row of a linear combination, and what it is multiplied by.
template <typename T>
struct Term {
    const T* row;
    double factor;
};

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

// Asks for columns that come later: many rows at once are more than the processor foresees. Into the second
// level of the cache, since the first would lose them again before they are used.
template <typename T>
void fetch(const T* from, int64_t count) {
    for (int64_t k = 0; k < count; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k, 0, 2);
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
int64_t column_statistic(Rows<T> x, int64_t n, int64_t columns, const int32_t* network, int64_t comparators,
                         int64_t kind, int64_t first, int64_t last, T* out) {
    std::vector<T> tile(n * WIDTH);
    T tainted[WIDTH] = {};
    for (int64_t start = 0; start < columns; start += WIDTH) {
        const int64_t width = std::min(WIDTH, columns - start);
        for (int64_t row = 0; row < n; ++row) {
            const T* from = x[row] + start;
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

template <typename T>
const typename Vector<T>::type& lanes(const T* from) {
    return *reinterpret_cast<const typename Vector<T>::type*>(from);
}

// sums[i][j] += the products of row i of panel a and row j of panel b, lane by lane, for AT_ONCE rows j from
// FIRST on. In a panel LANES columns of one row follow those of the row before. Where a and b are the same panel
// (DIAGONAL), only j ≥ i is formed.
template <bool DIAGONAL, int64_t FIRST>
__attribute__((noinline)) void patch(const double* a, const double* b, double* sums) {
    Lanes total[SIDE][AT_ONCE] = {};
    for (int64_t k = 0; k < SIDE * DEPTH; k += SIDE * LANES) {
        Lanes right[AT_ONCE];
        for (int64_t j = 0; j < AT_ONCE; ++j) right[j] = lanes(b + k + (FIRST + j) * LANES);
        for (int64_t j = 0; j < AT_ONCE; ++j) IN_REGISTER(right[j]);
        for (int64_t i = 0; i < SIDE; ++i) {
            Lanes left = lanes(a + k + i * LANES);
            IN_REGISTER(left);
            for (int64_t j = 0; j < AT_ONCE; ++j)
                if (!DIAGONAL || FIRST + j >= i) total[i][j] += left * right[j];
        }
    }
    for (int64_t i = 0; i < SIDE; ++i)
        for (int64_t j = 0; j < AT_ONCE; ++j)
            if (!DIAGONAL || FIRST + j >= i)
                *reinterpret_cast<Lanes*>(sums + (i * SIDE + FIRST + j) * LANES) += total[i][j];
}

template <bool DIAGONAL>
void patches(const double* a, const double* b, double* sums) {
    patch<DIAGONAL, 0>(a, b, sums);
    if constexpr (AT_ONCE < SIDE) patch<DIAGONAL, AT_ONCE>(a, b, sums);
}

// Writes DEPTH columns of a row, as float64, into its place in a panel.
template <typename T>
void convert(const T* from, double* to) {
    for (int64_t k = 0; k < DEPTH; k += LANES)
        *reinterpret_cast<Lanes*>(to + k * SIDE) = __builtin_convertvector(lanes(from + k), Lanes);
}

// The same for fewer columns; 0 in the place of those that are missing.
template <typename T>
__attribute__((noinline)) void convert_rest(const T* from, int64_t width, double* to) {
    T rest[DEPTH] = {};
    std::memcpy(rest, from, width * sizeof(T));
    convert(rest, to);
}

// The inner products of all pairs of rows, cell by cell: [cells, n, n] in float64.
template <typename T>
void gram_cells(Rows<T> x, int64_t n, int64_t columns, int64_t cell, double* out) {
    constexpr int64_t panel = SIDE * DEPTH, patch_size = SIDE * SIDE * LANES;
    const int64_t panels = (n + SIDE - 1) / SIDE;
    std::vector<double> storage(panels * panel + LANES), sums(panels * (panels + 1) / 2 * patch_size);
    const uintptr_t address = reinterpret_cast<uintptr_t>(storage.data()) / sizeof(double);
    double* values = storage.data() + (LANES - address % LANES) % LANES;
    for (int64_t begin = 0; begin < columns; begin += cell, out += n * n) {
        const int64_t end = std::min(begin + cell, columns);
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t start = begin; start < end; start += DEPTH) {
            const int64_t width = std::min(DEPTH, end - start), later = std::min(DEPTH, columns - start - AHEAD);
            for (int64_t row = 0; row < n; ++row) {
                const T* from = x[row] + start;
                fetch(from + AHEAD, later);
                double* to = values + row / SIDE * panel + row % SIDE * LANES;
                if (width == DEPTH) convert(from, to);
                else convert_rest(from, width, to);
            }
            double* to = sums.data();
            for (int64_t i = 0; i < panels; ++i) {
                patches<true>(values + i * panel, values + i * panel, to);
                to += patch_size;
                for (int64_t j = i + 1; j < panels; ++j, to += patch_size)
                    patches<false>(values + i * panel, values + j * panel, to);
            }
        }
        const double* from = sums.data();
        for (int64_t i = 0; i < n; i += SIDE)
            for (int64_t j = i; j < n; j += SIDE, from += patch_size)
                for (int64_t p = i; p < std::min(i + SIDE, n); ++p)
                    for (int64_t q = std::max(j, p); q < std::min(j + SIDE, n); ++q) {
                        const double* lane = from + ((p - i) * SIDE + q - j) * LANES;
                        double total = 0;
                        for (int64_t k = 0; k < LANES; ++k) total += lane[k];
                        out[p * n + q] = out[q * n + p] = total;
                    }
    }
}

template <typename T>
void norm_cells(Rows<T> x, int64_t n, int64_t columns, int64_t cell, double* out) {
    for (int64_t begin = 0; begin < columns; begin += cell, out += n) {
        const int64_t end = std::min(begin + cell, columns);
        for (int64_t row = 0; row < n; ++row) {
            const T* from = x[row];
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

// ‖row i − row p‖² of all rows, cell by cell: [cells, n] in float64, of the differences themselves. Columns go in
// strips, of which row p is converted once for all rows.
template <typename T>
void apart_cells(Rows<T> x, int64_t n, int64_t columns, int64_t cell, double* out, int64_t pivot) {
    constexpr int64_t together = 4;
    std::vector<double> storage(STRIP + n * together * LANES + LANES);
    const uintptr_t address = reinterpret_cast<uintptr_t>(storage.data()) / sizeof(double);
    double* centre = storage.data() + (LANES - address % LANES) % LANES;
    double* sums = centre + STRIP;
    for (int64_t begin = 0; begin < columns; begin += cell, out += n) {
        const int64_t end = std::min(begin + cell, columns);
        std::fill(sums, sums + n * together * LANES, 0.0);
        for (int64_t start = begin; start < end; start += STRIP) {
            const int64_t width = std::min(STRIP, end - start), later = std::min(STRIP, columns - start - AHEAD);
            const T* middle = x[pivot] + start;
            for (int64_t k = 0; k < width; ++k) centre[k] = static_cast<double>(middle[k]);
            for (int64_t row = 0; row < n; ++row) {
                const T* from = x[row] + start;
                fetch(from + AHEAD, later);
                Lanes part[together];
                Lanes* kept = reinterpret_cast<Lanes*>(sums + row * together * LANES);
                for (int64_t i = 0; i < together; ++i) part[i] = kept[i];
                int64_t k = 0;
                for (; k + together * LANES <= width; k += together * LANES)
                    for (int64_t i = 0; i < together; ++i) {
                        const Lanes apart =
                            __builtin_convertvector(lanes(from + k + i * LANES), Lanes) - lanes(centre + k + i * LANES);
                        part[i] += apart * apart;
                    }
                for (; k < width; ++k) {
                    const double apart = static_cast<double>(from[k]) - centre[k];
                    part[0][0] += apart * apart;
                }
                for (int64_t i = 0; i < together; ++i) kept[i] = part[i];
            }
        }
        for (int64_t row = 0; row < n; ++row) {
            double total = 0;
            for (int64_t i = 0; i < together * LANES; ++i) total += sums[row * together * LANES + i];
            out[row] = total;
        }
    }
}

// sums += the tiles of COUNT rows, each times its factor, one after the other.
template <int64_t COUNT, typename T>
void add_rows(const Term<T>* terms, int64_t start, int64_t width, int64_t later, double* __restrict sums) {
    const T* rows[COUNT];
    double factors[COUNT];
    for (int64_t i = 0; i < COUNT; ++i) {
        rows[i] = terms[i].row + start;
        factors[i] = terms[i].factor;
        fetch(rows[i] + AHEAD, later);
    }
    for (int64_t k = 0; k < width; ++k) {
        double sum = sums[k];
        for (int64_t i = 0; i < COUNT; ++i) sum += factors[i] * static_cast<double>(rows[i][k]);
        sums[k] = sum;
    }
}

// Σ factors[i] · row i; a row of factor 0 is not read.
template <typename T>
void combine(Rows<T> x, int64_t n, int64_t columns, const double* factors, T* out) {
    std::vector<Term<T>> terms;
    for (int64_t row = 0; row < n; ++row)
        if (factors[row] != 0) terms.push_back({x[row], factors[row]});
    const int64_t count = terms.size();
    alignas(64) double sums[TILE];
    for (int64_t start = 0; start < columns; start += TILE) {
        const int64_t width = std::min(TILE, columns - start), later = std::min(TILE, columns - start - AHEAD);
        std::fill(sums, sums + width, 0.0);
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) add_rows<4>(&terms[i], start, width, later, sums);
        for (; i < count; ++i) add_rows<1>(&terms[i], start, width, later, sums);
        for (int64_t k = 0; k < width; ++k) out[start + k] = static_cast<T>(sums[k]);
    }
}

}  // namespace

#define ROWS(T) const T *x, int64_t stride, const int64_t *order, int64_t n, int64_t columns
#define EXPORT(T, NAME)                                                                                            \
    extern "C" int64_t column_statistic_##NAME(ROWS(T), const int32_t* network, int64_t comparators, int64_t kind, \
                                               int64_t first, int64_t last, T* out) {                              \
        return column_statistic<T>({x, stride, order}, n, columns, network, comparators, kind, first, last, out);  \
    }                                                                                                              \
    extern "C" void gram_cells_##NAME(ROWS(T), int64_t cell, double* out) {                                        \
        gram_cells<T>({x, stride, order}, n, columns, cell, out);                                                  \
    }                                                                                                              \
    extern "C" void norm_cells_##NAME(ROWS(T), int64_t cell, double* out) {                                        \
        norm_cells<T>({x, stride, order}, n, columns, cell, out);                                                  \
    }                                                                                                              \
    extern "C" void apart_cells_##NAME(ROWS(T), int64_t cell, double* out, int64_t pivot) {                        \
        apart_cells<T>({x, stride, order}, n, columns, cell, out, pivot);                                          \
    }                                                                                                              \
    extern "C" void combine_##NAME(ROWS(T), const double* factors, T* out) {                                       \
        combine<T>({x, stride, order}, n, columns, factors, out);                                                  \
    }

EXPORT(float, float32)
EXPORT(double, float64)
