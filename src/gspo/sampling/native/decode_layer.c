/* One layer of a Llama-like model for the next token of each row, in place: x [rows, hidden], float32.

       x += W_o attention(rope(norm(x)))        x += W_down (silu(W_gate n) · W_up n),  n = norm(x)

   The keys and values of a prompt are stored once for its group, those of the sampled tokens per row
   (`sampling/local/attention.py`). Every sum over a row is computed in the same order, whatever the other rows are.

   Shapes: K key/value heads, E query heads per key/value head, D head dimension. */

#include <math.h>
#include <stdint.h>

#include "product.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

struct layer {
    /* weights; the biases and the norms of queries and keys may be NULL */
    const float *norm_1, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *norm_2, *gate, *up, *down;
    const float *prompt_k, *prompt_v; /* [groups, K, prompt_capacity, D] */
    float *own_k, *own_v;             /* [rows, K, own_capacity, D] */
};

struct rows {
    int64_t rows, hidden, wide, heads, kv_heads, dim, prompt_capacity, own_capacity;
    int64_t max_keys;                            /* of a row, the new one included */
    const int64_t *group, *prompt_len, *own_len; /* [rows]; own_len: stored before this token */
    const float *cos, *sin;                      /* [rows, D] */
    double eps, scale;                           /* of the norms; of the attention scores */
};

typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));

static long rounded(long size) { return (size + LANES - 1) / LANES * LANES; }

