// Softmax, the likelihood of labels, normalisation, embeddings: what works on rows of contiguous values.
#pragma once
#include "kernels_vector.h"

template <class Function>
static inline void each(int64_t n, Function function) {
  for (int64_t i = 0; i < n; i += WIDTH) function(i, (int)(n - i < WIDTH ? n - i : WIDTH));
}

static inline Vector some(const float* from, int64_t at, int count) {
  return count == WIDTH ? load(from + at) : load_part(from + at, count);
}

static inline void put(float* to, int64_t at, Vector v, int count) {
  count == WIDTH ? store(to + at, v) : store_part(to + at, v, count);
}

static void softmax(int64_t rows, int64_t n, const float* x, float* y, bool logarithm) {
  for (; rows--; x += n, y += n) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    Vector total{};
    each(n, [&](int64_t i, int count) {
      Vector e = exponential(some(x, i, count) - most);
      put(y, i, e, count);
      total += some(y, i, count);
    });
    float whole = sum(total), shift = most + logf(whole), scale = 1.0f / whole;
    each(n, [&](int64_t i, int count) {
      put(y, i, logarithm ? some(x, i, count) - shift : some(y, i, count) * scale, count);
    });
  }
}

static void softmax_backward(int64_t rows, int64_t n, const float* g, const float* y, float* dx, bool logarithm) {
  for (; rows--; g += n, y += n, dx += n) {
    Vector total{};
    each(n, [&](int64_t i, int count) {
      total += logarithm ? some(g, i, count) : some(g, i, count) * some(y, i, count);
    });
    float whole = sum(total);
    each(n, [&](int64_t i, int count) {
      Vector gradient = some(g, i, count), output = some(y, i, count);
      put(dx, i, logarithm ? gradient - exponential(output) * whole : output * (gradient - whole), count);
    });
  }
}

// Mean or sum of -x[row, label[row]]; `counted` is the number of rows whose label is not `ignored`. False where a
// label does not exist.
static bool nll(int64_t rows, int64_t n, const float* x, const int64_t* label, int64_t ignored, bool mean, float* loss,
                float* counted) {
  float total = 0.0f, number = 0.0f;
  for (int64_t i = 0; i < rows; i++) {
    if (label[i] == ignored) continue;
    if (label[i] < 0 || label[i] >= n) return false;
    total -= x[i * n + label[i]];
    number += 1.0f;
  }
  *counted = number;
  *loss = mean ? total / number : total;
  return true;
}

static void nll_backward(int64_t rows, int64_t n, const float* g, const int64_t* label, int64_t ignored, bool mean,
                         const float* counted, float* dx) {
  memset(dx, 0, rows * n * sizeof(float));
  float value = mean ? -*g / *counted : -*g;
  for (int64_t i = 0; i < rows; i++)
    if (label[i] != ignored) dx[i * n + label[i]] = value;
}

static inline void moments(int64_t n, const float* x, float epsilon, float* mean, float* inverse) {
  Vector total{}, squares{};
  each(n, [&](int64_t i, int count) { total += some(x, i, count); });
  float middle = sum(total) / n;
  // What lies beyond the end is zero and would count as the mean's square: it is left out below.
  each(n, [&](int64_t i, int count) {
    Vector d = some(x, i, count) - middle;
    if (count < WIDTH)
      for (int k = count; k < WIDTH; k++) d[k] = 0.0f;
    squares += d * d;
  });
  *mean = middle;
  *inverse = 1.0f / sqrtf(sum(squares) / n + epsilon);
}

// Weight and bias may be missing.
static void layer_norm(int64_t rows, int64_t n, float epsilon, const float* x, const float* weight, const float* bias,
                       float* y, float* mean, float* inverse) {
  for (int64_t r = 0; r < rows; r++, x += n, y += n) {
    moments(n, x, epsilon, mean + r, inverse + r);
    each(n, [&](int64_t i, int count) {
      Vector v = (some(x, i, count) - mean[r]) * inverse[r];
      if (weight) v *= some(weight, i, count);
      if (bias) v += some(bias, i, count);
      put(y, i, v, count);
    });
  }
}

