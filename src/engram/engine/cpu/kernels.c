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
