/* y = x · Wᵀ for few rows: x [rows, in], w [out, in], y [rows, out], float32, row-major.

   A GEMM library repacks its operands, which costs more than it saves if x has few rows. Here the weights are read in
   place and once: a tile of 6 outputs × 16 rows stays in registers, and a block of 288 inputs of 16 rows (18 kB) stays in
   the L1 cache. Every sum is computed in the same order, whatever the number of rows and threads is, so a row's result
   does not depend on the rows beside it. */

#include <stdlib.h>
#include <string.h>

enum { LANES = 8, ROWS = 16, OUTS = 6, BLOCK = 288, CHUNK = 40 * OUTS };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* tile[o] += Σ over `depth` inputs of w[o, k] · panel[k], for 6 outputs and 16 rows. */
static void multiply(const float *panel, const float *w, long stride, long depth, float *tile) {
    vec sum[OUTS][2] = {{{0}}};
    for (long k = 0; k < depth; k++) {
        const vec low = *(const vec *)(panel + k * ROWS), high = *(const vec *)(panel + k * ROWS + LANES);
#pragma GCC unroll 6
        for (int o = 0; o < OUTS; o++) {
            const float weight = w[o * stride + k];
            sum[o][0] += low * weight;
            sum[o][1] += high * weight;
        }
    }
    for (int o = 0; o < OUTS; o++) {
        *(vec *)(tile + o * ROWS) += sum[o][0];
        *(vec *)(tile + o * ROWS + LANES) += sum[o][1];
    }
}

/* Outputs [first, first + count) of all rows; `panels` is x as [panel][in][16 rows]. */
static void chunk(const float *panels, const float *w, float *y, long rows, long in, long out, long first, long count) {
    const long num_panels = (rows + ROWS - 1) / ROWS;
    float tile[CHUNK * ROWS], tail[OUTS * BLOCK];
    for (long p = 0; p < num_panels; p++) {
        memset(tile, 0, sizeof tile);
        for (long begin = 0; begin < in; begin += BLOCK) {
            const long depth = in - begin < BLOCK ? in - begin : BLOCK;
            const float *panel = panels + (p * in + begin) * ROWS;
            for (long o = 0; o < count; o += OUTS) {
                const float *weights = w + (first + o) * in + begin;
                if (count - o >= OUTS) {
                    multiply(panel, weights, in, depth, tile + o * ROWS);
                } else { /* the last outputs: missing ones are zeros */
                    memset(tail, 0, sizeof tail);
                    for (long i = 0; i < count - o; i++) memcpy(tail + i * depth, weights + i * in, depth * sizeof(float));
                    multiply(panel, tail, depth, depth, tile + o * ROWS);
                }
            }
        }
        for (long r = 0; r < ROWS && p * ROWS + r < rows; r++)
            for (long o = 0; o < count; o++) y[(p * ROWS + r) * out + first + o] = tile[o * ROWS + r];
    }
}

/* x as [panel][in][16 rows]; missing rows are zeros. */
static void pack(const float *x, float *panels, long rows, long in, long p) {
    float *to = panels + p * in * ROWS;
    const long count = rows - p * ROWS < ROWS ? rows - p * ROWS : ROWS;
    for (long k = 0; k < in; k++, to += ROWS) {
        for (long r = 0; r < count; r++) to[r] = x[(p * ROWS + r) * in + k];
        for (long r = count; r < ROWS; r++) to[r] = 0;
    }
}

/* 0, or 1 if memory is missing. */
int few_rows(const float *x, const float *w, float *y, long rows, long in, long out, int threads) {
    const long num_panels = (rows + ROWS - 1) / ROWS;
    float *panels = malloc(num_panels * in * ROWS * sizeof(float));
    if (panels == NULL) return 1;
    /* As many chunks as threads, or a multiple: every thread has the same number of outputs, up to a tile. */
    const long num_chunks = threads * ((out + threads * CHUNK - 1) / (threads * CHUNK));
    const long size = ((out + num_chunks - 1) / num_chunks + OUTS - 1) / OUTS * OUTS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long p = 0; p < num_panels; p++) pack(x, panels, rows, in, p);
#pragma omp for schedule(static)
        for (long first = 0; first < out; first += size)
            chunk(panels, w, y, rows, in, out, first, out - first < size ? out - first : size);
    }
    free(panels);
    return 0;
}
