// Levels that are no multiples of one scale: from the least to the greatest of a block, and powers of two.
#pragma once
#include "draws.h"
#include "packing.h"
#include "scales.h"

// Equal steps from the least to the greatest: a block is both as float32 (least, step), then its codes.
template <int BITS>
struct Range {
  static constexpr float STEPS = (float)((1 << BITS) - 1);
  static int64_t bytes(int64_t n) { return BITS == 16 ? 2 * n : Packing<BITS == 16 ? 8 : BITS>::bytes(n); }

  static bool block(const float* x, int64_t n, uint8_t* out) {
    uint8_t codes[LARGEST];
    if (!is_finite(float_of(largest(x, n)))) return false;
    float low = x[0], high = x[0];
    for (int64_t i = 0; i < n; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    float step = (float)(((double)high - (double)low) / STEPS);
    if (!is_finite(step)) return false;
    if (step < SMALLEST) step = 0.0f;
    float inverse = step > 0 ? 1.0f / step : 0.0f;
    low += 0.0f;  // never minus zero
    memcpy(out, &low, 4), memcpy(out + 4, &step, 4);
    out += 8;
    for (int64_t i = 0; i < n; i++) {
      float v = __builtin_rintf((x[i] - low) * inverse);
      v = v < STEPS ? v : STEPS;
      v = v > 0 ? v : 0;
      if (BITS == 16) {
        uint16_t code = (uint16_t)(int32_t)v;
        memcpy(out + 2 * i, &code, 2);
      } else
        codes[i] = (uint8_t)(int32_t)v;
    }
    if (BITS < 16) Packing<BITS == 16 ? 8 : BITS>::pack(codes, n, out);
    return true;
  }

  static Flaw unblock(const uint8_t* in, int64_t n, float* out) {
    uint8_t codes[LARGEST];
    float low, step;
    memcpy(&low, in, 4), memcpy(&step, in + 4, 4);
    in += 8;
    bool sound = is_finite(low) && bits_of(low) != 0x80000000u && bits_of(step) < 0x7f800000u;
    if (!sound || (step != 0 && step < SMALLEST) || !is_finite(low + STEPS * step)) return BAD_SCALE;
    if (BITS < 16 && !Packing<BITS == 16 ? 8 : BITS>::unpack(in, n, codes)) return BAD_PADDING;
    for (int64_t i = 0; i < n; i++) {
      uint16_t code;
      if (BITS == 16)
        memcpy(&code, in + 2 * i, 2);
      else
        code = codes[i];
      float product = (float)code * step;
      out[i] = low + product;
    }
    return SOUND;
  }
};

// Powers of two: 64 values are 64 bytes of exponents, then 8 of signs (lowest bit first, 1 for negative ones).
static bool natural_block(const float* x, int64_t n, Draws draws, uint32_t place, uint8_t* out) {
  uint8_t negative[LARGEST + 8];
  uint32_t bad = 0;
  for (int32_t i = 0; i < (int32_t)n; i++) {
    uint32_t bits = bits_of(x[i]), exponent = bits >> 23 & 0xff;
    exponent += (exponent != 0) & ((draws.bits(place + (uint32_t)i) >> 9) < (bits & 0x7fffffu));
    bad |= exponent >= 255;
    out[i] = (uint8_t)exponent;
    negative[i] = (uint8_t)((exponent != 0) & (bits >> 31));
  }
  uint8_t* signs = out + n;
  memset(negative + n, 0, 8);
  for (int64_t i = 0; i < n; i += 8) {
    uint8_t byte = 0;
    for (int64_t j = 0; j < 8; j++) byte |= (uint8_t)(negative[i + j] << j);
    signs[i / 8] = byte;
  }
  return !bad;
}

static Flaw natural_unblock(const uint8_t* in, int64_t n, float* out) {
  const uint8_t* signs = in + n;
  if (n % 8 && signs[n / 8] >> (n % 8)) return BAD_PADDING;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t sign = signs[i / 8] >> (i % 8) & 1u;
    bad |= in[i] == 255 || (sign && !in[i]);
    out[i] = float_of(sign << 31 | (uint32_t)in[i] << 23);
  }
  return bad ? BAD_CODE : SOUND;
}
