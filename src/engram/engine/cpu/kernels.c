/* What a step on a CPU computes between its products, each in a single pass over memory.

   Every result is equal to PyTorch's to the last digit: each multiplication that PyTorch fuses with an addition is
   written as fma(), and -ffp-contract=off keeps the compiler from fusing others. */

#include <math.h>
#include <stdint.h>

/* --- One step of plain SGD of a weight that SI follows, and its path: `WeightStep` in penalties/step.py. */

enum { NO_PULL, PROXIMAL, GRADIENT };

#define DEFINE_STEP(NAME, REAL, FMA)                                                                                   \
    static inline __attribute__((always_inline)) void NAME##_as(                                                       \
        int kind, int64_t n, REAL rate, REAL *restrict theta, const REAL *restrict g, const REAL *restrict gain,       \
        const REAL *restrict shift, REAL *restrict path) {                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const REAL before = theta[i];                                                                              \
            REAL now = before;                                                                                         \
            if (kind == GRADIENT) now = FMA(now, gain[i], shift[i]);                                                   \
            now = FMA(g[i], -rate, now);                                                                               \
            if (kind == PROXIMAL) now = FMA(now, gain[i], shift[i]);                                                   \
            /* without a pull the move is -lr g, as PyTorch multiplies it: (lr g) g */                                 \
            path[i] = kind == NO_PULL ? FMA(rate * g[i], g[i], path[i]) : FMA(-g[i], now - before, path[i]);           \
            theta[i] = now;                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    /* A constant as the first argument gives each kind a loop of its own, without branches in it. */                  \
    void NAME(                                                                                                         \
        int64_t kind, int64_t n, double rate, REAL *theta, const REAL *g, const REAL *gain, const REAL *shift,         \
        REAL *path) {                                                                                                  \
        if (kind == NO_PULL) NAME##_as(NO_PULL, n, (REAL)rate, theta, g, gain, shift, path);                           \
        else if (kind == PROXIMAL) NAME##_as(PROXIMAL, n, (REAL)rate, theta, g, gain, shift, path);                    \
        else NAME##_as(GRADIENT, n, (REAL)rate, theta, g, gain, shift, path);                                          \
    }

DEFINE_STEP(step_float32, float, fmaf)
DEFINE_STEP(step_float64, double, fma)

/* --- One step of plain SGD of several weights on a gradient of limited norm: `ClippedStep` in fused.py. */

/* The root of the sum of squares, in PyTorch's order: eight sums, and the rest in fours, whose squares its compiler did
   not fuse with the additions, unlike the last three. */
static float norm_float32(int64_t n, const float *g) {
    enum { LANES = 8 };
    float sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += g[i + j] * g[i + j];
    for (int j = 1; j < LANES; j++) sums[0] += sums[j];
    for (const int64_t fours = n - n % 4; i < fours; i++) sums[0] += g[i] * g[i];
    for (; i < n; i++) sums[0] = fmaf(g[i], g[i], sums[0]);
    return sqrtf(sums[0]);
}

/* norms (weights) is memory to work in. */
void clipped_float32(
    int64_t weights, double rate, double largest, double eps, const int64_t *sizes, float *const *theta,
    float *const *gradients, float *norms) {
    for (int64_t k = 0; k < weights; k++) norms[k] = norm_float32(sizes[k], gradients[k]);
    const float factor = 1 / (norm_float32(weights, norms) + (float)eps) * (float)largest;
    for (int64_t k = 0; k < weights; k++) {
        float *restrict t = theta[k], *restrict g = gradients[k];
        if (!(factor >= 1)) /* also where it is NaN */
            for (int64_t i = 0; i < sizes[k]; i++) g[i] *= factor;
        for (int64_t i = 0; i < sizes[k]; i++) t[i] = fmaf(g[i], -(float)rate, t[i]);
    }
}

/* --- Pixels of a batch: `read_inputs` in data/batches.py. value (256) has what each byte becomes; order may be null. */

#define DEFINE_READ(NAME, REAL)                                                                                        \
    void NAME(                                                                                                         \
        int64_t samples, int64_t width, const uint8_t *restrict pixels, const int64_t *restrict rows,                  \
        const int64_t *restrict order, const REAL *restrict value, REAL *restrict out) {                               \
        for (int64_t i = 0; i < samples; i++) {                                                                        \
            const uint8_t *restrict row = pixels + rows[i] * width;                                                    \
            if (order)                                                                                                 \
                for (int64_t j = 0; j < width; j++) out[i * width + j] = value[row[order[j]]];                         \
            else                                                                                                       \
                for (int64_t j = 0; j < width; j++) out[i * width + j] = value[row[j]];                                \
        }                                                                                                              \
    }

DEFINE_READ(read_float32, float)
DEFINE_READ(read_float64, double)
