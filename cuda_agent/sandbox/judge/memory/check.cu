// Comparing outputs on the device, in the judge's own context: the counterpart of check.py, with the same rules.
// Every kernel strides over n values; what it finds goes to one small struct by atomics.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Found {
  unsigned long long wrong, first;  // how many values, and the lowest index of one
  double largest;                   // absolute difference among finite values (its bits order like an integer's)
};

__device__ double number(__half v) { return (double)__half2float(v); }
__device__ double number(__nv_bfloat16 v) { return (double)__bfloat162float(v); }
template <class T>
__device__ double number(T v) {
  return (double)v;
}

__device__ void gather(Found* found, unsigned long long wrong, unsigned long long first, double largest) {
  for (int format = 16; format; format /= 2) {
    wrong += __shfl_down_sync(~0u, wrong, format);
    first = min(first, __shfl_down_sync(~0u, first, format));
    largest = fmax(largest, __shfl_down_sync(~0u, largest, format));
  }
  if (threadIdx.x % 32) return;
  if (wrong) {
    atomicAdd(&found->wrong, wrong);
    atomicMin(&found->first, first);
  }
  atomicMax((unsigned long long*)&found->largest, (unsigned long long)__double_as_longlong(largest));
}

#define EACH(i) for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)

// Sum of squares and count of the finite expected values.
template <class T>
__device__ void moments(const T* want, long long n, double* sums) {
  double square = 0, count = 0;
  EACH(i) {
    double w = number(want[i]);
    if (isfinite(w)) square += w * w, count += 1;
  }
  for (int format = 16; format; format /= 2) {
    square += __shfl_down_sync(~0u, square, format);
    count += __shfl_down_sync(~0u, count, format);
  }
  if (threadIdx.x % 32 == 0) atomicAdd(sums, square), atomicAdd(sums + 1, count);
}

template <class T>
__device__ void close(const T* want, const T* have, long long n, double tolerance, double cap, const double* sums,
                      Found* found) {
  const double scale = sums[1] > 0 ? fmin(cap, sqrt(sums[0] / sums[1])) : 1.0;
  unsigned long long wrong = 0, first = ~0ull;
  double largest = 0;
  EACH(i) {
    double w = number(want[i]), h = number(have[i]), off = fabs(w - h);
    bool special = !isfinite(w) || !isfinite(h);
    bool good = special ? w == h || (isnan(w) && isnan(h)) : off <= tolerance * (scale + fabs(w));
    if (!special) largest = fmax(largest, off);
    if (!good) wrong++, first = min(first, (unsigned long long)i);
  }
  gather(found, wrong, first, largest);
}

template <class T>
__device__ void equal(const T* want, const T* have, long long n, Found* found) {
  unsigned long long wrong = 0, first = ~0ull;
  double largest = 0;
  EACH(i) {
    if (want[i] == have[i]) continue;
    wrong++, first = min(first, (unsigned long long)i);
    largest = fmax(largest, fabs(number(want[i]) - number(have[i])));
  }
  gather(found, wrong, first, largest);
}

#define FLOATING(name, T)                                                                                        \
  extern "C" __global__ void moments_##name(const T* want, long long n, double* sums) { moments(want, n, sums); } \
  extern "C" __global__ void check_##name(const T* want, const T* have, long long n, double tolerance,            \
                                          double cap, const double* sums, Found* found) {                                     \
    close(want, have, n, tolerance, cap, sums, found);                                                                 \
  }
#define WHOLE(name, T)                                                                                  \
  extern "C" __global__ void check_##name(const T* want, const T* have, long long n, double, double,        \
                                          const double*, \
                                          Found* found) {                                               \
    equal(want, have, n, found);                                                                        \
  }
FLOATING(float32, float)
FLOATING(float64, double)
FLOATING(float16, __half)
FLOATING(bfloat16, __nv_bfloat16)
WHOLE(int64, long long)
WHOLE(int32, int)
WHOLE(int16, short)
WHOLE(int8, signed char)
WHOLE(uint8, unsigned char)

// Two sums of squares: of the differences from the exact values, and of the exact values.
template <class T>
__device__ void distance(const T* have, const double* exact, long long n, double* sums) {
  double off = 0, norm = 0;
  EACH(i) {
    double d = number(have[i]) - exact[i];
    off += d * d, norm += exact[i] * exact[i];
  }
  for (int format = 16; format; format /= 2) {
    off += __shfl_down_sync(~0u, off, format);
    norm += __shfl_down_sync(~0u, norm, format);
  }
  if (threadIdx.x % 32 == 0) atomicAdd(sums, off), atomicAdd(sums + 1, norm);
}
#define DISTANCE(name, T)                                                                                       \
  extern "C" __global__ void distance_##name(const T* have, const double* exact, long long n, double* sums) { \
    distance(have, exact, n, sums);                                                                            \
  }
DISTANCE(float32, float)
DISTANCE(float64, double)
DISTANCE(float16, __half)
DISTANCE(bfloat16, __nv_bfloat16)
