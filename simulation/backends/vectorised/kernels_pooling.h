// Pooling over images [images, height, width] of all channels, which lie in one piece.
#pragma once
#include "kernels_images.h"

#define SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if defined(__AVX512F__)
static inline Vector even_lanes(Vector a, Vector b) {
  return SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
static inline Vector lower_pairs(Vector a, Vector b) {
  return SHUFFLE(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
static inline Vector upper_pairs(Vector a, Vector b) {
  return SHUFFLE(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(__AVX__)
static inline Vector even_lanes(Vector a, Vector b) { return SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14); }
static inline Vector lower_pairs(Vector a, Vector b) { return SHUFFLE(0, 8, 1, 9, 2, 10, 3, 11); }
static inline Vector upper_pairs(Vector a, Vector b) { return SHUFFLE(4, 12, 5, 13, 6, 14, 7, 15); }
#else
static inline Vector even_lanes(Vector a, Vector b) { return SHUFFLE(0, 2, 4, 6); }
static inline Vector lower_pairs(Vector a, Vector b) { return SHUFFLE(0, 4, 1, 5); }
static inline Vector upper_pairs(Vector a, Vector b) { return SHUFFLE(2, 6, 3, 7); }
#endif

// Two vectors as one line of 2 * WIDTH values, of which `count` are there.
struct Line {
  Vector first, second;

  static Line read(const float* from, int count) {
    if (count <= WIDTH) return {some(from, 0, count), Vector{}};
    return {load(from), some(from, WIDTH, count - WIDTH)};
  }
  Line operator+(const Line& other) const { return {first + other.first, second + other.second}; }
  void write(float* to, int count) const {
    put(to, 0, first, count < WIDTH ? count : WIDTH);
    if (count > WIDTH) put(to, WIDTH, second, count - WIDTH);
  }
};

// Every `step`th of the values from `from` on, `count` of them.
static inline Vector apart(const float* from, int64_t step, int count) {
  if (step == 1) return some(from, 0, count);
  if (step == 2) {
    Line line = Line::read(from, 2 * count - 1);
    return even_lanes(line.first, line.second);
  }
  Vector v{};
  for (int i = 0; i < count; i++) v[i] = from[i * step];
  return v;
}

// Adds value(number) to the pixels of that number in `count` windows side by side, whose first one is at `to`.
template <class Value>
__attribute__((always_inline)) static inline void add_to_windows(const Windows& w, float* to, int count, Value value) {
  bool pairs = w.right == 2 && w.kernel_width == 2;
  for (int32_t y = 0, number = 0; y < w.kernel_height; y++, to += w.width)
    for (int32_t x = 0; x < w.kernel_width; x++, number++) {
      Vector v = value(number);
      if (pairs) {
        Vector next = value(++number);
        Line line{lower_pairs(v, next), upper_pairs(v, next)};
        // Of windows that do not overlap nothing is there yet.
        (w.down >= w.kernel_height ? line : Line::read(to, 2 * count) + line).write(to, 2 * count);
        x++;
      } else if (w.right == 1) {
        put(to + x, 0, some(to + x, 0, count) + v, count);
      } else {
        for (int i = 0; i < count; i++) to[x + i * w.right] += v[i];
      }
    }
}

// Whether a value takes the place of the largest so far: as in torch the first of equal ones stays, and what is not
// a number is larger than any.
static inline Integers takes(Vector value, Vector most) { return (value > most) | (value != value); }

// Calls function(image, offset of its first window's pixel, offset in the output, windows) for vectors of windows
// side by side.
template <class Function>
__attribute__((always_inline)) static inline void each_vector(const Windows& w, Function function) {
  for (int64_t image = 0; image < w.batch * w.channels; image++)
    for (int64_t y = 0; y < w.out_height; y++)
      each(w.out_width, [&](int64_t x, int count) {
        function(image * w.height * w.width + y * w.down * w.width + x * w.right,
                 (image * w.out_height + y) * w.out_width + x, count);
      });
}

// Calls function(pixel, number of the pixel in its window) for each pixel of a window from `from` on.
template <class Function>
__attribute__((always_inline)) static inline void each_pixel(const Windows& w, int64_t from, Function function) {
  for (int64_t y = 0; y < w.kernel_height; y++)
    for (int64_t x = 0; x < w.kernel_width; x++)
      function(from + y * w.width + x, (int32_t)(y * w.kernel_width + x));
}

// Offset of the largest value in a window that may reach beyond its image.
static int64_t largest_in(const Windows& w, const float* x, int64_t image, int64_t y, int64_t x_) {
  int64_t top = y * w.down - w.above, start = x_ * w.right - w.left, found = -1;
  float most = -INFINITY;
  for (int64_t i = top < 0 ? 0 : top; i < top + w.kernel_height && i < w.height; i++)
    for (int64_t j = start < 0 ? 0 : start; j < start + w.kernel_width && j < w.width; j++) {
      int64_t at = (image * w.height + i) * w.width + j;
      if (found >= 0 && !(x[at] > most) && x[at] == x[at]) continue;
      found = at, most = x[at];
    }
  return found;
}

// Calls function(offset of the largest, offset in the output) for windows one by one.
template <class Function>
static void each_largest(const Windows& w, const float* x, Function function) {
  int64_t out = 0;
  for (int64_t image = 0; image < w.batch * w.channels; image++)
    for (int64_t y = 0; y < w.out_height; y++)
      for (int64_t column = 0; column < w.out_width; column++, out++) function(largest_in(w, x, image, y, column), out);
}

// Calls function(w), with constants in the place of the sizes that are the most frequent.
template <class Function>
static inline void by_size(Windows w, Function function) {
  if (w.kernel_height == 2 && w.kernel_width == 2 && w.down == 2 && w.right == 2)
    w.kernel_height = w.kernel_width = w.down = w.right = 2, function(w);
  else
    function(w);
}

static void max_pool(const Windows& sizes, const float* x, float* y) {
  if (sizes.padded()) return each_largest(sizes, x, [&](int64_t from, int64_t to) { y[to] = x[from]; });
  by_size(sizes, [&](const Windows& w) __attribute__((always_inline)) {
  each_vector(w, [&](int64_t from, int64_t to, int count) {
    Vector most{};
    each_pixel(w, from, [&](int64_t pixel, int32_t number) {
      Vector value = apart(x + pixel, w.right, count);
      most = number == 0 || takes(value, most) ? value : most;
    });
    put(y, to, most, count);
  });
  });
}

// dx [images, height, width] <- g where the largest value of each window is.
static void max_pool_backward(const Windows& sizes, const float* g, const float* x, float* dx) {
  memset(dx, 0, sizes.batch * sizes.channels * sizes.height * sizes.width * sizeof(float));
  if (sizes.padded()) return each_largest(sizes, x, [&](int64_t from, int64_t to) { dx[from] += g[to]; });
  by_size(sizes, [&](const Windows& w) __attribute__((always_inline)) {
  each_vector(w, [&](int64_t from, int64_t to, int count) {
    Vector most{}, gradient = some(g, to, count);
    Integers which{};
    each_pixel(w, from, [&](int64_t pixel, int32_t number) {
      Vector value = apart(x + pixel, w.right, count);
      Integers taken = takes(value, most);
      if (number == 0) taken = Integers{} - 1;
      most = taken ? value : most;
      which = taken ? Integers{} + number : which;
    });
    add_to_windows(w, dx + from, count, [&](int32_t number) { return which == number ? gradient : splat(0.0f); });
  });
  });
}

static void average_pool(const Windows& w, const float* x, float* y) {
  float share = 1.0f / (float)w.size();
  each_vector(w, [&](int64_t from, int64_t to, int count) {
    Vector total{};
    each_pixel(w, from, [&](int64_t pixel, int32_t) { total += apart(x + pixel, w.right, count); });
    put(y, to, total * share, count);
  });
}

static void average_pool_backward(const Windows& w, const float* g, float* dx) {
  float share = 1.0f / (float)w.size();
  memset(dx, 0, w.batch * w.channels * w.height * w.width * sizeof(float));
  each_vector(w, [&](int64_t from, int64_t to, int count) {
    Vector gradient = some(g, to, count) * share;
    add_to_windows(w, dx + from, count, [&](int32_t) { return gradient; });
  });
}
