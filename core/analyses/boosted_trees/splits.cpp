// The best split of a node out of its histogram. On one thread. Compiled once a machine by split_choice.py, which
// has the same in NumPy: the same numbers to the last bit, so no product and sum may be rounded as one.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// As Growth of split_choice.py has them; `monotone` [features] is null where no weight is bounded.
struct Rules {
    double alpha, child, shrink, step;
    float lambda;
    const int64_t* monotone;
};

struct Side {
    double gradient, hessian, rows;
};

double soft(double gradient, double alpha) {
    const double away = std::max(std::fabs(gradient) - alpha, 0.0);
    return gradient > 0 ? away : gradient < 0 ? -away : 0.0 * away;
}

float weight(const Rules& rules, const Side& side, float low, float high) {
    double found = 0.0;
    if (!(side.hessian < rules.child || side.hessian <= 0)) {
        found = -soft(side.gradient, rules.alpha) / (side.hessian + rules.shrink);
        if (rules.step > 0) found = std::min(std::max(found, -rules.step), rules.step);
    }
    const float single = float(found);
    return rules.monotone == nullptr ? single : std::min(std::max(single, low), high);
}

float gain(const Rules& rules, const Side& side, float low, float high) {
    if (!(side.hessian > 0)) return 0.0f;
    if (rules.monotone != nullptr || rules.step > 0) {
        const float own = weight(rules, side, low, high), g = float(side.gradient), h = float(side.hessian);
        return -(2.0f * g * own + (h + rules.lambda) * (own * own));
    }
    const double free = soft(side.gradient, rules.alpha);
    return float(free * free) / float(side.hessian + rules.shrink);
}

}  // namespace

// The first split of the largest gain, from whole numbers [3, width] of gradient, Hessian and rows, which `scale` [3]
// turns into sums. `bounds` [2] of weights, `allowed` [features]. `best` is its gain, −inf where none is allowed;
// `chosen` [3] feature, cut, and whether missing values go left; `sides` [2, 3] what is left and right.
extern "C" void best_split(const double* sums, int64_t features, const int64_t* offsets, const double* scale,
                           const double* bounds, const uint8_t* allowed, double alpha, double child, double lambda,
                           double step, double least, const int64_t* monotone, float* best, int64_t* chosen,
                           double* sides) {
    const Rules rules{alpha, child, lambda, step, float(lambda), monotone};
    const int64_t width = offsets[features];
    const double *const g = sums, *const h = g + width, *const n = h + width;
    const float low = float(bounds[0]), high = float(bounds[1]);
    Side total{0, 0, 0};
    for (int64_t bin = offsets[0]; bin < offsets[1]; ++bin) {
        total.gradient += g[bin];
        total.hessian += h[bin];
        total.rows += n[bin];
    }
    total = {total.gradient * scale[0], total.hessian * scale[1], total.rows * scale[2]};
    const float parent = gain(rules, total, low, high);
    *best = -INFINITY;
    const auto look = [&](int64_t feature, const Side& left, int64_t cut, bool down) {
        const Side right{total.gradient - left.gradient, total.hessian - left.hessian, total.rows - left.rows};
        if (!(left.hessian >= rules.child && right.hessian >= rules.child && left.rows >= least &&
              right.rows >= least))
            return;
        if (rules.monotone != nullptr && rules.monotone[feature] != 0) {
            const float one = weight(rules, left, low, high), two = weight(rules, right, low, high);
            if (rules.monotone[feature] > 0 ? one > two : one < two) return;
        }
        const float found = gain(rules, left, low, high) + gain(rules, right, low, high) - parent;
        if (!(found > *best)) return;
        *best = found;
        const int64_t said[3] = {feature, cut, down};
        const double told[6] = {left.gradient,  left.hessian,  left.rows,
                                right.gradient, right.hessian, right.rows};
        std::copy(said, said + 3, chosen);
        std::copy(told, told + 6, sides);
    };
    for (int64_t feature = 0; feature < features; ++feature) {
        if (!allowed[feature]) continue;
        const int64_t first = offsets[feature], missing = offsets[feature + 1] - 1;
        Side left{0, 0, 0};
        for (int64_t bin = first; bin < missing; ++bin) {
            left = {left.gradient + g[bin] * scale[0], left.hessian + h[bin] * scale[1],
                    left.rows + n[bin] * scale[2]};
            look(feature, left, bin - first, false);
        }
        if (!(n[missing] > 0)) continue;
        // What all present rows are is known now: without the highest bins, one after the other.
        left = {left.gradient + g[missing] * scale[0], left.hessian + h[missing] * scale[1],
                left.rows + n[missing] * scale[2]};
        for (int64_t bin = missing - 1; bin >= first; --bin) {
            left = {left.gradient - g[bin] * scale[0], left.hessian - h[bin] * scale[1],
                    left.rows - n[bin] * scale[2]};
            look(feature, left, bin - first - 1, true);
        }
    }
}
