"""cuda-agent trains a language model to write fast GPU kernels, and uses such a model to speed up PyTorch code."""

__version__ = "0.1.0"
