// What all encodings in blocks share: how a block's scale is written, read and checked.
#pragma once
#include <cstdint>
#include <cstring>

enum Flaw { SOUND = 0, BAD_SCALE = 1, BAD_CODE = 2, BAD_PADDING = 3 };

constexpr int64_t LARGEST = 4096;  // values of a block
constexpr float SMALLEST = 0x1p-100f;  // scales below it are written as zero: their reciprocal must be finite

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The largest magnitude, as bits: those of NaN and infinity are larger than all others.
static inline uint32_t largest(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

// The scale as it will be read: a bfloat16 rounded up unless it is `wide`. Infinite where none is large enough.
static inline float kept_scale(float scale, bool wide) {
  if (scale < SMALLEST) return 0.0f;
  return wide ? scale : float_of((bits_of(scale) + 0xffffu) & 0xffff0000u);
}

static inline bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

// Sums of a block that have the same bits in any order: terms are whole multiples of 2^-38 below 4, and there are at
// most 4,096 of them, so that a double holds every sum of them exactly.
struct Exact {
  double unit;  // a power of two with all magnitudes of the block in [0, 2)

  explicit Exact(float most) { unit = float_of(bits_of(most) & 0x7f800000u); }
  static double rounded(double term) { return (term + 0x1.8p14) - 0x1.8p14; }  // to a multiple of 2^-38
};

// Σ|x|/n, up to rounding.
static inline float mean_of(const float* x, int64_t n, float most) {
  Exact exact(most);
  if (!(exact.unit > 0)) return 0.0f;
  double inverse = 1.0 / exact.unit, sum = 0;
  for (int64_t i = 0; i < n; i++) sum += Exact::rounded((double)__builtin_fabsf(x[i]) * inverse);
  return (float)(sum / (double)n * exact.unit);
}

// The Euclidean norm, rounded so that it is never too small.
static inline float norm_of(const float* x, int64_t n, float most) {
  Exact exact(most);
  if (!(exact.unit > 0)) return 0.0f;
  double inverse = 1.0 / exact.unit, sum = 0;
  for (int64_t i = 0; i < n; i++) {
    double scaled = (double)x[i] * inverse;
    sum += Exact::rounded(scaled * scaled);
  }
  return (float)(__builtin_sqrt(sum) * exact.unit * (1 + 0x1p-22));
}

static inline uint8_t* write_scale(uint8_t* out, float scale, bool wide) {
  uint32_t bits = bits_of(scale);
  if (wide) return (uint8_t*)memcpy(out, &bits, 4) + 4;
  uint16_t half = (uint16_t)(bits >> 16);
  return (uint8_t*)memcpy(out, &half, 2) + 2;
}

// False for a scale that no encoder writes: negative, minus zero, NaN, infinite, or below the smallest.
static inline bool read_scale(const uint8_t*& in, bool wide, float& scale) {
  uint32_t bits = 0;
  if (wide)
    memcpy(&bits, in, 4);
  else {
    uint16_t half;
    memcpy(&half, in, 2);
    bits = (uint32_t)half << 16;
  }
  in += wide ? 4 : 2;
  scale = float_of(bits);
  return bits == 0 || (bits < 0x7f800000u && scale >= SMALLEST);
}
