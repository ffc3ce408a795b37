__global__ void fused(const float4* x, float4* y, long n) {
  long i = blockIdx.x * 256L + threadIdx.x;
  if (i >= n / 4) return;
  float4 v = x[i];
  y[i] = make_float4(sqrtf(fabsf(v.x)), sqrtf(fabsf(v.y)), sqrtf(fabsf(v.z)), sqrtf(fabsf(v.w)));
}