static void layer_norm_backward(int64_t rows, int64_t n, const float* g, const float* x, const float* mean,
                                const float* inverse, const float* weight, float* dx, float* dweight, float* dbias) {
  if (dweight) memset(dweight, 0, n * sizeof(float));
  if (dbias) memset(dbias, 0, n * sizeof(float));
  for (int64_t r = 0; r < rows; r++, g += n, x += n) {
    Vector total{}, along{};
    each(n, [&](int64_t i, int count) {
      Vector gradient = some(g, i, count), normal = (some(x, i, count) - mean[r]) * inverse[r];
      Vector inner = weight ? gradient * some(weight, i, count) : gradient;
      total += inner;
      along += inner * normal;
      if (dweight) put(dweight, i, some(dweight, i, count) + gradient * normal, count);
      if (dbias) put(dbias, i, some(dbias, i, count) + gradient, count);
    });
    if (!dx) continue;
    float first = sum(total) / n, second = sum(along) / n;
    each(n, [&](int64_t i, int count) {
      Vector inner = weight ? some(g, i, count) * some(weight, i, count) : some(g, i, count);
      Vector normal = (some(x, i, count) - mean[r]) * inverse[r];
      put(dx, i, (inner - first - normal * second) * inverse[r], count);
    });
    dx += n;
  }
}

// x [batch, channels, size], statistics [batch, groups].
static void group_norm(int64_t batch, int64_t channels, int64_t size, int64_t groups, float epsilon, const float* x,
                       const float* weight, const float* bias, float* y, float* mean, float* inverse) {
  int64_t width = channels / groups;
  for (int64_t group = 0; group < batch * groups; group++) {
    moments(width * size, x + group * width * size, epsilon, mean + group, inverse + group);
    for (int64_t k = 0; k < width; k++) {
      int64_t channel = (group % groups) * width + k, start = (group * width + k) * size;
      float scale = inverse[group] * (weight ? weight[channel] : 1.0f);
      float shift = (bias ? bias[channel] : 0.0f) - mean[group] * scale;
      each(size, [&](int64_t i, int count) { put(y + start, i, some(x + start, i, count) * scale + shift, count); });
    }
  }
}

// Gradients that nobody wants are null.
static void group_norm_backward(int64_t batch, int64_t channels, int64_t size, int64_t groups, const float* g,
                                const float* x, const float* mean, const float* inverse, const float* weight,
                                float* dx, float* dweight, float* dbias) {
  int64_t width = channels / groups;
  if (dweight) memset(dweight, 0, channels * sizeof(float));
  if (dbias) memset(dbias, 0, channels * sizeof(float));
  for (int64_t group = 0; group < batch * groups; group++) {
    int64_t first = (group % groups) * width, start = group * width * size;
    float products = 0.0f, plain = 0.0f, m = mean[group], r = inverse[group];
    for (int64_t k = 0; k < width; k++) {
      const float *gradient = g + start + k * size, *input = x + start + k * size;
      Vector product{}, total{};
      each(size, [&](int64_t i, int count) {
        Vector v = some(gradient, i, count);
        product += v * some(input, i, count);
        total += v;
      });
      float w = weight ? weight[first + k] : 1.0f, with_input = sum(product), alone = sum(total);
      products += w * with_input;
      plain += w * alone;
      if (dweight) dweight[first + k] += (with_input - alone * m) * r;
      if (dbias) dbias[first + k] += alone;
    }
    if (!dx) continue;
    float count_inverse = 1.0f / (width * size);
    float by_input = (plain * m - products) * r * r * r * count_inverse;
    float shift = -by_input * m - plain * r * count_inverse;
    for (int64_t k = 0; k < width; k++) {
      int64_t at = start + k * size;
      float by_gradient = r * (weight ? weight[first + k] : 1.0f);
      each(size, [&](int64_t i, int count) {
        put(dx + at, i, some(g + at, i, count) * by_gradient + some(x + at, i, count) * by_input + shift, count);
      });
    }
  }
}

// False where an index is outside of the table.
static bool embedding(int64_t rows, int64_t n, int64_t length, const float* table, const int64_t* index, float* out) {
  for (int64_t r = 0; r < rows; r++) {
    if (index[r] < 0 || index[r] >= length) return false;
    memcpy(out + r * n, table + index[r] * n, n * sizeof(float));
  }
  return true;
}

// table[index[r]] += scale * g[r], but for the row of padding. The indices have been looked up before.
static void scatter(int64_t rows, int64_t n, const float* g, const int64_t* index, int64_t padding, float scale,
                    float* table) {
  for (int64_t r = 0; r < rows; r++) {
    if (index[r] == padding) continue;
    float* to = table + index[r] * n;
    each(n, [&](int64_t i, int count) { put(to, i, some(to, i, count) + scale * some(g + r * n, i, count), count); });
  }
}
