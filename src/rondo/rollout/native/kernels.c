/* One decode (or prefill) step of a Llama-family model in float32: embedding to sampled token.
 *
 * Every row is computed from its own numbers in a fixed order: no sum depends on how many rows there are, which slot a
 * row sits in, or which thread ran it. That is what makes a request's bits independent of its batch mates.
 *
 * Layouts. V: vector lanes; weights are packed [N / NR][K][NR] (zero padded). The cache consists of pages of PAGE
 * positions, which cache.py calls blocks; a sequence's positions lie in the pages that its row of the page table names.
 * Keys [page][kv_head][PAGE / V][dim][V] (V positions of one dimension side by side, so that scores need no horizontal
 * sums); values [page][kv_head][PAGE][dim]. Compiled at first use by kernels.py; GCC or Clang vector extensions, no
 * intrinsics.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define V 16
#define MR 8
#define NV 3
#else
#define V 8
#define MR 4
#define NV 3
#endif
#define NR (NV * V)
#define PAGE 64
#define LINE_FLOATS 16   /* of a cache line */
#define KC 512       /* depth of one pass of the matrix product */
#define BLOCK 256    /* rows that go through all layers together: the weights are read once for them */
#define TILE 64      /* rows that go through one layer together: its weights stay in the core's own cache */

typedef float vf __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * V), aligned(4), may_alias));
#define LOAD(p) (*(const vf *)(p))
#define STORE(p, x) (*(vf *)(p) = (x))
#define INLINE static inline __attribute__((always_inline))

/* Keeps a loaded vector in a register. GCC would read it from memory again for every multiplication, and a core that
 * loads two vectors per cycle then multiplies at half its rate. */
#if defined(__x86_64__)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define IN_REGISTER(x) __asm__("" : "+w"(x))
#else
#define IN_REGISTER(x)
#endif

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;   /* q_norm, k_norm: NULL where the family has none */
    const float *qkv, *o, *gate_up, *down;                   /* packed */
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias; /* NULL where there is none */
    float *keys, *values;                                    /* this layer's part of the cache */
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab, num_layers, capacity; /* positions of a sequence */
    double eps, scale;
    const float *embedding, *cos, *sin, *final_norm, *head, *head_bias;
    const Layer *layers;
} Model;

/* Indexed by slot. */
typedef struct {
    const int64_t *seeds, *indices, *top_k;
    const float *temperature, *top_p, *min_p;
} Decoding;

INLINE vf splat(float x) { vf z = {0}; return z + x; }
INLINE vf select_vf(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf max_vf(vf a, vf b) { return select_vf(a > b, a, b); }
INLINE float sum_lanes(vf x) { float s = 0; for (int i = 0; i < V; i++) s += x[i]; return s; }
INLINE float max_lanes(vf x) { float m = x[0]; for (int i = 1; i < V; i++) m = x[i] > m ? x[i] : m; return m; }
INLINE vi lane_numbers(void) { vi n; for (int i = 0; i < V; i++) n[i] = i; return n; }

/* exp to about 1 ulp (Cephes); arguments below -87 give about 1e-38. */
INLINE vf exp_vf(vf x) {
    x = select_vf(x < splat(-87.0f), splat(-87.0f), x);
    x = select_vf(x > splat(88.0f), splat(88.0f), x);
    vf magic = splat(12582912.0f), n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)e;
}

/* ---- matrix product: C[rows, N] (+)= A[rows, K] @ W, one row's sum always runs over k in order ---- */

/* What all row tiles of one panel, KC deep, share. They also fetch `ahead`, the panel's worth of weights that comes
 * next, `step` floats per k each: a decode step reads every weight from memory once, and between two panels the
 * multipliers would wait for it. */
typedef struct {
    const float *weights, *bias, *ahead;
    int64_t depth, columns, step, lda, ldc;
    int add;
} Panel;

