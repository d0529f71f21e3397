// Runs a training step that was written down as instructions (instructions.py writes them).
//
// An instruction is a row of integers: what to do, how many integers it takes, and its operands in the order in
// which they are read here. A tensor is a place: a row of the table of addresses and an offset in values; a number
// is a row of the table of numbers. Nothing is allocated, and nothing is known about any model.
#include "kernels_images.h"
#include "kernels_maps.h"
#include "kernels_pooling.h"
#include "kernels_product.h"
#include "kernels_rows.h"

#define OPERATIONS(X)                                                                                      \
  X(map) X(sum) X(product) X(softmax) X(softmax_backward) X(nll) X(nll_backward) X(layer_norm)             \
  X(layer_norm_backward) X(group_norm) X(group_norm_backward) X(embedding) X(scatter) X(zero) X(pull) X(step) \
  X(convolution) X(convolution_weights) X(convolution_inputs) X(max_pool) X(max_pool_backward)             \
  X(average_pool) X(average_pool_backward)

#define OPERATION_NUMBER(name) OPERATION_##name,
enum { OPERATIONS(OPERATION_NUMBER) };

struct Reader {
  const int64_t* at;
  char* const* table;
  const double* numbers;

  int64_t next() { return *at++; }
  double number() { return numbers[next()]; }
  // A row below zero is no tensor.
  template <class T = float>
  T* tensor() {
    int64_t row = next(), offset = next();
    return row < 0 ? nullptr : (T*)table[row] + offset;
  }
  void several(int64_t* to, int count) {
    for (int i = 0; i < count; i++) to[i] = next();
  }
};

static void read_map(Reader r) {
  int64_t number = r.next(), inputs = r.next(), shape[4];
  r.several(shape, 4);
  float s = (float)r.number(), t = (float)r.number(), u = (float)r.number();
  Operand operands[4] = {};
  for (int i = 0; i <= inputs; i++) {
    operands[i].data = r.tensor();
    r.several(operands[i].stride, 4);
  }
  run_map(number, shape, (int)inputs, operands[0], operands + 1, s, t, u);
}

static void read_sum(Reader r) {
  int64_t kept[3], summed[2], out_stride[3], kept_stride[3], summed_stride[2];
  r.several(kept, 3);
  r.several(summed, 2);
  float* out = r.tensor();
  r.several(out_stride, 3);
  const float* in = r.tensor();
  r.several(kept_stride, 3);
  r.several(summed_stride, 2);
  run_sum(kept, summed, out, out_stride, in, kept_stride, summed_stride);
}

// `count` products side by side: c <- alpha a b + beta p + gamma q.
static void read_product(Reader r) {
  int64_t count = r.next(), m = r.next(), n = r.next(), depth = r.next();
  float* c = r.tensor();
  int64_t c_step = r.next(), c_row = r.next();
  const float* a = r.tensor();
  int64_t a_step = r.next(), a_row = r.next(), a_column = r.next();
  const float* b = r.tensor();
  int64_t b_step = r.next(), b_row = r.next(), b_column = r.next();
  Finish finish{};
  finish.alpha = (float)r.number(), finish.beta = (float)r.number(), finish.gamma = (float)r.number();
  finish.p = r.tensor(), finish.p_row = r.next();
  finish.q = r.tensor(), finish.q_row = r.next();
  for (; count--; a += a_step, b += b_step, c += c_step) {
    if (b_column == 1)
      sweep_product(m, n, depth, a, a_row, a_column, b, b_row, c, c_row, finish);
    else
      dot_product(m, n, depth, a, a_row, b, b_column, c, c_row, finish);
  }
}

static void read_softmax(Reader r, bool backward) {
  int64_t rows = r.next(), n = r.next(), logarithm = r.next();
  float* out = r.tensor();
  const float *first = r.tensor(), *second = backward ? r.tensor() : nullptr;
  backward ? softmax_backward(rows, n, first, second, out, logarithm) : softmax(rows, n, first, out, logarithm);
}

