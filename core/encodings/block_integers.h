// Whole numbers of 8, 4 or 2 bits with a scale for each block: a block is its scale, then its codes.
#pragma once
#include "draws.h"
#include "packing.h"
#include "scales.h"

enum Rounding { NEAREST = 0, STOCHASTIC = 1, MAGNITUDE = 2 };  // MAGNITUDE: ⌊|x|/s + u⌋ with the sign of x

template <int BITS>
struct Integers {
  static constexpr int MIDDLE = BITS == 8 ? 0 : 1 << (BITS - 1);
  typedef Packing<BITS> Codes;

  // Kept apart: inlined into its caller GCC 12 does not turn it into vectors.
  template <int ROUNDING>
  __attribute__((noinline)) static void quantise(const float* x, int64_t n, float inverse, float levels, Draws draws, uint32_t place,
                       uint8_t* codes) {
    // Places count in 32 bits: wider ones would halve the lanes.
    for (int32_t i = 0; i < (int32_t)n; i++) {
      float v = x[i] * inverse;
      if (ROUNDING == NEAREST)
        v = __builtin_rintf(v);
      else if (ROUNDING == STOCHASTIC)
        v = __builtin_floorf(v + draws.uniform(place + (uint32_t)i));
      else
        v = __builtin_copysignf(__builtin_floorf(__builtin_fabsf(v) + draws.uniform(place + (uint32_t)i)), v);
      v = v < levels ? v : levels;
      v = v > -levels ? v : -levels;
      codes[i] = (uint8_t)((int32_t)v + MIDDLE);
    }
  }

  static bool block(const float* x, int64_t n, int levels, bool of_norm, bool wide, int rounding, Draws draws,
                    uint32_t place, uint8_t* out) {
    uint8_t codes[LARGEST];
    float most = float_of(largest(x, n));
    if (!is_finite(most)) return false;
    float scale = kept_scale(of_norm ? norm_of(x, n, most) / (float)levels : most / (float)levels, wide);
    if (!is_finite(scale * (float)levels)) return false;
    float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    out = write_scale(out, scale, wide);
    uint8_t* to = BITS == 8 ? out : codes;
    if (rounding == NEAREST)
      quantise<NEAREST>(x, n, inverse, (float)levels, draws, place, to);
    else if (rounding == STOCHASTIC)
      quantise<STOCHASTIC>(x, n, inverse, (float)levels, draws, place, to);
    else
      quantise<MAGNITUDE>(x, n, inverse, (float)levels, draws, place, to);
    if (BITS < 8) Codes::pack(codes, n, out);
    return true;
  }

  static Flaw unblock(const uint8_t* in, int64_t n, int levels, bool wide, float* out) {
    uint8_t codes[LARGEST];
    float scale;
    if (!read_scale(in, wide, scale) || !is_finite(scale * (float)levels)) return BAD_SCALE;
    const uint8_t* from = in;
    if (BITS < 8) {
      if (!Codes::unpack(in, n, codes)) return BAD_PADDING;
      from = codes;
    }
    uint8_t outside = 0;
    for (int64_t i = 0; i < n; i++) {
      int8_t q = (int8_t)(from[i] - MIDDLE);
      outside |= (uint8_t)(q > levels) | (uint8_t)(q < -levels);
    }
    if (outside) return BAD_CODE;
    for (int64_t i = 0; i < n; i++) out[i] = (float)(int8_t)(from[i] - MIDDLE) * scale;
    return SOUND;
  }

  // The number of the first block that cannot be encoded, or -1.
  static int64_t encode(const float* x, int64_t n, int64_t size, int levels, bool of_norm, bool wide, int rounding,
                        uint64_t key, uint64_t first, uint8_t* out) {
    for (int64_t at = 0; at < n; at += size) {
      int64_t count = n - at < size ? n - at : size;
      uint64_t place = first + (uint64_t)at;
      if (!block(x + at, count, levels, of_norm, wide, rounding, Draws(key, place), (uint32_t)place, out))
        return at / size;
      out += (wide ? 4 : 2) + Codes::bytes(count);
    }
    return -1;
  }

  static int64_t decode(const uint8_t* in, int64_t n, int64_t size, int levels, bool wide, float* out) {
    for (int64_t at = 0; at < n; at += size) {
      int64_t count = n - at < size ? n - at : size;
      if (Flaw flaw = unblock(in, count, levels, wide, out + at)) return flaw;
      in += (wide ? 4 : 2) + Codes::bytes(count);
    }
    return SOUND;
  }
};
