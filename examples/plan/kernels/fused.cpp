#include <cmath>

void fused(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = std::sqrt(std::fabs(x[i]));
}