static bool read_nll(Reader r, bool backward) {
  int64_t rows = r.next(), n = r.next(), ignored = r.next(), mean = r.next();
  const int64_t* label = r.tensor<int64_t>();
  float *out = r.tensor(), *counted = r.tensor();
  const float* in = r.tensor();
  if (!backward) return nll(rows, n, in, label, ignored, mean, out, counted);
  nll_backward(rows, n, in, label, ignored, mean, counted, out);
  return true;
}

static void read_layer_norm(Reader r, bool backward) {
  int64_t rows = r.next(), n = r.next();
  const float *x = r.tensor(), *weight = r.tensor();
  float *mean = r.tensor(), *inverse = r.tensor();
  if (backward) {
    const float* g = r.tensor();
    float *dx = r.tensor(), *dweight = r.tensor(), *dbias = r.tensor();
    layer_norm_backward(rows, n, g, x, mean, inverse, weight, dx, dweight, dbias);
  } else {
    float epsilon = (float)r.number();
    const float* bias = r.tensor();
    layer_norm(rows, n, epsilon, x, weight, bias, r.tensor(), mean, inverse);
  }
}

static void read_group_norm(Reader r, bool backward) {
  int64_t batch = r.next(), channels = r.next(), size = r.next(), groups = r.next();
  const float *x = r.tensor(), *weight = r.tensor();
  float *mean = r.tensor(), *inverse = r.tensor();
  if (backward) {
    const float* g = r.tensor();
    float *dx = r.tensor(), *dweight = r.tensor(), *dbias = r.tensor();
    group_norm_backward(batch, channels, size, groups, g, x, mean, inverse, weight, dx, dweight, dbias);
  } else {
    float epsilon = (float)r.number();
    const float* bias = r.tensor();
    group_norm(batch, channels, size, groups, epsilon, x, weight, bias, r.tensor(), mean, inverse);
  }
}

static bool read_embedding(Reader r, bool backward) {
  int64_t rows = r.next(), n = r.next(), limit = r.next();
  const int64_t* index = r.tensor<int64_t>();
  float *table = r.tensor(), *values = r.tensor();
  if (!backward) return embedding(rows, n, limit, table, index, values);
  scatter(rows, n, values, index, limit, (float)r.number(), table);
  return true;
}

static Windows read_windows(Reader& r) {
  int64_t sizes[13];
  r.several(sizes, 13);
  Windows w;
  memcpy(&w, sizes, sizeof(w));
  return w;
}

static void read_convolution(int64_t operation, Reader r) {
  Windows w = read_windows(r);
  Tiles tiles{};
  tiles.length = r.next(), tiles.channels = r.next(), tiles.frames = r.next();
  Workplace work{w, tiles, r.tensor()};
  float* out = r.tensor();
  const float *first = r.tensor(), *second = r.tensor();
  switch (operation) {
    case OPERATION_convolution: convolution(work, first, second, r.tensor(), out); break;
    case OPERATION_convolution_weights: convolution_weights(work, first, second, out); break;
    case OPERATION_convolution_inputs: convolution_inputs(work, first, second, out); break;
  }
}

static void read_pooling(int64_t operation, Reader r) {
  Windows w = read_windows(r);
  float* out = r.tensor();
  const float* first = r.tensor();
  switch (operation) {
    case OPERATION_max_pool: max_pool(w, first, out); break;
    case OPERATION_max_pool_backward: max_pool_backward(w, first, r.tensor(), out); break;
    case OPERATION_average_pool: average_pool(w, first, out); break;
    case OPERATION_average_pool_backward: average_pool_backward(w, first, out); break;
  }
}

// Gradients that clipping or momentum looks at as a whole: g += pull w - target, and the sum of all g^2.
static void read_pull(Reader r) {
  int64_t n = r.next();
  float pull = (float)r.number(), *g = r.tensor();
  const float *w = r.tensor(), *target = r.tensor();
  float* squares = r.tensor();
  Vector total{};
  each(n, [&](int64_t i, int count) {
    Vector v = some(g, i, count);
    if (target) {
      v += pull * some(w, i, count) - some(target, i, count);
      put(g, i, v, count);
    }
    if (count < WIDTH)
      for (int k = count; k < WIDTH; k++) v[k] = 0.0f;
    total += v * v;
  });
  *squares += sum(total);
}