/* eˣ within two units of the last place. */
static inline vec exp_of(vec x) {
    const vec low = (vec){0} - 87.0f, high = (vec){0} + 88.0f;
    ivec outside = x < low;
    x = (vec)((outside & (ivec)low) | (~outside & (ivec)x));
    outside = x > high;
    x = (vec)((outside & (ivec)high) | (~outside & (ivec)x));
    /* x = n · ln 2 + r; adding and subtracting 1.5 · 2²³ rounds to an integer. */
    const vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

static inline float sum_of(vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

/* 1 / √(mean of x² + eps) over `size` numbers. */
static float inverse_rms(const float *x, long size, double eps) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sum += *(const vec *)(x + i) * *(const vec *)(x + i);
    float total = sum_of(sum);
    for (; i < size; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / size + (float)eps);
}

/* Bias, norm and rotation of one head [D], in place. */
static void finish_head(float *x, const float *bias, const float *norm, const float *cos, const float *sin, long dim, double eps) {
    if (bias != NULL)
        for (long d = 0; d < dim; d++) x[d] += bias[d];
    if (norm != NULL) {
        const float scale = inverse_rms(x, dim, eps);
        for (long d = 0; d < dim; d++) x[d] = norm[d] * (scale * x[d]);
    }
    for (long d = 0, half = dim / 2; d < half; d++) {
        const float low = x[d], high = x[d + half];
        x[d] = low * cos[d] - high * sin[d];
        x[d + half] = high * cos[d + half] + low * sin[d + half];
    }
}

/* scores[e, at + i] = q[e] · key[i] for `count` keys. */
static void score(const float *q, const float *keys, float *scores, long per_kv, long count, long stride, long at, long dim) {
    for (long i = 0; i < count; i++)
        for (long e = 0; e < per_kv; e++) {
            vec sum = {0};
            for (long d = 0; d < dim; d += LANES) sum += *(const vec *)(q + e * dim + d) * *(const vec *)(keys + i * dim + d);
            scores[e * stride + at + i] = sum_of(sum);
        }
}

/* out[e] += Σ weights[e, at + i] · value[i] for `count` values. */
static void gather(const float *weights, const float *values, float *out, long per_kv, long count, long stride, long at, long dim) {
    for (long i = 0; i < count; i++)
        for (long e = 0; e < per_kv; e++) {
            const float weight = weights[e * stride + at + i];
            for (long d = 0; d < dim; d += LANES) *(vec *)(out + e * dim + d) += *(const vec *)(values + i * dim + d) * weight;
        }
}

/* Attention of one row and key/value head: q [E, D], k and v [D] of the new token, out [E, D]. */
static void attend(const struct layer *l, const struct rows *s, long r, long j, float *q, float *k, float *v, float *out, float *scores) {
    const long dim = s->dim, per_kv = s->heads / s->kv_heads, stride = rounded(s->max_keys);
    const long num_prompt = s->prompt_len[r], num_own = s->own_len[r] + 1, num = num_prompt + num_own;
    const float *cos = s->cos + r * dim, *sin = s->sin + r * dim;
    const long prompt = (s->group[r] * s->kv_heads + j) * s->prompt_capacity * dim;
    const long own = (r * s->kv_heads + j) * s->own_capacity * dim, last = own + (num_own - 1) * dim;
    finish_head(k, l->k_bias ? l->k_bias + j * dim : NULL, l->k_norm, cos, sin, dim, s->eps);
    for (long d = 0; d < dim; d++) {
        l->own_k[last + d] = k[d];
        l->own_v[last + d] = v[d] + (l->v_bias ? l->v_bias[j * dim + d] : 0);
    }
    for (long e = 0; e < per_kv; e++) {
        float *head = q + e * dim;
        finish_head(head, l->q_bias ? l->q_bias + (j * per_kv + e) * dim : NULL, l->q_norm, cos, sin, dim, s->eps);
        for (long d = 0; d < dim; d++) head[d] *= (float)s->scale;
    }
    score(q, l->prompt_k + prompt, scores, per_kv, num_prompt, stride, 0, dim);
    score(q, l->own_k + own, scores, per_kv, num_own, stride, num_prompt, dim);
    float total[per_kv];
    for (long e = 0; e < per_kv; e++) {
        float *row = scores + e * stride, peak = row[0];
        for (long i = 1; i < num; i++) peak = row[i] > peak ? row[i] : peak;
        for (long i = num; i < rounded(num); i++) row[i] = -INFINITY;
        vec sum = {0};
        for (long i = 0; i < num; i += LANES) sum += *(vec *)(row + i) = exp_of(*(vec *)(row + i) - peak);
        total[e] = sum_of(sum);
    }
    memset(out, 0, per_kv * dim * sizeof(float));
    gather(scores, l->prompt_v + prompt, out, per_kv, num_prompt, stride, 0, dim);
    gather(scores, l->own_v + own, out, per_kv, num_own, stride, num_prompt, dim);
    for (long e = 0; e < per_kv; e++)
        for (long d = 0; d < dim; d++) out[e * dim + d] /= total[e];
}

/* The floats of `scratch`: scale | a | b | c | panels | scores per thread. a, b, c hold q, k, v; then gate, up; then y. */
static long widest(const struct rows *s) {
    const long inner = s->heads * s->dim, most = inner > s->wide ? inner : s->wide;
    return most > s->hidden ? most : s->hidden;
}

int64_t decode_scratch(const struct rows *s, int threads) {
    const long per_kv = s->heads / s->kv_heads;
    return rounded(s->rows) + 3 * rounded(s->rows * widest(s)) + panel_size(s->rows, widest(s)) +
           threads * per_kv * rounded(s->max_keys);
}

void decode_layer(const struct layer *l, const struct rows *s, float *x, float *scratch, int threads) {
    const long rows = s->rows, hidden = s->hidden, wide = s->wide, dim = s->dim, kv = s->kv_heads;
    const long inner = s->heads * dim, per_kv = s->heads / kv, size = rounded(rows * widest(s));
    float *scale = scratch, *a = scale + rounded(rows), *b = a + size, *c = b + size, *panels = c + size;
    float *scores = panels + panel_size(rows, widest(s));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) scale[r] = inverse_rms(x + r * hidden, hidden, s->eps);
        pack(x, scale, l->norm_1, panels, rows, hidden);
        product(panels, l->q, a, rows, hidden, inner, threads);
        product(panels, l->k, b, rows, hidden, kv * dim, threads);
        product(panels, l->v, c, rows, hidden, kv * dim, threads);
        float *mine = scores + omp_get_thread_num() * per_kv * rounded(s->max_keys);
#pragma omp for collapse(2) schedule(static)
        for (long r = 0; r < rows; r++)
            for (long j = 0; j < kv; j++) {
                float *q = a + r * inner + j * per_kv * dim, out[per_kv * dim];
                attend(l, s, r, j, q, b + (r * kv + j) * dim, c + (r * kv + j) * dim, out, mine);
                memcpy(q, out, sizeof out);
            }
        pack(a, NULL, NULL, panels, rows, inner);
        product(panels, l->o, b, rows, inner, hidden, threads);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            for (long i = r * hidden; i < (r + 1) * hidden; i++) x[i] += b[i];
            scale[r] = inverse_rms(x + r * hidden, hidden, s->eps);
        }
        pack(x, scale, l->norm_2, panels, rows, hidden);
        product(panels, l->gate, a, rows, hidden, wide, threads);
        product(panels, l->up, b, rows, hidden, wide, threads);
#pragma omp for schedule(static)
        for (long i = 0; i < rows * wide; i += LANES) {
            vec *gate = (vec *)(a + i);
            *gate = *gate / (1.0f + exp_of(-*gate)) * *(vec *)(b + i);
        }
        pack(a, NULL, NULL, panels, rows, wide);
        product(panels, l->down, b, rows, wide, hidden, threads);
#pragma omp for schedule(static)
        for (long i = 0; i < rows * hidden; i++) x[i] += b[i];
    }
}
