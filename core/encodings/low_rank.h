// Products of two thin matrices, value by value in the order of the flat vector.
#pragma once
#include <cstdint>

// Values first .. first + count of P Q, P [m, rank] and Q [rank, columns]: Σ p·q in the order of the rank, each
// product and each sum rounded to float32.
static void multiply_factors(const float* p, const float* q, int64_t rank, int64_t columns, int64_t first,
                             int64_t count, float* out) {
  const int64_t piece = 2048;
  while (count > 0) {
    int64_t row = first / columns, column = first % columns;
    int64_t length = columns - column;
    length = length < count ? length : count;
    length = length < piece ? length : piece;
    const float *left = p + row * rank, *right = q + column;
    for (int64_t j = 0; j < length; j++) out[j] = left[0] * right[j];
    for (int64_t k = 1; k < rank; k++) {
      const float factor = left[k], *next = right + k * columns;
      for (int64_t j = 0; j < length; j++) out[j] += factor * next[j];
    }
    out += length, first += length, count -= length;
  }
}
