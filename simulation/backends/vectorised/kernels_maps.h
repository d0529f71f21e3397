// Functions of single values, over tensors of up to four dimensions and any strides, and sums over dimensions.
#pragma once
#include "kernels_vector.h"

// Name and value, of up to three inputs a, b, c and three numbers s, t, u. Backward functions take the gradient
// first, then what torch saves. Comparisons are written so that what is not a number stays so, as in torch.
#define MAPS(X)                                                                                             \
  X(fill, splat(s))                                                                                         \
  X(copy, a)                                                                                                \
  X(scale, a* s)                                                                                            \
  X(shift, a + s)                                                                                           \
  X(add, a + s * b)                                                                                         \
  X(multiply, a* b)                                                                                         \
  X(divide, a / b)                                                                                          \
  X(square, a* a)                                                                                           \
  X(square_of_difference, (a - b) * (a - b))                                                                \
  X(mse_loss_backward, c* s*(a - b))                                                                        \
  X(update, s* a + t * b + u * c)                                                                           \
  X(exponential, exponential(a))                                                                            \
  X(inverse_root, inverse_root(a))                                                                          \
  X(relu, a < 0.0f ? splat(0) : a)                                                                          \
  X(threshold_backward, b <= s ? splat(0) : a)                                                              \
  X(tanh, hyperbolic_tangent(a))                                                                            \
  X(tanh_backward, a*(1.0f - b * b))                                                                        \
  X(sigmoid, logistic(a))                                                                                   \
  X(sigmoid_backward, a* b*(1.0f - b))                                                                      \
  X(gelu, gelu(a))                                                                                          \
  X(gelu_backward, gelu_backward(a, b))                                                                     \
  X(gelu_tanh, 0.5f * a * (1.0f + hyperbolic_tangent(gelu_inner(a))))                                       \
  X(gelu_tanh_backward, gelu_tanh_backward(a, b))                                                           \
  X(silu, a* logistic(a))                                                                                   \
  X(silu_backward, silu_backward(a, b))                                                                     \
  X(leaky_relu, a > 0.0f ? a : a * s)                                                                       \
  X(leaky_relu_backward, b > 0.0f ? a : a * s)                                                              \
  X(elu, a <= 0.0f ? s * t * (exponential(a * u) - 1.0f) : a * t)                                           \
  X(elu_backward, b <= 0.0f ? a * (s * t * u) * exponential(b * u) : a * t)                                 \
  X(hardtanh, a < s ? splat(s) : (a > t ? splat(t) : a))                                                    \
  X(hardtanh_backward, b <= s ? splat(0) : (b >= t ? splat(0) : a))

static inline Vector gelu(Vector x) { return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f)); }

static inline Vector gelu_backward(Vector g, Vector x) {
  Vector density = 0.39894228040143268f * exponential(-0.5f * x * x);
  return g * (0.5f * (1.0f + error_function(x * 0.70710678118654752f)) + x * density);
}

static inline Vector gelu_inner(Vector x) { return 0.79788456080286536f * (x + 0.044715f * x * x * x); }

static inline Vector gelu_tanh_backward(Vector g, Vector x) {
  Vector t = hyperbolic_tangent(gelu_inner(x));
  Vector slope = 0.79788456080286536f * (1.0f + 0.134145f * x * x);
  return g * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope);
}

static inline Vector silu_backward(Vector g, Vector x) {
  Vector y = logistic(x);
  return g * y * (1.0f + x * (1.0f - y));
}

struct Operand {
  float* data;
  int64_t stride[4];
};

static inline Vector read(const float* from, int64_t stride, int64_t at, int count) {
  if (stride == 0) return splat(*from);
  if (stride == 1) return count == WIDTH ? load(from + at) : load_part(from + at, count);
  Vector v{};
  for (int i = 0; i < count; i++) v[i] = from[(at + i) * stride];
  return v;
}

#define MAP_NUMBER(name, value) MAP_##name,
enum { MAPS(MAP_NUMBER) };

