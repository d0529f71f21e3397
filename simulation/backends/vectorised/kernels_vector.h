// Vectors of floats as wide as the processor's, and the functions of them that activations need.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));

static inline Vector splat(float x) { return x - Vector{}; }
static inline Vector load(const float* from) { return *(const Unaligned*)from; }
static inline void store(float* to, Vector v) { *(Unaligned*)to = v; }

#if defined(__AVX__) && !defined(__AVX512F__)
// A mask of the first `count` of eight lanes.
static inline __m256i first_lanes(int count) {
  alignas(64) static const int32_t LANES[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return _mm256_loadu_si256((const __m256i*)(LANES + 8 - count));
}
#endif

// The first `count` of a vector; what lies beyond is not touched in memory and zero in the register.
static inline Vector load_part(const float* from, int count) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif defined(__AVX__)
  return (Vector)_mm256_maskload_ps(from, first_lanes(count));
#else
  Vector v{};
  memcpy(&v, from, count * sizeof(float));
  return v;
#endif
}

static inline void store_part(float* to, Vector v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#elif defined(__AVX__)
  _mm256_maskstore_ps(to, first_lanes(count), (__m256)v);
#else
  memcpy(to, &v, count * sizeof(float));
#endif
}

// Four lanes whose sum is the sum of all.
static inline Four fold(Vector v) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  Eight half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

// The sums of four vectors' lanes.
static inline Four sum_each(Vector a, Vector b, Vector c, Vector d) {
  Four w = fold(a), x = fold(b), y = fold(c), z = fold(d);
  Four wx = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
  Four yz = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
  return __builtin_shufflevector(wx, yz, 0, 1, 4, 5) + __builtin_shufflevector(wx, yz, 2, 3, 6, 7);
}

static inline float sum(Vector v) {
  Four four = fold(v);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
static inline Vector magnitude(Vector x) { return x < 0.0f ? -x : x; }

// e to the x: 2^n times a polynomial of what is left (Cephes' expf, 1 unit in the last place).
static inline Vector exponential(Vector x) {
  Vector inside = x > 88.7f ? splat(88.7f) : (x < -87.3f ? splat(-87.3f) : x);
  Vector n = (inside * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  Vector r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The bits of n + 1.5 * 2^23 hold n; no conversion is needed that would be undefined for NaN.
  Integers power = ((Integers)(n + 12582912.0f) - 0x4b400000 + 127) << 23;
  Vector y = p * (Vector)power;
  y = x > 88.72283f ? splat(INFINITY) : y;
  return x < -103.9f ? splat(0.0f) : y;
}

static inline Vector inverse_root(Vector x) {
  Vector y{};
  for (int lane = 0; lane < WIDTH; ++lane) y[lane] = 1.0f / sqrtf(x[lane]);
  return y;
}

// Cephes' tanhf.
static inline Vector hyperbolic_tangent(Vector x) {
  Vector z = x * x, p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Vector small = p * z * x + x;
  Vector size = magnitude(x);
  Vector big = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  big = x < 0.0f ? -big : big;
  return size < 0.625f ? small : big;
}

static inline Vector logistic(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

// Abramowitz and Stegun 7.1.26: 1.5e-7 at most from erf.
static inline Vector error_function(Vector x) {
  Vector size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size);
  Vector p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Vector y = 1.0f - p * t * exponential(-size * size);
  return x < 0.0f ? -y : y;
}
