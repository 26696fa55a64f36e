/* One product of few rows: y = x · Wᵀ (`product.h`). Returns 0, or 1 if memory is missing. */

#include "product.h"

int few_rows(const float *x, const float *w, float *y, long rows, long in, long out, int threads) {
    float *panels = malloc(panel_size(rows, in) * sizeof(float));
    if (panels == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        pack(x, NULL, NULL, panels, rows, in);
        product(panels, w, y, rows, in, out, threads);
    }
    free(panels);
    return 0;
}
