// Matrix products in which one dimension is small: a batch of a few examples, or the few examples summed over.
//
// Nothing is packed: the large matrix is a layer's weights or their gradient, is read (and written) once where it
// lies, and what it is combined with stays in registers and the first-level cache.
#pragma once
#include "kernels_vector.h"

#if defined(__AVX512F__)
constexpr int DOT_ROWS = 6, SWEEP_ROWS = 8;
#elif defined(__AVX__)
constexpr int DOT_ROWS = 3, SWEEP_ROWS = 4;
#else
constexpr int DOT_ROWS = 6, SWEEP_ROWS = 8;
#endif

// What a product does with its sums s: c <- alpha s + beta p + gamma q, where p and q are read if there are any.
struct Finish {
  float alpha, beta, gamma;
  const float *p, *q;
  int64_t p_row, q_row;

  Finish at(int64_t row, int64_t column) const {
    return {alpha, beta, gamma, p ? p + row * p_row + column : p, q ? q + row * q_row + column : q, p_row, q_row};
  }
};

// c [R, 4] from rows of a [R, K] and of b [4, K].
template <int R>
static inline void dot_tile(int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                            int64_t c_row, int columns, const Finish& finish) {
  Vector sums[R][4] = {};
  for (int64_t k = 0; k < depth; k += WIDTH) {
    Vector right[4];
    bool whole = depth - k >= WIDTH;
    int rest = (int)(depth - k);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      // A missing column repeats the first, and is not stored.
      const float* from = b + (j < columns ? j : 0) * b_row + k;
      right[j] = whole ? load(from) : load_part(from, rest);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      Vector left = whole ? load(a + i * a_row + k) : load_part(a + i * a_row + k, rest);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    Four found = sum_each(sums[i][0], sums[i][1], sums[i][2], sums[i][3]) * finish.alpha;
    const float *p = finish.p ? finish.p + i * finish.p_row : nullptr;
    const float *q = finish.q ? finish.q + i * finish.q_row : nullptr;
    if (columns == 4) {
      if (p) found += finish.beta * *(const UnalignedFour*)p;
      if (q) found += finish.gamma * *(const UnalignedFour*)q;
      *(UnalignedFour*)(c + i * c_row) = found;
    } else {
      for (int j = 0; j < columns; j++)
        c[i * c_row + j] = found[j] + (p ? finish.beta * p[j] : 0.0f) + (q ? finish.gamma * q[j] : 0.0f);
    }
  }
}

template <int R>
static void dot_rows(int rows, int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                     int64_t c_row, int columns, const Finish& finish) {
  if (rows == R)
    dot_tile<R>(depth, a, a_row, b, b_row, c, c_row, columns, finish);
  else if constexpr (R > 1)
    dot_rows<R - 1>(rows, depth, a, a_row, b, b_row, c, c_row, columns, finish);
}

// How many rows each of the fewest tiles of at most `most` rows takes.
static inline int64_t even(int64_t rows, int64_t most) {
  int64_t tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// c [M, N] <- a [M, K] b [N, K]^T: a layer forward.
static void dot_product(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row, const float* b,
                        int64_t b_row, float* c, int64_t c_row, const Finish& finish) {
  int64_t step = even(m, DOT_ROWS);
  for (int64_t j = 0; j < n; j += 4)
    for (int64_t i = 0; i < m; i += step)
      dot_rows<DOT_ROWS>((int)(m - i < step ? m - i : step), depth, a + i * a_row, a_row, b + j * b_row, b_row,
                         c + i * c_row + j, c_row, (int)(n - j < 4 ? n - j : 4), finish.at(i, j));
}

// c [R, C vectors] from a [R, K] of any strides and rows of b [K, C vectors]; a single vector may be a part of one.
template <int R, int C>
static inline void sweep_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
                              int64_t b_row, float* c, int64_t c_row, int part, const Finish& finish) {
  Vector sums[R][C] = {};
  for (int64_t k = 0; k < depth; k++) {
    Vector right[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++)
      right[j] = C == 1 ? load_part(b + k * b_row, part) : load(b + k * b_row + j * WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      Vector left = splat(a[i * a_row + k * a_column]);
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) {
      const float *p = finish.p ? finish.p + i * finish.p_row + j * WIDTH : nullptr;
      const float *q = finish.q ? finish.q + i * finish.q_row + j * WIDTH : nullptr;
      Vector found = sums[i][j] * finish.alpha;
      float* to = c + i * c_row + j * WIDTH;
      if (C == 1) {
        if (p) found += finish.beta * load_part(p, part);
        if (q) found += finish.gamma * load_part(q, part);
        store_part(to, found, part);
      } else {
        if (p) found += finish.beta * load(p);
        if (q) found += finish.gamma * load(q);
        store(to, found);
      }
    }
}

// One band of rows, over columns [first, last).
template <int R>
static void sweep_band(int rows, int64_t first, int64_t last, int64_t depth, const float* a, int64_t a_row,
                       int64_t a_column, const float* b, int64_t b_row, float* c, int64_t c_row,
                       const Finish& finish) {
  if (rows != R) {
    if constexpr (R > 1) sweep_band<R - 1>(rows, first, last, depth, a, a_row, a_column, b, b_row, c, c_row, finish);
    return;
  }
  constexpr int C = 3;
  int64_t j = first;
  for (; j + C * WIDTH <= last; j += C * WIDTH)
    sweep_tile<R, C>(depth, a, a_row, a_column, b + j, b_row, c + j, c_row, WIDTH, finish.at(0, j));
  for (; j < last; j += WIDTH) {
    int part = (int)(last - j < WIDTH ? last - j : WIDTH);
    sweep_tile<R, 1>(depth, a, a_row, a_column, b + j, b_row, c + j, c_row, part, finish.at(0, j));
  }
}

// c [M, N] <- a [M, K] b [K, N]: a layer backward, and its gradient straight into its weights.
static void sweep_product(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row, int64_t a_column,
                          const float* b, int64_t b_row, float* c, int64_t c_row, const Finish& finish) {
  int64_t step = even(m, SWEEP_ROWS);
  // Columns in blocks, so that the rows of b stay in the first-level cache where there are few of them.
  int64_t block = depth <= 32 ? 8 * 3 * WIDTH : n;
  for (int64_t j = 0; j < n; j += block)
    for (int64_t i = 0; i < m; i += step)
      sweep_band<SWEEP_ROWS>((int)(m - i < step ? m - i : step), j, j + block < n ? j + block : n, depth,
                             a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, finish.at(i, 0));
}
