// The largest magnitudes of a vector, exactly, and their places as gaps in Golomb-Rice code.
#pragma once
#include "scales.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

// The magnitude (as bits) of the k-th largest of n values, and how many of those equal to it are among the k: two
// counts over 16 bits each. `counts` are 65,536 words. False for values that are not finite.
static int64_t find_threshold(const float* x, int64_t n, int64_t k, uint32_t* counts, uint32_t* answer) {
  uint32_t* part[2] = {counts, counts + 32768};
  memset(counts, 0, 65536 * sizeof *counts);
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) {
    part[0][(bits_of(x[i]) >> 16) & 0x7fff]++;
    part[1][(bits_of(x[i + 1]) >> 16) & 0x7fff]++;
  }
  if (i < n) part[0][(bits_of(x[i]) >> 16) & 0x7fff]++;
  for (uint32_t bin = 0x7f80; bin < 0x8000; bin++)
    if (part[0][bin] + part[1][bin]) return 0;
  uint32_t high = 0x7f80;
  uint64_t above = 0;
  while (high > 0 && above + part[0][high - 1] + part[1][high - 1] < (uint64_t)k) {
    high--;
    above += part[0][high] + part[1][high];
  }
  if (high == 0) return 0;  // k > n
  high--;
  memset(counts, 0, 65536 * sizeof *counts);
  int64_t j = 0;
#if defined(__AVX512F__)
  const __m512i top = _mm512_set1_epi32(0x7fff0000), wanted = _mm512_set1_epi32((int32_t)(high << 16));
  for (; j + 16 <= n; j += 16) {
    __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + j), top);
    for (uint32_t found = _mm512_cmpeq_epi32_mask(bits, wanted); found; found &= found - 1)
      counts[bits_of(x[j + __builtin_ctz(found)]) & 0xffff]++;
  }
#elif defined(__AVX2__)
  const __m256i top = _mm256_set1_epi32(0x7fff0000), wanted = _mm256_set1_epi32((int32_t)(high << 16));
  for (; j + 8 <= n; j += 8) {
    __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + j)), top);
    __m256i equal = _mm256_cmpeq_epi32(bits, wanted);
    for (uint32_t found = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(equal)); found; found &= found - 1)
      counts[bits_of(x[j + __builtin_ctz(found)]) & 0xffff]++;
  }
#endif
  for (; j < n; j++) {
    uint32_t bits = bits_of(x[j]) & 0x7fffffffu;
    if (__builtin_expect(bits >> 16 == high, 0)) counts[bits & 0xffff]++;
  }
  uint32_t low = 0x10000;
  while (above + counts[low - 1] < (uint64_t)k) above += counts[--low];
  low--;
  answer[0] = high << 16 | low;
  answer[1] = (uint32_t)((uint64_t)k - above);
  return 1;
}

static inline void take(const float* x, int64_t i, uint32_t bound, int64_t& ties, uint32_t* places, float* values,
                        int64_t& count) {
  uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
  if (bits < bound || (bits == bound && ties <= 0)) return;
  ties -= bits == bound;
  places[count] = (uint32_t)i;
  values[count++] = x[i];
}

// Places and values of magnitudes above `bound`, and of the first `ties` that are equal to it. Gives their number,
// in `taken` how many ties were among them.
static int64_t collect_largest(const float* x, int64_t n, uint32_t bound, int64_t ties, uint32_t* places,
                               float* values, int64_t* taken) {
  int64_t count = 0, i = 0, left = ties;
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32((int32_t)bound);
  for (; i + 16 <= n; i += 16) {
    __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), mask);
    for (uint32_t found = _mm512_cmpge_epi32_mask(bits, least); found; found &= found - 1)
      take(x, i + __builtin_ctz(found), bound, left, places, values, count);
  }
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(0x7fffffff), below = _mm256_set1_epi32((int32_t)bound - 1);
  for (; i + 8 <= n; i += 8) {
    __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + i)), mask);
    __m256i more = _mm256_cmpgt_epi32(bits, below);
    for (uint32_t found = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(more)); found; found &= found - 1)
      take(x, i + __builtin_ctz(found), bound, left, places, values, count);
  }
#endif
  for (; i < n; i++) take(x, i, bound, left, places, values, count);
  *taken = ties - left;
  return count;
}

// Golomb-Rice: gap - 1 as a quotient in ones and a zero, then `shift` bits; lowest bit first. The bytes that it took;
// `out` has room for ⌈(k (shift + 1) + (n >> shift)) / 8⌉ + 8.
static int64_t write_gaps(const uint32_t* places, int64_t k, int shift, uint8_t* out) {
  uint64_t held = 0, next = 0;
  int count = 0;
  int64_t at = 0;
  auto put = [&](uint64_t value, int bits) {
    held |= value << count;
    count += bits;
    while (count >= 8) out[at++] = (uint8_t)held, held >>= 8, count -= 8;
  };
  for (int64_t i = 0; i < k; i++) {
    uint64_t gap = places[i] - next;
    next = (uint64_t)places[i] + 1;
    for (uint64_t ones = gap >> shift; ones; ones -= ones < 32 ? ones : 32) {
      int bits = ones < 32 ? (int)ones : 32;
      put(((uint64_t)1 << bits) - 1, bits);
    }
    put(0, 1);
    put(gap & (((uint64_t)1 << shift) - 1), shift);
  }
  if (count) out[at++] = (uint8_t)held;
  return at;
}

// The places again, strictly ascending and below n. 0 for bytes that are anything else: too few, too many, a place
// at n or beyond, a bit set behind the last.
static int64_t read_gaps(const uint8_t* in, int64_t size, int64_t k, int shift, int64_t n, uint32_t* places) {
  int64_t at = 0, next = 0;  // in bits
  auto bit = [&]() { return at < 8 * size ? in[at >> 3] >> (at & 7) & 1 : -1; };
  for (int64_t i = 0; i < k; i++) {
    int64_t gap = 0;
    for (;; at++) {
      int one = bit();
      if (one < 0) return 0;
      if (!one) break;
      gap += (int64_t)1 << shift;
      if (next + gap >= n) return 0;
    }
    at++;
    if (at + shift > 8 * size) return 0;
    for (int j = 0; j < shift; j++, at++) gap |= (int64_t)(in[at >> 3] >> (at & 7) & 1) << j;
    next += gap;
    if (next >= n) return 0;
    places[i] = (uint32_t)next++;
  }
  if ((at + 7) / 8 != size) return 0;
  return at % 8 == 0 || in[at >> 3] >> (at & 7) == 0;
}
