import cuda_extension
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return cuda_extension.sqrt_abs(x)
