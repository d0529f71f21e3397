// Uniform words into normal draws, and the sum of values and noise on its grid. Compiled once a machine by
// gaussian.py, which says the same in NumPy. Plain loops over tiles that the compiler makes vectors of.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TILE = 256;  // pairs at a time: words, radius and angle stay in the first-level cache
constexpr uint64_t ONE = 0x3ff0000000000000, ROOT_HALF = 0x3fe6a09e667f3bcd;  // bits of 1 and √½

inline uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline double of_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// √(−2 ln u) for u = ((word >> 11) + 1) / 2^53. The logarithm as in fdlibm (e_log.c): u = 2^e m with
// √½ <= m < √2, and ln m by a polynomial in (m − 1) / (m + 1), right to 1 unit in the last place.
inline double radius(uint64_t word) {
  const uint64_t bits = bits_of(double(int64_t((word >> 11) + 1))) + (ONE - ROOT_HALF);
  const double exponent = double(int64_t(bits >> 52) - (0x3ff + 53));
  const double f = of_bits((bits & 0x000fffffffffffff) + ROOT_HALF) - 1.0;
  const double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  double p = 1.479819860511658591e-01;
  p = p * z + 1.531383769920937332e-01;
  p = p * z + 1.818357216161805012e-01;
  p = p * z + 2.222219843214978396e-01;
  p = p * z + 2.857142874366239149e-01;
  p = p * z + 3.999999999940941908e-01;
  p = p * z + 6.666666666666735130e-01;
  const double logarithm = exponent * 6.93147180559945309417e-01 + (f - (half - s * (half + p * z)));
  return __builtin_sqrt(-2.0 * logarithm);
}

// The cosine and sine of 2π a / 2^53 for a = word >> 11: of the angle to the nearest quarter of a turn, which
// is at most π/4 (polynomials of fdlibm's k_cos.c and k_sin.c), exchanged and signed by which quarter it is.
inline void direction(uint64_t word, double& cosine, double& sine) {
  const int64_t a = int64_t(word >> 11), quarter = (a + (int64_t(1) << 50)) >> 51;
  const double x = double(a - (quarter << 51)) * (6.28318530717958647693 / 9007199254740992.0), z = x * x;
  double c = -1.13596475577881948265e-11;
  c = c * z + 2.08757232129817482790e-09;
  c = c * z - 2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z - 1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  c = c * z * z + (1.0 - 0.5 * z);
  double s = 1.58969099521155010221e-10;
  s = s * z - 2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z - 1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z - 1.66666666666666324348e-01;
  s = s * z * x + x;
  const bool odd = quarter & 1;
  cosine = of_bits(bits_of(odd ? s : c) ^ (uint64_t((quarter + 1) & 2) << 62));
  sine = of_bits(bits_of(odd ? c : s) ^ (uint64_t(quarter & 2) << 62));
}

void pairs(const uint64_t* words, double* out, int64_t count) {
  double length[TILE], x[TILE], y[TILE];
  for (int64_t start = 0; start < count; start += TILE) {
    const int64_t size = count - start < TILE ? count - start : TILE;
    const uint64_t* from = words + 2 * start;
    double* to = out + 2 * start;
    for (int64_t i = 0; i < size; ++i) length[i] = radius(from[2 * i]);
    for (int64_t i = 0; i < size; ++i) direction(from[2 * i + 1], x[i], y[i]);
    for (int64_t i = 0; i < size; ++i) {
      to[2 * i] = length[i] * x[i];
      to[2 * i + 1] = length[i] * y[i];
    }
  }
}

template <typename T>
void on_grid(const T* values, const double* normal, T* out, int64_t count, double per_step, double steps, double unit) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = T(__builtin_rint(double(values[i]) * per_step + normal[i] * steps) * unit);
  }
}

}  // namespace

extern "C" {

// Two words each into two draws of Box and Muller's; `out` may be where the words are.
void normal_pairs(const uint64_t* words, double* out, int64_t count) { pairs(words, out, count); }

// (values × per_step + normal × steps), rounded, × unit.
void on_grid_float32(const float* values, const double* normal, float* out, int64_t count, double per_step,
                     double steps, double unit) {
  on_grid(values, normal, out, count, per_step, steps, unit);
}

void on_grid_float64(const double* values, const double* normal, double* out, int64_t count, double per_step,
                     double steps, double unit) {
  on_grid(values, normal, out, count, per_step, steps, unit);
}
}