INLINE void tile(int mr, const Panel *p, const float *a, float *c) {
    vf acc[MR][NV];
    const float *b = p->weights, *ahead = p->ahead;
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < NV; j++) acc[i][j] = splat(0);
    for (int64_t k = 0; k < p->depth; k++, b += NR, ahead += p->step) {
        vf w[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            w[j] = LOAD(b + j * V);
            IN_REGISTER(w[j]);
        }
        __builtin_prefetch(ahead, 0, 2);   /* each line of them: of few rows a step has several */
        if (p->step > LINE_FLOATS) __builtin_prefetch(ahead + LINE_FLOATS, 0, 2);
        if (p->step > 2 * LINE_FLOATS) __builtin_prefetch(ahead + 2 * LINE_FLOATS, 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            float x = a[i * p->lda + k];
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) acc[i][j] += x * w[j];
        }
    }
    for (int i = 0; i < mr; i++, c += p->ldc) {
        float out[NR];
        for (int j = 0; j < NV; j++) STORE(out + j * V, acc[i][j]);
        if (p->columns == NR && !p->bias) {
            for (int j = 0; j < NV; j++) {
                vf y = acc[i][j];
                if (p->add) y += LOAD(c + j * V);
                STORE(c + j * V, y);
            }
            continue;
        }
        for (int64_t n = 0; n < p->columns; n++)
            c[n] = (p->add ? c[n] : 0) + out[n] + (p->bias ? p->bias[n] : 0);
    }
}

static void gemm(const float *a, int64_t lda, const float *packed, int64_t rows, int64_t K, int64_t N, float *c,
                 int64_t ldc, int add, const float *bias) {
    int64_t tiles = (rows + MR - 1) / MR;
    for (int64_t n = 0; n < N; n += NR, packed += K * NR)
        for (int64_t k = 0; k < K; k += KC) {
            Panel p = {.weights = packed + k * NR, .bias = bias && k == 0 ? bias + n : NULL, .lda = lda, .ldc = ldc,
                       .depth = K - k < KC ? K - k : KC, .columns = N - n < NR ? N - n : NR, .step = NR / tiles,
                       .add = add || k > 0};
            p.ahead = p.weights + p.depth * NR;
            for (int64_t r = 0; r < rows; p.ahead += p.depth * p.step) {
                int64_t left = rows - r;
                const float *x = a + r * lda + k;
                float *y = c + r * ldc + n;
                if (left >= MR) tile(MR, &p, x, y), r += MR;
                else if (left >= 4) tile(4, &p, x, y), r += 4;
                else if (left == 3) tile(3, &p, x, y), r += 3;
                else if (left == 2) tile(2, &p, x, y), r += 2;
                else tile(1, &p, x, y), r += 1;
            }
        }
}

/* w: [N, K] rows as PyTorch stores them, written as columns first .. first + N of a packed matrix. */
void rondo_pack(const float *w, int64_t N, int64_t K, float *packed, int64_t first) {
    for (int64_t n = 0; n < N; n++) {
        float *column = packed + (first + n) / NR * K * NR + (first + n) % NR;
        for (int64_t k = 0; k < K; k++) column[k * NR] = w[n * K + k];
    }
}

int64_t rondo_lanes(void) { return V; }
int64_t rondo_panel(void) { return NR; }
int64_t rondo_page(void) { return PAGE; }

/* ---- pieces of a layer ---- */

