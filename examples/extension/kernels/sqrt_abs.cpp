#include <cmath>

void sqrt_abs(const float* x, float* y, long n) {
#pragma omp parallel for
  for (long i = 0; i < n; i++) y[i] = std::sqrt(std::fabs(x[i]));
}
