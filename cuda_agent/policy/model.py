"""Tokenizers and models as Hugging Face folders: new ones from the configuration, and people's own.

Not here: the value model (``training``), engines, and anything that knows what a conversation says.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuda_agent.config import Policy
from cuda_agent.policy.chat import CONTROL, END, MARKUP, TEMPLATE

PAD = "<|pad|>"


class PolicyError(ValueError):
    """A folder is no usable policy; the message names exactly what is missing."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """A byte-level BPE tokenizer of ``vocab`` entries, trained on ``texts`` (messages' contents, without chat markup).

    Any text can be encoded (256 entries are the bytes) and decodes to itself.  Chat markup costs one token a piece.
    Returns a ``PreTrainedTokenizerFast`` with the chat template set."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    reserved = 1 + len(CONTROL) + len(MARKUP)
    if vocab < 256 + reserved:
        raise ValueError(f"policy.vocab is {vocab}, but bytes and markup alone need {256 + reserved}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab - reserved,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, *CONTROL)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[t for t in CONTROL if t != END],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
