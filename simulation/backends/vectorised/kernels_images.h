// Convolutions and pooling over images [batch, channels, height, width] that lie in one piece.
//
// A convolution is a product with the windows that its kernels look through, laid out as columns. As many windows at
// a time are laid out as one tile has columns, whichever image they are of, so that products are of whole vectors
// however small an image is, and the columns stay in the second-level cache.
#pragma once
#include "kernels_product.h"
#include "kernels_rows.h"

// Sizes of images and windows. A window's channels are `kernels` after a convolution and the image's after pooling.
struct Windows {
  int64_t batch, channels, height, width, kernels, kernel_height, kernel_width, down, right, above, left;
  int64_t out_height, out_width;

  int64_t row() const { return width + 2 * left; }
  int64_t plane() const { return (height + 2 * above) * row(); }
  int64_t area() const { return out_height * out_width; }
  int64_t size() const { return kernel_height * kernel_width; }
  bool padded() const { return above || left; }
};

// Tiles of `length` windows; `channels` of theirs are laid out at a time; `frames` images with a margin fit beside.
constexpr int64_t LONGEST_TILE = 384, MARGIN = 16;
struct Tiles {
  int64_t length, channels, frames;
  int64_t row() const { return length + MARGIN; }
};

// Windows of a tile that lie side by side: their first pixel, their column, how many.
struct Run {
  float* pixel;
  int64_t column, count;
};

// Images with their padding around them, as many as one tile's windows lie in.
struct Frames {
  const Windows& w;
  int64_t count;
  float* data;
  int64_t opened = 0, closed = 0;

  float* at(int64_t image) const { return data + image % count * w.channels * w.plane(); }
  float* inside(int64_t image, int64_t channel, int64_t y) const {
    return at(image) + channel * w.plane() + (y + w.above) * w.row() + w.left;
  }
  // Frames up to `image`, of zeros, and of x where there is one.
  void open(int64_t image, const float* x) {
    for (; opened <= image; opened++) {
      memset(at(opened), 0, w.channels * w.plane() * sizeof(float));
      if (!x) continue;
      for (int64_t line = 0; line < w.channels * w.height; line++)
        memcpy(inside(opened, line / w.height, line % w.height),
               x + (opened * w.channels * w.height + line) * w.width, w.width * sizeof(float));
    }
  }
  // What lies in frames before `image` goes to x.
  void close(int64_t image, float* x) {
    for (; closed < image; closed++)
      for (int64_t line = 0; line < w.channels * w.height; line++)
        memcpy(x + (closed * w.channels * w.height + line) * w.width,
               inside(closed, line / w.height, line % w.height), w.width * sizeof(float));
  }
};

// The runs of `count` windows from number `first` on; `image` gives where the pixels of one begin.
template <class Image>
static int64_t runs_of(const Windows& w, int64_t first, int64_t count, Image image, Run* runs) {
  int64_t found = 0, number = first / w.area(), y = first % w.area() / w.out_width, x = first % w.out_width;
  for (int64_t column = 0; column < count; found++) {
    int64_t some = w.out_width - x < count - column ? w.out_width - x : count - column;
    runs[found] = {image(number) + y * w.down * w.row() + x * w.right, column, some};
    column += some, x = 0;
    if (++y == w.out_height) y = 0, number++;
  }
  return found;
}

// Rows of `columns` [channels of a window, windows] from the pixels; nothing is read from `end` on.
static void unfold(const Windows& w, const Run* runs, int64_t count, int64_t first, int64_t last, const float* end,
                   float* columns, int64_t row) {
  for (const Run* run = runs; run < runs + count; run++) {
    float* to = columns + run->column;
    bool short_run = run->count <= WIDTH && w.right == 1;
    for (int64_t channel = first; channel < last; channel++)
      for (int64_t y = 0; y < w.kernel_height; y++) {
        const float* from = run->pixel + channel * w.plane() + y * w.row();
        // What a run's last vector has too much is overwritten by the next run, or in the margin.
        if (short_run && from + w.kernel_width + WIDTH <= end) {
          for (int64_t x = 0; x < w.kernel_width; x++, to += row) store(to, load(from + x));
          continue;
        }
        for (int64_t x = 0; x < w.kernel_width; x++, to += row, from++) {
          if (w.right == 1)
            for (int64_t i = 0; i < run->count; i += WIDTH) {
              int64_t rest = run->count - i;
              store(to + i, rest >= WIDTH || from + i + WIDTH <= end ? load(from + i) : load_part(from + i, (int)rest));
            }
          else
            for (int64_t i = 0; i < run->count; i++) to[i] = from[i * w.right];
        }
      }
  }
}

