// Digits of sums and floats of doubles, one plane of values after the other. On one thread. Compiled once a machine
// by digit_kernels.py, which has the same in NumPy: the same numbers to the last bit.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t CHUNK = 2048;  // values of which all planes are in the nearest cache

}  // namespace

// Of the mean over silos of digits, [digits, count], the whole numbers that they are of, less `offset`, as doubles.
// Returns 1 for a mean that no digits up to 2^bits − 1 have, else 0.
extern "C" int64_t join_digits(const float* mean, int64_t count, int64_t digits, int64_t bits, int64_t silos,
                               int64_t offset, double* out) {
    const double most = double(silos) * double((int64_t(1) << bits) - 1);
    int64_t wrong = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t length = std::min(CHUNK, count - start);
        int64_t whole[CHUNK];
        for (int64_t place = 0; place < length; ++place) whole[place] = -offset;
        for (int64_t digit = 0; digit < digits; ++digit) {
            const float* plane = mean + digit * count + start;
            for (int64_t place = 0; place < length; ++place) {
                const double scaled = double(plane[place]) * double(silos), total = std::rint(scaled);
                const bool right = std::fabs(scaled - total) <= 0.5 && total >= 0 && total <= most;
                wrong |= !right;
                whole[place] += int64_t(int32_t(right ? total : 0.0)) << digit * bits;
            }
        }
        for (int64_t place = 0; place < length; ++place) out[start + place] = double(whole[place]);
    }
    return wrong;
}

// A double as three floats whose sum it is, each `stride` after the one before. Returns 1 for one that is not
// finite or beyond floats, else 0.
extern "C" int64_t part_doubles(const double* values, int64_t count, int64_t stride, float* out) {
    int64_t wrong = 0;
    for (int64_t place = 0; place < count; ++place) {
        const float first = float(values[place]);
        const double rest = values[place] - double(first);
        const float second = float(rest);
        out[place] = first;
        out[stride + place] = second;
        out[2 * stride + place] = float(rest - double(second));
        wrong |= !(std::fabs(first) <= 3.4028234663852886e38f);
    }
    return wrong;
}

extern "C" void whole_doubles(const float* parts, int64_t count, int64_t stride, double* out) {
    for (int64_t place = 0; place < count; ++place)
        out[place] = double(parts[place]) + (double(parts[stride + place]) + double(parts[2 * stride + place]));
}
