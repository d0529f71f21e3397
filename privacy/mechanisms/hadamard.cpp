// The Walsh–Hadamard transform in place, in natural order. Compiled once a machine by hadamard.py, which says the
// same in torch. Only sums and differences, always of the same pairs in the order of stages 1, 2, 4, …, and one
// product at the end: the bits do not depend on how stages are grouped here.

#include <cstdint>

namespace {

constexpr int64_t TILE = 1 << 13;  // floats that stay in a core's first caches for their first 13 stages
constexpr int64_t LANE = 16;

inline void pair(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum;
  b = difference;
}

// Stages 1 to 8 of LANE·LANE values, where the partners are in one vector: turned on its side, they are not.
inline void first_stages(float* x) {
  float t[LANE][LANE];
  for (int64_t i = 0; i < LANE; i++)
    for (int64_t j = 0; j < LANE; j++) t[j][i] = x[i * LANE + j];
  for (int64_t h = 1; h < LANE; h *= 2)
    for (int64_t j = 0; j < LANE; j += 2 * h)
      for (int64_t k = j; k < j + h; k++)
        for (int64_t i = 0; i < LANE; i++) pair(t[k][i], t[k + h][i]);
  for (int64_t i = 0; i < LANE; i++)
    for (int64_t j = 0; j < LANE; j++) x[i * LANE + j] = t[j][i];
}

inline void one_stage(float* __restrict__ a, float* __restrict__ b, int64_t count) {
  for (int64_t i = 0; i < count; i++) pair(a[i], b[i]);
}

// Stages h, 2h and 4h of 8h values from x on, for columns from `from` to `to`: memory is read and written once.
inline void three_stages(float* x, int64_t h, int64_t from, int64_t to) {
  float *__restrict__ p0 = x, *__restrict__ p1 = x + h, *__restrict__ p2 = x + 2 * h, *__restrict__ p3 = x + 3 * h,
        *__restrict__ p4 = x + 4 * h, *__restrict__ p5 = x + 5 * h, *__restrict__ p6 = x + 6 * h,
        *__restrict__ p7 = x + 7 * h;
  for (int64_t i = from; i < to; i++) {
    float v0 = p0[i], v1 = p1[i], v2 = p2[i], v3 = p3[i], v4 = p4[i], v5 = p5[i], v6 = p6[i], v7 = p7[i];
    pair(v0, v1), pair(v2, v3), pair(v4, v5), pair(v6, v7);
    pair(v0, v2), pair(v1, v3), pair(v4, v6), pair(v5, v7);
    pair(v0, v4), pair(v1, v5), pair(v2, v6), pair(v3, v7);
    p0[i] = v0, p1[i] = v1, p2[i] = v2, p3[i] = v3, p4[i] = v4, p5[i] = v5, p6[i] = v6, p7[i] = v7;
  }
}

// All stages from `h` on, up to `n`.
void stages(float* x, int64_t n, int64_t h) {
  for (; 8 * h <= n; h *= 8)
    for (int64_t start = 0; start < n; start += 8 * h) three_stages(x + start, h, 0, h);
  for (; h < n; h *= 2)
    for (int64_t start = 0; start < n; start += 2 * h) one_stage(x + start, x + start + h, h);
}

void tile(float* x, int64_t n) {
  int64_t h = 1;
  if (n >= LANE * LANE) {
    for (int64_t start = 0; start < n; start += LANE * LANE) first_stages(x + start);
    h = LANE;
  }
  stages(x, n, h);
}

}  // namespace

extern "C" void hadamard(float* x, int64_t n, float scale) {
  const int64_t step = n < TILE ? n : TILE;
  for (int64_t start = 0; start < n; start += step) tile(x + start, step);
  stages(x, n, step);
  for (int64_t i = 0; i < n; i++) x[i] *= scale;
}
