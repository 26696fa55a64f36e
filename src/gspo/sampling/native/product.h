/* y = x · Wᵀ for few rows: x [rows, in], w [out, in], y [rows, out], float32, row-major.

   A GEMM library repacks its operands, which costs more than it saves if x has few rows. Here the weights are read in
   place and once: a tile of 6 outputs × 16 rows stays in registers, and a block of 288 inputs of 16 rows (18 kB) stays in
   the L1 cache. Every sum is computed in the same order, whatever the number of rows and threads is, so a row's result
   does not depend on the rows beside it.

   `pack` and `product` are called by all threads of a parallel region; each ends with a barrier. */

#ifndef GSPO_PRODUCT_H
#define GSPO_PRODUCT_H

#include <stdlib.h>
#include <string.h>

enum { LANES = 8, ROWS = 16, OUTS = 6, BLOCK = 288, CHUNK = 40 * OUTS, PANELS = 4 };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* tile[o] += Σ over `depth` inputs of w[o, k] · panel[k], for 6 outputs and 16 rows. */
static void multiply(const float *panel, const float *w, long stride, long depth, float *tile) {
    vec sum[OUTS][2] = {{{0}}};
    for (long k = 0; k < depth; k++) {
        if (k % 16 == 0) /* the weights of the next tile; past the end of the matrix this does nothing */
            for (int o = OUTS; o < 2 * OUTS; o++) __builtin_prefetch(w + o * stride + k);
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

/* Outputs [first, first + count) of up to PANELS panels; `panels` is x as [panel][in][16 rows]. A block of weights is used
   for all panels while it is in the L1 cache. */
static void chunk(const float *panels, const float *w, float *y, long rows, long in, long out, long first, long count) {
    const long num_panels = (rows + ROWS - 1) / ROWS;
    float tile[PANELS][CHUNK * ROWS], tail[OUTS * BLOCK];
    memset(tile, 0, num_panels * sizeof tile[0]);
    for (long begin = 0; begin < in; begin += BLOCK) {
        const long depth = in - begin < BLOCK ? in - begin : BLOCK;
        for (long o = 0; o < count; o += OUTS) {
            const float *weights = w + (first + o) * in + begin;
            long stride = in;
            if (count - o < OUTS) { /* the last outputs: missing ones are zeros */
                memset(tail, 0, sizeof tail);
                for (long i = 0; i < count - o; i++) memcpy(tail + i * depth, weights + i * in, depth * sizeof(float));
                weights = tail, stride = depth;
            }
            for (long p = 0; p < num_panels; p++)
                multiply(panels + (p * in + begin) * ROWS, weights, stride, depth, tile[p] + o * ROWS);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < count; o++) y[r * out + first + o] = tile[r / ROWS][o * ROWS + r % ROWS];
}

/* x as [panel][in][16 rows]; missing rows are zeros. With `scale` [rows], the rows are those of an RMS norm:
   weight[k] · (scale[r] · x[r, k]). */
static void pack(const float *x, const float *scale, const float *weight, float *panels, long rows, long in) {
    const long num_panels = (rows + ROWS - 1) / ROWS, num_blocks = (in + BLOCK - 1) / BLOCK;
#pragma omp for collapse(2) schedule(static)
    for (long p = 0; p < num_panels; p++)
        for (long b = 0; b < num_blocks; b++) {
            const long end = (b + 1) * BLOCK < in ? (b + 1) * BLOCK : in;
            const long count = rows - p * ROWS < ROWS ? rows - p * ROWS : ROWS;
            for (long k = b * BLOCK; k < end; k++) {
                float *to = panels + (p * in + k) * ROWS;
                for (long r = 0; r < count; r++) {
                    const float value = x[(p * ROWS + r) * in + k];
                    to[r] = scale == NULL ? value : weight[k] * (scale[p * ROWS + r] * value);
                }
                for (long r = count; r < ROWS; r++) to[r] = 0;
            }
        }
}

/* y = x · Wᵀ from the panels of x. */
static void product(const float *panels, const float *w, float *y, long rows, long in, long out, int threads) {
    /* As many chunks as threads, or a multiple: every thread has the same number of outputs, up to a tile. */
    const long num_chunks = threads * ((out + threads * CHUNK - 1) / (threads * CHUNK));
    const long size = ((out + num_chunks - 1) / num_chunks + OUTS - 1) / OUTS * OUTS;
#pragma omp for schedule(static)
    for (long first = 0; first < out; first += size)
        for (long r = 0; r < rows; r += PANELS * ROWS)
            chunk(panels + r * in, w, y + r * out, rows - r < PANELS * ROWS ? rows - r : PANELS * ROWS, in, out, first,
                  out - first < size ? out - first : size);
}

/* The floats of the panels of x. */
static long panel_size(long rows, long in) { return (rows + ROWS - 1) / ROWS * ROWS * in; }

#endif
