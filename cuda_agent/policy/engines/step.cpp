// What a pass of the decoder does between its matrix products, on a cpu in float32; native.py compiles it.
//
// torch's own operators for this read the key-value cache up to the longest row, through a masked kernel made for many
// query positions, and cost more in dispatch than in arithmetic for small models.  Every result is independent of the
// number of threads and of the other rows.
//
// HEAD (size of a head) and GROUP (query heads that share a key head) are given by the compiler's command line.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// exp(x) for x <= 0, relative error 2e-7: 2^n * e^r with |r| <= ln(2)/2.
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.66666657e-1f + r * (4.16657962e-2f + r * (8.33345205e-3f + r * 1.39819994e-3f)))));
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float inverse_rms(const float* x, long n, float eps) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / n + eps);
}

// One head: norm (weight null: none), then the rotation of pairs (2j, 2j+1) by rotation[j] = (cos, sin).
static inline void norm_rotate(float* x, const float* weight, const float* rotation, float eps) {
    float factor = weight ? inverse_rms(x, HEAD, eps) : 1.0f;
    for (int j = 0; j < HEAD; j += 2) {
        float a = x[j] * factor, b = x[j + 1] * factor;
        if (weight) a *= weight[j], b *= weight[j + 1];
        x[j] = a * rotation[j] - b * rotation[j + 1];
        x[j + 1] = a * rotation[j + 1] + b * rotation[j];
    }
}

extern "C" {

// qkv [rows, GROUP kv_heads + 2 kv_heads, HEAD] (q and k are normed and rotated in place), scale [heads + kv_heads, HEAD]
// or null, rotations [context, HEAD], cache [rows, 2 kv_heads, length, HEAD] (keys, then values; the new ones are written
// at the row's position), out [rows, GROUP kv_heads, HEAD].
void attend(float* qkv, const float* scale, const float* rotations, const int64_t* positions, float* cache, float* out,
            long rows, long kv_heads, long length, float eps, int threads) {
    const long heads = GROUP * kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scores(GROUP * length);
#pragma omp for schedule(dynamic, 2)
        for (long item = 0; item < rows * kv_heads; item++) {
            const long row = item / kv_heads, kv = item % kv_heads, position = positions[row], count = position + 1;
            float* token = qkv + row * (heads + 2 * kv_heads) * HEAD;
            float* q = token + kv * GROUP * HEAD;
            float* k = token + (heads + kv) * HEAD;
            float* keys = cache + (row * 2 * kv_heads + kv) * length * HEAD;
            float* values = keys + kv_heads * length * HEAD;
            const float* rotation = rotations + position * HEAD;
            for (int g = 0; g < GROUP; g++)
                norm_rotate(q + g * HEAD, scale ? scale + (kv * GROUP + g) * HEAD : nullptr, rotation, eps);
            norm_rotate(k, scale ? scale + (heads + kv) * HEAD : nullptr, rotation, eps);
            std::memcpy(keys + position * HEAD, k, HEAD * sizeof(float));
            std::memcpy(values + position * HEAD, token + (heads + kv_heads + kv) * HEAD, HEAD * sizeof(float));

            const float inverse_sqrt = 1.0f / std::sqrt(float(HEAD));
            float highest[GROUP], total[GROUP];
            for (int g = 0; g < GROUP; g++) highest[g] = -INFINITY;
            for (long t = 0; t < count; t++)
                for (int g = 0; g < GROUP; g++) {
                    float dot = 0;
                    for (int d = 0; d < HEAD; d++) dot += q[g * HEAD + d] * keys[t * HEAD + d];
                    dot *= inverse_sqrt;
                    scores[g * length + t] = dot;
                    highest[g] = dot > highest[g] ? dot : highest[g];
                }
            for (int g = 0; g < GROUP; g++) {
                float* s = scores.data() + g * length;
                float sum = 0;
                for (long t = 0; t < count; t++) sum += s[t] = exp_negative(s[t] - highest[g]);
                total[g] = sum;
            }
            float result[GROUP * HEAD] = {};
            for (long t = 0; t < count; t++)
                for (int g = 0; g < GROUP; g++)
                    for (int d = 0; d < HEAD; d++) result[g * HEAD + d] += scores[g * length + t] * values[t * HEAD + d];
            float* target = out + (row * heads + kv * GROUP) * HEAD;
            for (int g = 0; g < GROUP; g++)
                for (int d = 0; d < HEAD; d++) target[g * HEAD + d] = result[g * HEAD + d] / total[g];
        }
    }
}

// What ``attend`` does before it attends, for tokens of any rows and positions: int64 [tokens] both.
void place(float* qkv, const float* scale, const float* rotations, const int64_t* rows, const int64_t* positions,
           float* cache, long tokens, long kv_heads, long length, float eps, int threads) {
    const long heads = GROUP * kv_heads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < tokens; i++) {
        float* token = qkv + i * (heads + 2 * kv_heads) * HEAD;
        const float* rotation = rotations + positions[i] * HEAD;
        for (long h = 0; h < heads + kv_heads; h++)
            norm_rotate(token + h * HEAD, scale ? scale + h * HEAD : nullptr, rotation, eps);
        float* target = cache + (rows[i] * 2 * kv_heads * length + positions[i]) * HEAD;
        for (long h = 0; h < 2 * kv_heads; h++)
            std::memcpy(target + h * length * HEAD, token + (heads + h) * HEAD, HEAD * sizeof(float));
    }
}

// x [rows, size] -> out: each row by the inverse of its root mean square.
void norm(const float* x, float* out, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const float factor = inverse_rms(x + row * size, size, eps);
        for (long i = 0; i < size; i++) out[row * size + i] = x[row * size + i] * factor;
    }
}

// gate_up [rows, 2 size] -> out [rows, size]: silu(gate) * up.
void gated(const float* gate_up, float* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i++) {
            const float gate = gate_up[row * 2 * size + i], up = gate_up[row * 2 * size + size + i];
            const float e = exp_negative(gate < 0 ? gate : -gate);  // of -|gate|
            out[row * size + i] = gate * up * (gate < 0 ? e : 1.0f) / (1.0f + e);
        }
}
}
