// Codes of 4 bits that stand for 16 values, with a scale for each block.
#pragma once
#include "packing.h"
#include "scales.h"

struct Table4 {
  const float* bounds;  // 15, ascending: a value's code is how many of them it exceeds; or 7 of its magnitude
  const float* values;  // 16, by code
  float peak;           // the largest magnitude that a code stands for
  int64_t magnitudes;   // whether bounds are of magnitudes, and bit 3 of a code is the sign

  void codes_of(const float* x, int64_t n, float inverse, uint8_t* codes) const {
    if (magnitudes) {
      float b[7];
      memcpy(b, bounds, sizeof b);
      for (int64_t i = 0; i < n; i++) {
        float v = x[i] * inverse, m = __builtin_fabsf(v);
        int32_t code = 0;
        for (int j = 0; j < 7; j++) code += m > b[j];
        codes[i] = (uint8_t)(code | ((v < 0) & (code > 0)) << 3);
      }
      return;
    }
    float b[15];
    memcpy(b, bounds, sizeof b);
    for (int64_t i = 0; i < n; i++) {
      float v = x[i] * inverse;
      int32_t code = 0;
      for (int j = 0; j < 15; j++) code += v > b[j];
      codes[i] = (uint8_t)code;
    }
  }

  bool block(const float* x, int64_t n, bool wide, uint8_t* out) const {
    uint8_t codes[LARGEST];
    float most = float_of(largest(x, n));
    float scale = is_finite(most) ? kept_scale(most / peak, wide) : most;
    if (!is_finite(scale * peak)) return false;
    codes_of(x, n, scale > 0 ? 1.0f / scale : 0.0f, codes);
    Packing<4>::pack(codes, n, write_scale(out, scale, wide));
    return true;
  }

  Flaw unblock(const uint8_t* in, int64_t n, bool wide, float* out) const {
    uint8_t codes[LARGEST];
    float scale, scaled[16];
    if (!read_scale(in, wide, scale)) return BAD_SCALE;
    if (!Packing<4>::unpack(in, n, codes)) return BAD_PADDING;
    if (magnitudes) {
      uint8_t outside = 0;
      for (int64_t i = 0; i < n; i++) outside |= codes[i] == 8;
      if (outside) return BAD_CODE;
    }
    for (int i = 0; i < 16; i++) {
      scaled[i] = values[i] * scale;
      if (!is_finite(scaled[i])) return BAD_SCALE;
    }
    for (int64_t i = 0; i < n; i++) out[i] = scaled[codes[i]];
    return SOUND;
  }
};