typedef float Eight __attribute__((vector_size(32)));
typedef float UnalignedEight __attribute__((vector_size(32), aligned(4), may_alias));

// Adds the rows of `columns` to the pixels that they were of.
static void fold(const Windows& w, const Run* runs, int64_t count, int64_t first, int64_t last, const float* columns,
                 int64_t row) {
  // Whether a whole vector ends before the next row begins, which is read right after.
  bool apart = w.row() * w.down >= WIDTH;
  for (int64_t channel = first; channel < last; channel++)
    for (int64_t y = 0; y < w.kernel_height; y++)
      for (int64_t x = 0; x < w.kernel_width; x++, columns += row)
        for (const Run* run = runs; run < runs + count; run++) {
          float* to = run->pixel + channel * w.plane() + y * w.row() + x;
          const float* from = columns + run->column;
          int64_t i = 0, n = run->count;
          if (w.right == 1 && n == 8) {  // as in LeNet, without the loops
            *(UnalignedEight*)to += *(const UnalignedEight*)from;
            continue;
          }
          if (w.right == 1) {
            for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(to + i) + load(from + i));
            if (WIDTH > 8 && n - i > 8 && apart) {
              store(to + i, load(to + i) + load_part(from + i, (int)(n - i)));
              continue;
            }
            for (; i + 8 <= n; i += 8) *(UnalignedEight*)(to + i) += *(const UnalignedEight*)(from + i);
            for (; i + 4 <= n; i += 4) *(UnalignedFour*)(to + i) += *(const UnalignedFour*)(from + i);
          }
          for (; i < n; i++) to[i * w.right] += from[i];
        }
}

// Calls function(column, place in y [batch, kernels, area] of kernel 0, count) for windows of one image in a row.
template <class Function>
static void each_image(const Windows& w, int64_t first, int64_t count, Function function) {
  for (int64_t column = 0; column < count;) {
    int64_t window = first + column, inside = window % w.area();
    int64_t some = w.area() - inside < count - column ? w.area() - inside : count - column;
    function(column, window / w.area() * w.kernels * w.area() + inside, some);
    column += some;
  }
}

static void gather_gradient(const Windows& w, int64_t first, int64_t count, const float* g, float* tile, int64_t row) {
  each_image(w, first, count, [&](int64_t column, int64_t place, int64_t some) {
    for (int64_t k = 0; k < w.kernels; k++)
      memcpy(tile + k * row + column, g + place + k * w.area(), some * sizeof(float));
  });
}

// Where the parts of the memory that a convolution works in begin; at most `length` windows are a tile.
struct Workplace {
  const Windows& w;
  const Tiles& tiles;
  float* memory;

  float* columns() const { return memory + tiles.frames * w.channels * w.plane() + MARGIN; }
  float* tile() const { return columns() + tiles.channels * w.size() * tiles.row(); }
};

// Calls function(first window, how many, runs, how many, end of the pixels) for each tile of x or its padded frames.
template <class Function>
static void each_tile(const Workplace& work, const float* x, Function function) {
  const Windows& w = work.w;
  Frames frames{w, work.tiles.frames, work.memory};
  int64_t total = w.batch * w.area(), image_size = w.channels * w.height * w.width;
  Run runs[LONGEST_TILE];
  for (int64_t first = 0; first < total; first += work.tiles.length) {
    int64_t count = total - first < work.tiles.length ? total - first : work.tiles.length, found;
    const float* end = x + w.batch * image_size;
    if (w.padded()) {
      frames.open((first + count - 1) / w.area(), x);
      end = work.columns();
      found = runs_of(w, first, count, [&](int64_t image) { return frames.at(image); }, runs);
    } else {
      found = runs_of(w, first, count, [&](int64_t image) { return (float*)x + image * image_size; }, runs);
    }
    function(first, count, runs, found, end);
  }
}

// Products are taken in blocks whose right-hand side stays in the first-level cache.
constexpr int64_t BLOCK = 3 * WIDTH, DEEP = 128;
constexpr Finish PLAIN = {1.0f, 0.0f, 0.0f, nullptr, nullptr, 0, 0};

