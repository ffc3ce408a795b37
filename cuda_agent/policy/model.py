"""Creates tokenizers and models, saves them as Hugging Face folders and loads them from such folders."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_agent.config import PolicyConfig
from cuda_agent.errors import PolicyError
from cuda_agent.policy.chat import CONTROL, END, MARKUP, TEMPLATE
from cuda_agent.spans import span

PAD = "<|pad|>"

PIECES = r" ?\d+|[^\n\d]*?\n+|[^\n\d]+?(?= ?\d)|[^\n\d]+"
"""A pattern for the pieces into which text is cut. No token spans more than one piece. A piece is a number, a line
without numbers, or a part of a line between numbers. Kernels repeat whole lines: with such long pieces a kernel has a
third as many tokens as with pieces of one word, and a small model learns kernels better (docs/lab-notebook.md). Numbers
are separate, because a kernel's author decides or copies each of them."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """Trains a byte-level BPE tokenizer of at most ``vocab`` entries on ``texts``, and sets its chat template. Any text
    survives encoding and decoding unchanged. Each string in ``MARKUP`` (frequent pieces of written tool calls) becomes
    one token; ``texts`` must not contain these strings. Raises ``ValueError`` if ``vocab`` is too small for all bytes,
    control tokens and markup."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    reserved = 1 + len(CONTROL) + len(MARKUP)
    if vocab < 256 + reserved:
        raise ValueError(f"policy.vocab is {vocab}, but bytes and markup alone need {256 + reserved}")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab - reserved, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
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


def new_policy(config: PolicyConfig, tokenizer: Any, seed: int) -> Any:
    """Creates a Qwen3 causal model in float32 and eval mode, with tied embeddings and random weights from ``seed``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    architecture = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(architecture).float().eval()


@span("save policy")
def save_policy(model: Any, tokenizer: Any, folder: Path | str) -> None:
    """Saves model, tokenizer and chat template as a Hugging Face folder that any server can load. Adapters are merged
    into the weights and also saved beside them (``lora.save_merged``)."""
    from cuda_agent.policy.lora import save_merged

    save_merged(model, folder)
    tokenizer.save_pretrained(folder)


@span("load policy")
def load_policy(folder: Path | str) -> tuple[Any, Any]:
    """Loads a policy: a causal language model and its tokenizer. ``folder`` is a Hugging Face folder, or the name
    ``owner/name`` of a model on the Hugging Face hub. Returns (model, tokenizer). The model is in float32 and eval
    mode. Raises ``PolicyError`` if a file is missing or unusable, if the tokenizer has no chat template, or if it has
    more entries than the model has embeddings."""
    from transformers import AutoConfig, AutoTokenizer

    path = Path(folder)
    if path.exists():
        _check_files(path)
    elif str(folder).count("/") != 1 or str(folder).startswith((".", "/", "~")):
        raise PolicyError(f"there is no folder {folder}")
    with _named(f"{folder}: its config.json cannot be used"):
        AutoConfig.from_pretrained(folder)
    with _named(f"{folder}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if not getattr(tokenizer, "chat_template", None):
        raise PolicyError(f"{folder}: its tokenizer has no chat template (an instruction-tuned model is needed)")
    model = load_model(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PolicyError(f"{folder}: the tokenizer has {len(tokenizer)} entries, the model only {rows} embeddings")
    return model, tokenizer


def load_model(folder: Path | str) -> Any:
    """Loads the causal language model of a Hugging Face folder in float32 and eval mode. Raises ``PolicyError`` if a
    weight is missing or has the wrong shape. Without this check, Transformers would fill a missing weight with random
    numbers."""
    from transformers import AutoModelForCausalLM

    with _named(f"{folder}: its weights cannot be loaded as a causal model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    model, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, report.get(kind, []))):
            raise PolicyError(f"{folder}: {kind.replace('_', ' ')}: {', '.join(keys[:5])} ({len(keys)} in all)")
    return model.eval()


@contextmanager
def _named(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PolicyError(f"{problem}: {error}") from error


def _check_files(path: Path) -> None:
    """Raises ``PolicyError`` if the folder ``path`` lacks files of a policy: configuration, tokenizer or weights. The
    error lists everything that is missing, which the errors of Transformers do not."""
    if not path.is_dir():
        raise PolicyError(f"{path} is not a folder")
    missing = [] if (path / "config.json").exists() else ["no config.json"]
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        missing.append("no tokenizer (tokenizer.json)")
    indexes = [*path.glob("*.safetensors.index.json"), *path.glob("pytorch_model.bin.index.json")]
    if indexes:
        shards = set(json.loads(indexes[0].read_text())["weight_map"].values())
        if absent := sorted(shard for shard in shards if not (path / shard).exists()):
            missing.append(f"no weight shards {', '.join(absent)}")
    elif not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        missing.append("no weights (model.safetensors)")
    if missing:
        raise PolicyError(f"{path} is no usable policy: {'; '.join(missing)}")
