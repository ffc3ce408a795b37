#include "../binding_registry.h"

void sqrt_abs(const float*, float*, long);

static Tensor forward(const Tensor& x) {
  check(x.dtype() == Float32 && x.is_contiguous(), "sqrt_abs: a contiguous float32 tensor is expected");
  Tensor y = empty_like(x);
  sqrt_abs(x.data<float>(), y.data<float>(), x.numel());
  return y;
}
REGISTER_BINDING(sqrt_abs, forward);