// y [batch, kernels, out] <- weight [kernels, channels, kernel] over x, and the bias if there is one.
static void convolution(const Workplace& work, const float* x, const float* weight, const float* bias, float* y) {
  const Windows& w = work.w;
  int64_t row = work.tiles.row(), depth = w.channels * w.size();
  float *columns = work.columns(), *tile = work.tile();
  each_tile(work, x, [&](int64_t first, int64_t count, const Run* runs, int64_t found, const float* end) {
    unfold(w, runs, found, 0, w.channels, end, columns, row);
    for (int64_t from = 0; from < depth; from += DEEP)
      for (int64_t j = 0; j < count; j += BLOCK) {
        float* to = tile + j;
        Finish sum = {1.0f, 1.0f, 0.0f, from ? to : nullptr, nullptr, row, 0};
        sweep_product(w.kernels, count - j < BLOCK ? count - j : BLOCK, depth - from < DEEP ? depth - from : DEEP,
                      weight + from, depth, 1, columns + from * row + j, row, to, row, sum);
      }
    each_image(w, first, count, [&](int64_t column, int64_t place, int64_t some_windows) {
      for (int64_t k = 0; k < w.kernels; k++) {
        float added = bias ? bias[k] : 0.0f;
        each(some_windows, [&](int64_t i, int n) {
          put(y + place + k * w.area(), i, some(tile + k * row + column, i, n) + added, n);
        });
      }
    });
  });
}

// dweight [kernels, channels, kernel] <- the sum over windows of their gradient times what they show.
static void convolution_weights(const Workplace& work, const float* g, const float* x, float* dweight) {
  const Windows& w = work.w;
  int64_t row = work.tiles.row(), depth = w.channels * w.size();
  float *columns = work.columns(), *tile = work.tile(), *turned = tile + w.kernels * row;
  // With many kernels their gradients side by side are whole vectors; with few of them, those of windows are.
  bool many = w.kernels >= WIDTH && depth >= 128;
  memset(many ? turned : dweight, 0, w.kernels * depth * sizeof(float));
  each_tile(work, x, [&](int64_t first, int64_t count, const Run* runs, int64_t found, const float* end) {
    if (many)
      each_image(w, first, count, [&](int64_t column, int64_t place, int64_t windows) {
        for (int64_t k = 0; k < w.kernels; k++)
          for (int64_t i = 0; i < windows; i++)
            tile[(column + i) * w.kernels + k] = g[place + k * w.area() + i];
      });
    else
      gather_gradient(w, first, count, g, tile, row);
    for (int64_t channel = 0; channel < w.channels; channel += work.tiles.channels) {
      int64_t last = channel + work.tiles.channels < w.channels ? channel + work.tiles.channels : w.channels;
      unfold(w, runs, found, channel, last, end, columns, row);
      int64_t n = (last - channel) * w.size();
      float* to = many ? turned + channel * w.size() * w.kernels : dweight + channel * w.size();
      if (many)
        sweep_product(n, w.kernels, count, columns, row, 1, tile, w.kernels, to, w.kernels,
                      {1, 1, 0, to, nullptr, w.kernels, 0});
      else
        dot_product(w.kernels, n, count, tile, row, columns, row, to, depth, {1, 1, 0, to, nullptr, depth, 0});
    }
  });
  if (many)
    for (int64_t k = 0; k < w.kernels; k++)
      for (int64_t i = 0; i < depth; i++) dweight[k * depth + i] = turned[i * w.kernels + k];
}

static void convolution_inputs(const Workplace& work, const float* g, const float* weight, float* dx) {
  const Windows& w = work.w;
  int64_t row = work.tiles.row(), depth = w.channels * w.size(), total = w.batch * w.area();
  float *columns = work.columns(), *tile = work.tile();
  Frames frames{w, work.tiles.frames, work.memory};
  Run runs[LONGEST_TILE];
  for (int64_t first = 0; first < total; first += work.tiles.length) {
    int64_t count = total - first < work.tiles.length ? total - first : work.tiles.length;
    frames.open((first + count - 1) / w.area(), nullptr);
    int64_t found = runs_of(w, first, count, [&](int64_t image) { return frames.at(image); }, runs);
    gather_gradient(w, first, count, g, tile, row);
    for (int64_t channel = 0; channel < w.channels; channel += work.tiles.channels) {
      int64_t last = channel + work.tiles.channels < w.channels ? channel + work.tiles.channels : w.channels;
      for (int64_t j = 0; j < count; j += BLOCK)
        sweep_product((last - channel) * w.size(), count - j < BLOCK ? count - j : BLOCK, w.kernels,
                      weight + channel * w.size(), 1, depth, tile + j, row, columns + j, row, PLAIN);
      fold(w, runs, found, channel, last, columns, row);
    }
    frames.close((first + count) / w.area(), dx);
  }
}
