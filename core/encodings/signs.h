// One bit for each value, 1 where its sign bit is clear, lowest bit first; the scale is the mean magnitude.
#pragma once
#include "scales.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

static void pack_signs(const float* x, int64_t n, uint8_t* out) {
  int64_t i = 0;
#ifdef __AVX2__
  for (; i + 8 <= n; i += 8) out[i / 8] = (uint8_t)~_mm256_movemask_ps(_mm256_loadu_ps(x + i));
#endif
  for (; i < n; i += 8) {
    uint8_t byte = 0;
    for (int64_t j = 0; j < 8 && i + j < n; j++) byte |= (uint8_t)((~bits_of(x[i + j]) >> 31) << j);
    out[i / 8] = byte;
  }
}

static bool sign_block(const float* x, int64_t n, bool wide, uint8_t* out) {
  float most = float_of(largest(x, n));
  if (!is_finite(most)) return false;
  float scale = kept_scale(mean_of(x, n, most), wide);
  if (!is_finite(scale)) return false;
  pack_signs(x, n, write_scale(out, scale, wide));
  return true;
}

static Flaw sign_unblock(const uint8_t* in, int64_t n, bool wide, float* out) {
  float scale;
  if (!read_scale(in, wide, scale)) return BAD_SCALE;
  uint32_t bits = bits_of(scale);
  if (n % 8 && in[n / 8] >> (n % 8)) return BAD_PADDING;
  int64_t whole = n / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    uint32_t byte = ~(uint32_t)in[i / 8];
    for (int64_t j = 0; j < 8; j++) out[i + j] = float_of(bits | ((byte >> j) & 1u) << 31);
  }
  for (int64_t i = whole; i < n; i++) out[i] = float_of(bits | ((~(uint32_t)in[i / 8] >> (i % 8)) & 1u) << 31);
  return SOUND;
}
