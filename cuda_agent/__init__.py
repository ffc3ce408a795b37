"""cuda-agent trains a language model to write fast GPU kernels, and uses the trained model."""

__version__ = "0.1.0"