static void rms_norm(const float *x, const float *weight, float *y, int64_t n, double eps) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + V <= n; i += V) squares += LOAD(x + i) * LOAD(x + i);
    float sum = sum_lanes(squares);
    for (; i < n; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)n + (float)eps);
    for (i = 0; i + V <= n; i += V) STORE(y + i, LOAD(x + i) * scale * LOAD(weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

static void rope(float *x, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Norm, rotate and store one row's keys and values at its position; norm and rotate its queries in place. */
static void place(const Model *m, const Layer *l, float *qkv, const int32_t *pages, int64_t position) {
    int64_t D = m->head_dim, KV = m->kv_heads;
    const float *cos = m->cos + position * D, *sin = m->sin + position * D;
    for (int64_t h = 0; h < m->heads + KV; h++) {
        const float *norm = h < m->heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm(qkv + h * D, norm, qkv + h * D, D, m->eps);
        rope(qkv + h * D, cos, sin, D);
    }
    int64_t page = pages[position / PAGE], offset = position % PAGE;
    for (int64_t h = 0; h < KV; h++) {
        const float *key = qkv + (m->heads + h) * D, *value = key + KV * D;
        float *keys = l->keys + ((page * KV + h) * PAGE + offset / V * V) * D + offset % V;
        for (int64_t d = 0; d < D; d++) keys[d * V] = key[d];
        memcpy(l->values + ((page * KV + h) * PAGE + offset) * D, value, D * sizeof(float));
    }
}

/* exp(score - peak) in place, 0 beyond length; returns 1 / their sum. */
static float exponentials(float *scores, float peak, int64_t blocks, int64_t length) {
    vf total = splat(0);
    for (int64_t b = 0; b < blocks; b++) {
        vi seen = lane_numbers() + (int32_t)(b * V) < (int32_t)length;
        vf e = select_vf(seen, exp_vf(LOAD(scores + b * V) - peak), splat(0));
        STORE(scores + b * V, e);
        total += e;
    }
    return 1.0f / sum_lanes(total);
}

/* One key/value head of a sequence: its part of page p lies at keys + pages[p] * stride, and so do its values. */
typedef struct {
    const float *keys, *values;
    const int32_t *pages;
    int64_t stride, length;
} Cached;

/* Two query heads (or one, twice) that share a key/value head. scores: two times the length rounded up to V. */
static void attend(const float *q0, const float *q1, const Cached *cached, float *out0, float *out1, float *scores,
                   int64_t D, float scale) {
    int64_t length = cached->length;
    int64_t blocks = (length + V - 1) / V;
    float *s0 = scores, *s1 = scores + blocks * V;
    vf top0 = splat(-INFINITY), top1 = top0;
    for (int64_t b = 0; b < blocks; b++) {
        const float *keys = cached->keys + cached->pages[b * V / PAGE] * cached->stride + b * V % PAGE * D;
        vf a[4] = {splat(0), splat(0), splat(0), splat(0)}, c[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (int64_t d = 0; d < D; d += 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                vf k = LOAD(keys + (d + j) * V);
                a[j] += q0[d + j] * k;
                c[j] += q1[d + j] * k;
            }
        vi seen = lane_numbers() + (int32_t)(b * V) < (int32_t)length;
        vf x = select_vf(seen, ((a[0] + a[1]) + (a[2] + a[3])) * scale, splat(-INFINITY));
        vf y = select_vf(seen, ((c[0] + c[1]) + (c[2] + c[3])) * scale, splat(-INFINITY));
        STORE(s0 + b * V, x);
        STORE(s1 + b * V, y);
        top0 = max_vf(x, top0);
        top1 = max_vf(y, top1);
    }
    float inverse0 = exponentials(s0, max_lanes(top0), blocks, length);
    float inverse1 = exponentials(s1, max_lanes(top1), blocks, length);
    for (int64_t d = 0; d < D; d += V) {
        vf a[4] = {splat(0), splat(0), splat(0), splat(0)}, c[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (int64_t first = 0; first < length; first += PAGE) {
            const float *v = cached->values + cached->pages[first / PAGE] * cached->stride + d;
            const float *e0 = s0 + first, *e1 = s1 + first;
            int64_t n = length - first < PAGE ? length - first : PAGE, t = 0;
            for (; t + 4 <= n; t += 4)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    vf x = LOAD(v + (t + j) * D);
                    a[j] += e0[t + j] * x;
                    c[j] += e1[t + j] * x;
                }
            for (; t < n; t++) {
                vf x = LOAD(v + t * D);
                a[0] += e0[t] * x;
                c[0] += e1[t] * x;
            }
        }
        STORE(out0 + d, ((a[0] + a[1]) + (a[2] + a[3])) * inverse0);
        STORE(out1 + d, ((c[0] + c[1]) + (c[2] + c[3])) * inverse1);
    }
}

/* All query heads of one row that share one key/value head. */
static void attend_group(const Model *m, const float *q, const Cached *cached, float *out, float *scores) {
    int64_t D = m->head_dim, group = m->heads / m->kv_heads;
    for (int64_t g = 0; g < group; g += 2) {
        int64_t other = g + 1 < group ? g + 1 : g;
        attend(q + g * D, q + other * D, cached, out + g * D, out + other * D, scores, D, (float)m->scale);
    }
}

static void attend_row(const Model *m, const Layer *l, const float *q, const int32_t *pages, int64_t position,
                       float *out, float *scores) {
    int64_t D = m->head_dim, KV = m->kv_heads, group = m->heads / KV, head = PAGE * D;
    for (int64_t h = 0; h < KV; h++) {
        Cached cached = {l->keys + h * head, l->values + h * head, pages, KV * head, position + 1};
        attend_group(m, q + h * group * D, &cached, out + h * group * D, scores);
    }
}

static void swiglu(const float *gate_up, float *y, int64_t n) {
    const float *up = gate_up + n;
    int64_t i = 0;
    for (; i + V <= n; i += V) {
        vf g = LOAD(gate_up + i);
        STORE(y + i, g / (1.0f + exp_vf(-g)) * LOAD(up + i));
    }
    for (; i < n; i++) y[i] = gate_up[i] / (1.0f + exp_vf(splat(-gate_up[i]))[0]) * up[i];
}

/* ---- sampling ---- */

INLINE double uniform(uint64_t seed, uint64_t index) {   /* splitmix64; the same as noise.py */
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

typedef struct { float p; int32_t id; } Candidate;

static int by_probability(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : x->id - y->id;
}

/* Zero the weights outside top-k, then top-p of what is left, then min-p; ties go to the lower id. */
static void truncate_weights(float *e, int64_t n, Candidate *order, int64_t top_k, float top_p, float min_p) {
    for (int64_t i = 0; i < n; i++) order[i] = (Candidate){e[i], (int32_t)i};
    qsort(order, n, sizeof(Candidate), by_probability);
    int64_t keep = top_k > 0 && top_k < n ? top_k : n;
    if (top_p < 1.0f) {
        double total = 0, before = 0;
        for (int64_t i = 0; i < keep; i++) total += order[i].p;
        int64_t i = 0;
        for (; i < keep && (i == 0 || before < (double)top_p * total); i++) before += order[i].p;
        keep = i;
    }
    while (keep > 1 && order[keep - 1].p < min_p * order[0].p) keep--;
    for (int64_t i = keep; i < n; i++) e[order[i].id] = 0;
}

/* Returns the token, or -1 where a logit is not finite. logits are overwritten; n is padded to whole vectors. */
static int64_t sample(float *x, int64_t n, Candidate *order, float temperature, int64_t top_k, float top_p,
                      float min_p, double u, float *log_prob) {
    int64_t padded = (n + V - 1) / V * V;
    int greedy = temperature == 0.0f;
    float t = greedy ? 1.0f : temperature;
    for (int64_t i = n; i < padded; i++) x[i] = -INFINITY;
    vf top = splat(-INFINITY), bad = splat(0);
    for (int64_t i = 0; i < padded; i += V) {
        vf s = LOAD(x + i) / t;
        STORE(x + i, s);
        top = max_vf(s, top);
    }
    for (int64_t i = 0; i + V <= n; i += V) bad += LOAD(x + i) - LOAD(x + i);
    float peak = max_lanes(top), spread = sum_lanes(bad);
    for (int64_t i = n / V * V; i < n; i++) spread += x[i] - x[i];
    if (!(spread == 0.0f)) return -1;
    int64_t chosen = 0;
    while (x[chosen] != peak) chosen++;
    float score = peak;
    if (greedy) {
        double sum = 0;
        for (int64_t i = 0; i < padded; i += V) sum += sum_lanes(exp_vf(LOAD(x + i) - peak));
        *log_prob = -(float)log(sum);
        return chosen;
    }
    float *e = x + padded;   /* room for it is in the scratch */
    double total = 0;
    for (int64_t i = 0; i < padded; i += V) {
        vf p = exp_vf(LOAD(x + i) - peak);
        STORE(e + i, p);
    }
    for (int64_t i = n; i < padded; i++) e[i] = 0;
    for (int64_t i = 0; i < padded; i += V) total += sum_lanes(LOAD(e + i));
    double log_total = log(total);
    if (top_k > 0 || top_p < 1.0f || min_p > 0.0f) {
        truncate_weights(e, n, order, top_k, top_p, min_p);
        total = 0;
        for (int64_t i = 0; i < padded; i += V) total += sum_lanes(LOAD(e + i));
    }
    double target = u * total, below = 0;
    int64_t i = 0;
    for (; i < padded; i += V) {   /* whole vectors first, then inside the one that holds the target */
        double next = below + sum_lanes(LOAD(e + i));
        if (next > target) break;
        below = next;
    }
    for (; i < n; i++) {
        if (e[i] > 0) { chosen = i; score = x[i]; }
        below += e[i];
        if (below > target && e[i] > 0) break;
    }
    *log_prob = score - peak - (float)log_total;
    return chosen;
}

/* ---- the step ---- */

enum { X, NORMED, QKV, ATTENDED, GATE_UP, ACT, LOGITS, SCORES, LINE, CANDIDATES, NUM_BUFFERS };

static int64_t scratch_sizes(const Model *m, int64_t *floats) {
    floats[X] = BLOCK * m->hidden;                       /* residual stream */
    floats[NORMED] = TILE * m->hidden;
    floats[QKV] = TILE * (m->heads + 2 * m->kv_heads) * m->head_dim;
    floats[ATTENDED] = TILE * m->heads * m->head_dim;
    floats[GATE_UP] = TILE * 2 * m->intermediate;
    floats[ACT] = TILE * m->intermediate;
    floats[LOGITS] = TILE * m->vocab;
    floats[SCORES] = 2 * (m->capacity + V);              /* of two heads */
    floats[LINE] = 2 * (m->vocab + V);                   /* one row's logits and weights */
    floats[CANDIDATES] = 2 * m->vocab;
    int64_t total = 0;
    for (int i = 0; i < NUM_BUFFERS; i++) total += floats[i] = (floats[i] + 31) / 32 * 32;
    return total;
}

int64_t rondo_scratch_floats(const Model *m) { int64_t floats[NUM_BUFFERS]; return scratch_sizes(m, floats); }

static void layer_forward(const Model *m, const Layer *l, float *const *buffer, float *x, int64_t n,
                          const int64_t *slot, const int64_t *position, const int32_t *table) {
    int64_t table_width = m->capacity / PAGE;
    int64_t H = m->hidden, I = m->intermediate, Q = m->heads * m->head_dim, width = Q + 2 * m->kv_heads * m->head_dim;
    float *h = buffer[NORMED], *qkv = buffer[QKV], *att = buffer[ATTENDED];
    float *gate_up = buffer[GATE_UP], *act = buffer[ACT];
    for (int64_t r = 0; r < n; r++) rms_norm(x + r * H, l->input_norm, h + r * H, H, m->eps);
    gemm(h, H, l->qkv, n, H, width, qkv, width, 0, l->qkv_bias);
    for (int64_t r = 0; r < n; r++) place(m, l, qkv + r * width, table + slot[r] * table_width, position[r]);
    for (int64_t r = 0; r < n; r++)
        attend_row(m, l, qkv + r * width, table + slot[r] * table_width, position[r], att + r * Q, buffer[SCORES]);
    gemm(att, Q, l->o, n, Q, H, x, H, 1, l->o_bias);
    for (int64_t r = 0; r < n; r++) rms_norm(x + r * H, l->post_norm, h + r * H, H, m->eps);
    gemm(h, H, l->gate_up, n, H, 2 * I, gate_up, 2 * I, 0, l->gate_up_bias);
    for (int64_t r = 0; r < n; r++) swiglu(gate_up + r * 2 * I, act + r * I, I);
    gemm(act, I, l->down, n, I, H, x, H, 1, l->down_bias);
}

/* Head and sampling for n rows. Returns -1, or the first row whose logits are not finite. */
static int64_t sample_rows(const Model *m, float *const *buffer, const float *x, int64_t n, const int64_t *slot,
                           const Decoding *s, int64_t *ids, float *log_probs) {
    int64_t H = m->hidden;
    float *h = buffer[NORMED], *logits = buffer[LOGITS], *line = buffer[LINE];
    for (int64_t r = 0; r < n; r++) rms_norm(x + r * H, m->final_norm, h + r * H, H, m->eps);
    gemm(h, H, m->head, n, H, m->vocab, logits, m->vocab, 0, m->head_bias);
    for (int64_t r = 0; r < n; r++) {
        int64_t i = slot[r];
        memcpy(line, logits + r * m->vocab, m->vocab * sizeof(float));
        ids[r] = sample(line, m->vocab, (Candidate *)buffer[CANDIDATES], s->temperature[i], s->top_k[i], s->top_p[i],
                        s->min_p[i], uniform((uint64_t)s->seeds[i], (uint64_t)s->indices[i]), log_probs + r);
        if (ids[r] < 0) return r;
    }
    return -1;
}

/* Row i is tokens[i] at positions[i] of slots[i]; rows of one sequence come in order of position. table: the pages of
 * every slot, [slots][capacity / PAGE]. decoding NULL: fill the cache only. ids, log_probs: one per row. Returns -1, or
 * the first row whose logits are not finite. */
int64_t rondo_step(const Model *m, float *scratch, int64_t rows, const int64_t *tokens, const int64_t *slots,
                   const int64_t *positions, const int32_t *table, const Decoding *decoding, int64_t *ids,
                   float *log_probs) {
    int64_t floats[NUM_BUFFERS], H = m->hidden;
    float *buffer[NUM_BUFFERS];
    scratch_sizes(m, floats);
    for (int i = 0; i < NUM_BUFFERS; scratch += floats[i++]) buffer[i] = scratch;
    for (int64_t first = 0; first < rows; first += BLOCK) {
        int64_t block = rows - first < BLOCK ? rows - first : BLOCK;
        float *x = buffer[X];
        for (int64_t r = 0; r < block; r++) memcpy(x + r * H, m->embedding + tokens[first + r] * H, H * sizeof(float));
        for (int64_t i = 0; i < m->num_layers; i++)
            for (int64_t r = 0; r < block; r += TILE)
                layer_forward(m, m->layers + i, buffer, x + r * H, block - r < TILE ? block - r : TILE,
                              slots + first + r, positions + first + r, table);
        for (int64_t r = 0; decoding && r < block; r += TILE) {
            int64_t at = first + r, n = block - r < TILE ? block - r : TILE;
            int64_t bad = sample_rows(m, buffer, x + r * H, n, slots + at, decoding, ids + at, log_probs + at);
            if (bad >= 0) return at + bad;
        }
    }
    return -1;
}

/* The first `length` positions of page `source` to page `target`, in every layer. */
void rondo_copy(const Model *m, int64_t source, int64_t target, int64_t length) {
    int64_t D = m->head_dim, stride = PAGE * D;
    for (int64_t i = 0; i < m->num_layers; i++)
        for (int64_t h = 0; h < m->kv_heads; h++) {
            int64_t from = (source * m->kv_heads + h) * stride, to = (target * m->kv_heads + h) * stride;
            float *keys = m->layers[i].keys, *values = m->layers[i].values;
            memcpy(keys + to, keys + from, (length + V - 1) / V * V * D * sizeof(float));
            memcpy(values + to, values + from, length * D * sizeof(float));
        }
}

/* For benchmarks: the product that the step uses, alone. */
void rondo_gemm(const float *a, const float *packed, int64_t rows, int64_t K, int64_t N, float *c) {
    gemm(a, K, packed, rows, K, N, c, N, 0, NULL);
}
