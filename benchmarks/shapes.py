"""Defines the models that the benchmarks measure: Qwen3 with random weights, in several sizes."""

from typing import Any

import torch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    },
    "27m": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 4096,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    },
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "1.7b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151_936,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip


def model_of(size: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES[size], tie_word_embeddings=True))
