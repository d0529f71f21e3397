// Numbers of one update's stream: each is a function of a 64-bit key and a place, so that threads, restarts and the
// order of work change none. The mix is of 32 bits (lowbias32, Wellons 2018), keyed between its multiplications:
// good for rounding, and no cipher.
#pragma once
#include <cstdint>

struct Draws {
  uint32_t low, high;

  // The numbers of the 2^32 places to which `place` belongs.
  Draws(uint64_t key, uint64_t place) {
    uint64_t mixed = key + (place >> 32) * 0x9e3779b97f4a7c15ull;
    low = (uint32_t)mixed, high = (uint32_t)(mixed >> 32);
  }

  uint32_t bits(uint32_t place) const {
    uint32_t h = place + low;
    h ^= h >> 16, h *= 0x7feb352du;
    h ^= high;
    h ^= h >> 15, h *= 0x846ca68bu;
    return h ^ h >> 16;
  }

  // Uniform in [0, 1), of 24 bits.
  float uniform(uint32_t place) const { return (float)(int32_t)(bits(place) >> 8) * 0x1p-24f; }
};
