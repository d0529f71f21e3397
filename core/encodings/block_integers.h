// Whole numbers of 8, 4 or 2 bits with a scale for each block.
//
// A block is its scale, then its codes. Codes of fewer than 8 bits are packed so that neighbours in memory stay
// neighbours: with h = ⌈n/parts⌉ bytes, byte i holds elements i, i + h, i + 2h, ... from its lowest bits upwards.
#pragma once
#include "draws.h"
#include "scales.h"

template <int BITS>
struct Integers {
  static constexpr int PARTS = 8 / BITS, LEVELS = (1 << (BITS - 1)) - 1, MIDDLE = BITS == 8 ? 0 : 1 << (BITS - 1);
  static constexpr int MASK = (1 << BITS) - 1;

  static int64_t bytes(int64_t n) { return (n + PARTS - 1) / PARTS; }

  static void pack(const uint8_t* codes, int64_t n, uint8_t* out) {
    int64_t h = bytes(n);
    if (BITS == 8) {
      memcpy(out, codes, n);
      return;
    }
    memset(out, 0, h);
    for (int part = 0; part < PARTS; part++) {
      int64_t count = n - part * h < h ? n - part * h : h;
      const uint8_t* from = codes + part * h;
      for (int64_t i = 0; i < count; i++) out[i] |= (uint8_t)(from[i] << (part * BITS));
    }
  }

  // Unpacks into `codes`; whether what lies behind the last code is zero.
  static bool unpack(const uint8_t* in, int64_t n, uint8_t* codes) {
    int64_t h = bytes(n);
    bool clean = true;
    for (int part = 0; part < PARTS; part++) {
      int64_t count = n - part * h < h ? n - part * h : h;
      if (count < 0) count = 0;
      uint8_t* to = codes + part * h;
      for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)(in[i] >> (part * BITS)) & MASK;
      for (int64_t i = count; i < h; i++) clean &= ((in[i] >> (part * BITS)) & MASK) == 0;
    }
    return clean;
  }

  template <bool STOCHASTIC>
  static bool block(const float* x, int64_t n, bool wide, Draws draws, uint32_t place, uint8_t* out) {
    uint8_t codes[LARGEST];
    float most = float_of(largest(x, n));
    float scale = is_finite(most) ? kept_scale(most / LEVELS, wide) : most;
    if (!is_finite(scale)) return false;
    float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < n; i++) {
      float v = x[i] * inverse;
      v = STOCHASTIC ? __builtin_floorf(v + draws.uniform(place + (uint32_t)i)) : __builtin_rintf(v);
      v = v < (float)LEVELS ? v : (float)LEVELS;
      v = v > (float)-LEVELS ? v : (float)-LEVELS;
      codes[i] = (uint8_t)((int32_t)v + MIDDLE);
    }
    pack(codes, n, write_scale(out, scale, wide));
    return true;
  }

  static Flaw unblock(const uint8_t* in, int64_t n, bool wide, float* out) {
    uint8_t codes[LARGEST];
    float scale;
    if (!read_scale(in, wide, scale)) return BAD_SCALE;
    const uint8_t* from = in;
    if (BITS < 8) {
      if (!unpack(in, n, codes)) return BAD_PADDING;
      from = codes;
    }
    constexpr uint8_t OUTSIDE = BITS == 8 ? 0x80 : 0;  // -128, -8, -2: an encoder is symmetric
    uint8_t outside = 0;
    for (int64_t i = 0; i < n; i++) outside |= from[i] == OUTSIDE;
    if (outside) return BAD_CODE;
    for (int64_t i = 0; i < n; i++) out[i] = (float)((BITS == 8 ? (int32_t)(int8_t)from[i] : from[i]) - MIDDLE) * scale;
    return SOUND;
  }

  // The number of the first block that cannot be encoded, or -1.
  static int64_t encode(const float* x, int64_t n, int64_t size, bool wide, bool stochastic, uint64_t key,
                        uint64_t first, uint8_t* out) {
    for (int64_t at = 0; at < n; at += size) {
      int64_t count = n - at < size ? n - at : size;
      Draws draws(key, first + at);
      uint32_t place = (uint32_t)(first + at);
      bool done = stochastic ? block<true>(x + at, count, wide, draws, place, out)
                             : block<false>(x + at, count, wide, draws, place, out);
      if (!done) return at / size;
      out += (wide ? 4 : 2) + bytes(count);
    }
    return -1;
  }

  static int64_t decode(const uint8_t* in, int64_t n, int64_t size, bool wide, float* out) {
    for (int64_t at = 0; at < n; at += size) {
      int64_t count = n - at < size ? n - at : size;
      if (Flaw flaw = unblock(in, count, wide, out + at)) return flaw;
      in += (wide ? 4 : 2) + bytes(count);
    }
    return SOUND;
  }
};
