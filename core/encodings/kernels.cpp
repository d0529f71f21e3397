// Kernels of the encodings. Compiled once a machine by compiled.py, without fused multiply-add: the same bits come
// out on every processor, and out of the same arithmetic in torch. On one thread; nothing is allocated.
#include "block_integers.h"

extern "C" {

int64_t encode_integers(const float* x, int64_t n, int64_t size, int64_t bits, int64_t wide, int64_t stochastic,
                        uint64_t key, uint64_t first, uint8_t* out) {
  auto encode = bits == 8   ? Integers<8>::encode
                : bits == 4 ? Integers<4>::encode
                            : Integers<2>::encode;
  return encode(x, n, size, wide, stochastic, key, first, out);
}

int64_t decode_integers(const uint8_t* in, int64_t n, int64_t size, int64_t bits, int64_t wide, float* out) {
  auto decode = bits == 8   ? Integers<8>::decode
                : bits == 4 ? Integers<4>::decode
                            : Integers<2>::decode;
  return decode(in, n, size, wide, out);
}
}