// The function over `n` vectors that lie one after the other.
static void map_vectors(int64_t number, int64_t n, float* out, const float* first, const float* second,
                        const float* third, float s, float t, float u) {
  switch (number) {
#define MAP_CASE(name, value)                                                        \
  case MAP_##name:                                                                   \
    for (int64_t i = 0; i < n; i += WIDTH) {                                         \
      Vector a = load(first + i), b = load(second + i), c = load(third + i);         \
      (void)a, (void)b, (void)c;                                                     \
      store(out + i, value);                                                         \
    }                                                                                \
    break;
    MAPS(MAP_CASE)
  }
}

// The function over `n` values. What does not lie in whole vectors goes through buffers.
static void map_line(int64_t number, int64_t n, int inputs, const Operand& out, const Operand* in, float s, float t,
                     float u) {
  constexpr int64_t ROOM = 16 * WIDTH;
  alignas(64) float buffers[4][ROOM];
  for (int64_t at = 0; at < n; at += ROOM) {
    int64_t count = n - at < ROOM ? n - at : ROOM;
    const float* from[3] = {buffers[0], buffers[0], buffers[0]};
    bool whole = count % WIDTH == 0;
    for (int i = 0; i < inputs; i++) {
      from[i] = in[i].data + at;
      if (in[i].stride[3] == 1 && whole) continue;
      for (int64_t k = 0; k < count; k += WIDTH)
        store(buffers[i] + k, read(in[i].data, in[i].stride[3], at + k, count - k < WIDTH ? (int)(count - k) : WIDTH));
      from[i] = buffers[i];
    }
    bool direct = out.stride[3] == 1 && whole;
    map_vectors(number, count, direct ? out.data + at : buffers[3], from[0], from[1], from[2], s, t, u);
    if (direct) continue;
    if (out.stride[3] == 1)
      memcpy(out.data + at, buffers[3], count * sizeof(float));
    else
      for (int64_t k = 0; k < count; k++) out.data[(at + k) * out.stride[3]] = buffers[3][k];
  }
}

// The function over `shape`; the output may be one of the inputs.
static void run_map(int64_t number, const int64_t* shape, int inputs, const Operand& out, const Operand* in, float s,
                    float t, float u) {
  for (int64_t x = 0; x < shape[0]; x++)
    for (int64_t y = 0; y < shape[1]; y++)
      for (int64_t z = 0; z < shape[2]; z++) {
        Operand here[4] = {out};
        for (int i = 0; i < inputs; i++) here[i + 1] = in[i];
        for (int i = 0; i <= inputs; i++)
          here[i].data += x * here[i].stride[0] + y * here[i].stride[1] + z * here[i].stride[2];
        map_line(number, shape[3], inputs, here[0], here + 1, s, t, u);
      }
}

// out [kept] <- the sum of in [kept, summed] over two dimensions; three are kept.
static void run_sum(const int64_t* kept, const int64_t* summed, float* out, const int64_t* out_stride, const float* in,
                    const int64_t* kept_stride, const int64_t* summed_stride) {
  for (int64_t x = 0; x < kept[0]; x++)
    for (int64_t y = 0; y < kept[1]; y++) {
      const float* from = in + x * kept_stride[0] + y * kept_stride[1];
      float* to = out + x * out_stride[0] + y * out_stride[1];
      if (kept_stride[2] == 1 && kept[2] > 1) {
        for (int64_t z = 0; z < kept[2]; z += WIDTH) {
          int count = (int)(kept[2] - z < WIDTH ? kept[2] - z : WIDTH);
          Vector total{};
          for (int64_t i = 0; i < summed[0]; i++)
            for (int64_t j = 0; j < summed[1]; j++)
              total += read(from + i * summed_stride[0] + j * summed_stride[1], 1, z, count);
          for (int k = 0; k < count; k++) to[(z + k) * out_stride[2]] = total[k];
        }
        continue;
      }
      for (int64_t z = 0; z < kept[2]; z++) {
        Vector total{};
        for (int64_t i = 0; i < summed[0]; i++) {
          const float* line = from + z * kept_stride[2] + i * summed_stride[0];
          for (int64_t j = 0; j < summed[1]; j += WIDTH) {
            int count = (int)(summed[1] - j < WIDTH ? summed[1] - j : WIDTH);
            Vector v = summed_stride[1] ? read(line, summed_stride[1], j, count) : Vector{};
            if (!summed_stride[1])
              for (int k = 0; k < count; k++) v[k] = *line;
            total += v;
          }
        }
        to[z * out_stride[2]] = sum(total);
      }
    }
}
