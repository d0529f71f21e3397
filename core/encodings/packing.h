// Codes of 8, 4, 2 or 1 bits, packed so that neighbours in memory stay neighbours: with h = ⌈n/parts⌉ bytes, byte i
// holds elements i, i + h, i + 2h, ... from its lowest bits upwards.
#pragma once
#include <cstdint>
#include <cstring>

template <int BITS>
struct Packing {
  static constexpr int PARTS = 8 / BITS, MASK = (1 << BITS) - 1;

  static int64_t bytes(int64_t n) { return (n + PARTS - 1) / PARTS; }

  static void pack(const uint8_t* codes, int64_t n, uint8_t* out) {
    int64_t h = bytes(n);
    if (n % PARTS) {
      memset(out, 0, h);
      for (int64_t i = 0; i < n; i++) out[i % h] |= (uint8_t)(codes[i] << (i / h * BITS));
      return;
    }
    for (int64_t i = 0; i < h; i++) {
      uint8_t byte = 0;
      for (int part = 0; part < PARTS; part++) byte |= (uint8_t)(codes[part * h + i] << (part * BITS));
      out[i] = byte;
    }
  }

  // Unpacks into `codes`; whether what lies behind the last code is zero.
  static bool unpack(const uint8_t* in, int64_t n, uint8_t* codes) {
    int64_t h = bytes(n);
    if (n % PARTS == 0) {
      for (int part = 0; part < PARTS; part++)
        for (int64_t i = 0; i < h; i++) codes[part * h + i] = (uint8_t)(in[i] >> (part * BITS)) & MASK;
      return true;
    }
    bool clean = true;
    for (int64_t place = 0; place < h * PARTS; place++) {
      uint8_t code = (uint8_t)(in[place % h] >> (place / h * BITS)) & MASK;
      if (place < n)
        codes[place] = code;
      else
        clean &= code == 0;
    }
    return clean;
  }
};
