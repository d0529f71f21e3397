// Kernels of the encodings. Compiled once a machine by compiled.py, without fused multiply-add: the same bits come
// out on every processor, and out of the same arithmetic in torch. On one thread; nothing is allocated.
#include "block_integers.h"
#include "levels.h"
#include "low_rank.h"
#include "signs.h"
#include "sparse.h"
#include "tables4.h"

// Walks over blocks: `step(x, count, out)` writes one and is false for what cannot be encoded; `bytes(count)` is its
// size. The number of the first such block, or -1.
template <class Step, class Bytes>
static int64_t each_block(const float* x, int64_t n, int64_t size, uint8_t* out, Step step, Bytes bytes) {
  for (int64_t at = 0; at < n; at += size) {
    int64_t count = n - at < size ? n - at : size;
    if (!step(x + at, count, at, out)) return at / size;
    out += bytes(count);
  }
  return -1;
}

template <class Step, class Bytes>
static int64_t each_coded(const uint8_t* in, int64_t n, int64_t size, float* out, Step step, Bytes bytes) {
  for (int64_t at = 0; at < n; at += size) {
    int64_t count = n - at < size ? n - at : size;
    if (Flaw flaw = step(in, count, out + at)) return flaw;
    in += bytes(count);
  }
  return SOUND;
}

template <int BITS>
static int64_t encode_range_of(const float* x, int64_t n, int64_t size, uint8_t* out) {
  auto step = [](const float* x, int64_t count, int64_t, uint8_t* out) { return Range<BITS>::block(x, count, out); };
  return each_block(x, n, size, out, step, [](int64_t count) { return 8 + Range<BITS>::bytes(count); });
}

template <int BITS>
static int64_t decode_range_of(const uint8_t* in, int64_t n, int64_t size, float* out) {
  return each_coded(in, n, size, out, Range<BITS>::unblock, [](int64_t count) { return 8 + Range<BITS>::bytes(count); });
}

extern "C" {

int64_t encode_integers(const float* x, int64_t n, int64_t size, int64_t bits, int64_t levels, int64_t of_norm,
                        int64_t wide, int64_t rounding, uint64_t key, uint64_t first, uint8_t* out) {
  auto encode = bits == 8   ? Integers<8>::encode
                : bits == 4 ? Integers<4>::encode
                            : Integers<2>::encode;
  return encode(x, n, size, (int)levels, of_norm, wide, (int)rounding, key, first, out);
}

int64_t decode_integers(const uint8_t* in, int64_t n, int64_t size, int64_t bits, int64_t levels, int64_t wide,
                        float* out) {
  auto decode = bits == 8   ? Integers<8>::decode
                : bits == 4 ? Integers<4>::decode
                            : Integers<2>::decode;
  return decode(in, n, size, (int)levels, wide, out);
}

int64_t encode_table(const float* x, int64_t n, int64_t size, const float* bounds, int64_t magnitudes,
                     const float* peak, int64_t wide, uint8_t* out) {
  Table4 table{bounds, nullptr, *peak, magnitudes};
  auto step = [&](const float* x, int64_t count, int64_t, uint8_t* out) { return table.block(x, count, wide, out); };
  return each_block(x, n, size, out, step, [&](int64_t count) { return (wide ? 4 : 2) + (count + 1) / 2; });
}

int64_t decode_table(const uint8_t* in, int64_t n, int64_t size, const float* values, int64_t magnitudes,
                     int64_t wide, float* out) {
  Table4 table{nullptr, values, 0.0f, magnitudes};
  auto step = [&](const uint8_t* in, int64_t count, float* out) { return table.unblock(in, count, wide, out); };
  return each_coded(in, n, size, out, step, [&](int64_t count) { return (wide ? 4 : 2) + (count + 1) / 2; });
}

int64_t encode_signs(const float* x, int64_t n, int64_t size, int64_t wide, uint8_t* out) {
  auto step = [&](const float* x, int64_t count, int64_t, uint8_t* out) { return sign_block(x, count, wide, out); };
  return each_block(x, n, size, out, step, [&](int64_t count) { return (wide ? 4 : 2) + (count + 7) / 8; });
}

int64_t decode_signs(const uint8_t* in, int64_t n, int64_t size, int64_t wide, float* out) {
  auto step = [&](const uint8_t* in, int64_t count, float* out) { return sign_unblock(in, count, wide, out); };
  return each_coded(in, n, size, out, step, [&](int64_t count) { return (wide ? 4 : 2) + (count + 7) / 8; });
}

int64_t encode_range(const float* x, int64_t n, int64_t size, int64_t bits, uint8_t* out) {
  auto encode = bits == 16  ? encode_range_of<16>
                : bits == 8 ? encode_range_of<8>
                : bits == 4 ? encode_range_of<4>
                            : encode_range_of<2>;
  return encode(x, n, size, out);
}

int64_t decode_range(const uint8_t* in, int64_t n, int64_t size, int64_t bits, float* out) {
  auto decode = bits == 16  ? decode_range_of<16>
                : bits == 8 ? decode_range_of<8>
                : bits == 4 ? decode_range_of<4>
                            : decode_range_of<2>;
  return decode(in, n, size, out);
}

int64_t encode_natural(const float* x, int64_t n, int64_t size, uint64_t key, uint64_t first, uint8_t* out) {
  auto step = [&](const float* x, int64_t count, int64_t at, uint8_t* out) {
    uint64_t place = first + (uint64_t)at;
    return natural_block(x, count, Draws(key, place), (uint32_t)place, out);
  };
  return each_block(x, n, size, out, step, [](int64_t count) { return count + (count + 7) / 8; });
}

int64_t decode_natural(const uint8_t* in, int64_t n, int64_t size, float* out) {
  return each_coded(in, n, size, out, natural_unblock, [](int64_t count) { return count + (count + 7) / 8; });
}

int64_t low_rank(const float* p, const float* q, int64_t rank, int64_t columns, int64_t first, int64_t count,
                 float* out) {
  multiply_factors(p, q, rank, columns, first, count, out);
  return 0;
}

// Sparse vectors: see sparse.h.

int64_t threshold(const float* x, int64_t n, int64_t k, uint32_t* counts, uint32_t* answer) {
  return find_threshold(x, n, k, counts, answer);
}

int64_t collect(const float* x, int64_t n, uint32_t bound, int64_t ties, uint32_t* places, float* values,
                int64_t* taken) {
  return collect_largest(x, n, bound, ties, places, values, taken);
}

int64_t encode_gaps(const uint32_t* places, int64_t k, int64_t shift, uint8_t* out) {
  return write_gaps(places, k, (int)shift, out);
}

int64_t decode_gaps(const uint8_t* in, int64_t size, int64_t k, int64_t shift, int64_t n, uint32_t* places) {
  return read_gaps(in, size, k, (int)shift, n, places);
}
}
