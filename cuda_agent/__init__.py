"""cuda-agent: train a language model to write fast GPU kernels, and put it to work."""

__version__ = "0.1.0"
