"""A task, and the kernel of a solution that is right."""

MODEL = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sqrt(torch.abs(x)) + 1


def get_inputs():
    return [torch.randn(64, 256)]


def get_init_inputs():
    return []
"""
KERNEL = """#include <cmath>
void fused(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = std::sqrt(std::fabs(x[i])) + 1.0f;
}
"""