// v <- momentum v + c g + decay w, w <- w - rate v, where c clips the gradient to a norm (none if negative).
static void read_step(Reader r) {
  int64_t n = r.next();
  float most = (float)r.number(), decay = (float)r.number(), momentum = (float)r.number(), rate = (float)r.number();
  const float *g = r.tensor(), *squares = r.tensor();
  float *w = r.tensor(), *velocity = r.tensor();
  float clip = most < 0.0f ? 1.0f : most / (sqrtf(*squares) + 1e-6f);
  clip = clip > 1.0f ? 1.0f : clip;
  each(n, [&](int64_t i, int count) {
    Vector weight = some(w, i, count), v = clip * some(g, i, count) + decay * weight;
    if (momentum != 0.0f) {
      v += momentum * some(velocity, i, count);
      put(velocity, i, v, count);
    }
    put(w, i, weight - rate * v, count);
  });
}

static bool perform(int64_t operation, Reader r) {
  switch (operation) {
    case OPERATION_map: read_map(r); break;
    case OPERATION_sum: read_sum(r); break;
    case OPERATION_product: read_product(r); break;
    case OPERATION_softmax: read_softmax(r, false); break;
    case OPERATION_softmax_backward: read_softmax(r, true); break;
    case OPERATION_nll: return read_nll(r, false);
    case OPERATION_nll_backward: return read_nll(r, true);
    case OPERATION_layer_norm: read_layer_norm(r, false); break;
    case OPERATION_layer_norm_backward: read_layer_norm(r, true); break;
    case OPERATION_group_norm: read_group_norm(r, false); break;
    case OPERATION_group_norm_backward: read_group_norm(r, true); break;
    case OPERATION_embedding: return read_embedding(r, false);
    case OPERATION_scatter: return read_embedding(r, true);
    case OPERATION_zero: {
      int64_t n = r.next();
      memset(r.tensor(), 0, n * sizeof(float));
      break;
    }
    case OPERATION_pull: read_pull(r); break;
    case OPERATION_step: read_step(r); break;
    case OPERATION_convolution:
    case OPERATION_convolution_weights:
    case OPERATION_convolution_inputs: read_convolution(operation, r); break;
    case OPERATION_max_pool:
    case OPERATION_max_pool_backward:
    case OPERATION_average_pool:
    case OPERATION_average_pool_backward: read_pooling(operation, r); break;
  }
  return true;
}

#define COMMA_NAME(name) #name ","
#define COMMA_NAME_OF_MAP(name, value) #name ","

extern "C" {

const char* operation_names() { return OPERATIONS(COMMA_NAME); }

const char* map_names() { return MAPS(COMMA_NAME_OF_MAP); }

// Runs the instructions in [at, end); false where an index or a label is out of range.
int run(const int64_t* at, const int64_t* end, char* const* table, const double* numbers) {
  while (at < end) {
    if (!perform(at[0], Reader{at + 2, table, numbers})) return 0;
    at += at[1];
  }
  return 1;
}

// The same for `count` batches of `size` examples in the order that `order` gives. Each of the `inputs` is brought
// to where its row of the table says, from examples of so many `bytes` that lie `strides` apart from `bases` on.
int repeat(const int64_t* at, const int64_t* end, char* const* table, const double* numbers, int64_t count,
           int64_t size, const int64_t* order, int64_t inputs, const int64_t* rows, const char* const* bases,
           const int64_t* strides, const int64_t* bytes, const float* loss, float* losses) {
  for (int64_t step = 0; step < count; step++, order += size) {
    for (int64_t i = 0; i < inputs; i++)
      for (int64_t k = 0; k < size; k++)
        memcpy(table[rows[i]] + k * bytes[i], bases[i] + order[k] * strides[i], bytes[i]);
    if (!run(at, end, table, numbers)) return 0;
    losses[step] = *loss;
  }
  return 1;
}

// Writes a - b; gives the sum of it, which is finite only if all of it is.
float difference(int64_t n, const float* a, const float* b, float* out) {
  Vector total{};
  each(n, [&](int64_t i, int count) {
    Vector v = some(a, i, count) - some(b, i, count);
    put(out, i, v, count);
    if (count < WIDTH)
      for (int k = count; k < WIDTH; k++) v[k] = 0.0f;
    total += v;
  });
  return sum(total);
}
}
