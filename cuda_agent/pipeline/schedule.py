"""What a configuration amounts to, before anything runs: samples, tokens, optimizer steps, estimated time and memory.

What it does not cover: the time of a foreign base or of a GPU, which nothing here has measured; the memory of a base
whose folder is not on this machine, of the engine and of the sandbox.
"""

import json
import math
from pathlib import Path
from typing import Any

from cuda_agent.config import Config, PolicyConfig
from cuda_agent.errors import ConfigError
from cuda_agent.training.memory import AUTO_TOKENS, MICROBATCH_TOKENS, SMALL, Shape, peak, shape_of, shape_of_policy


def derived(config: Config) -> dict[str, Any]:
    """The schedule that the configuration amounts to, before anything runs: per stage its samples (episodes, examples),
    most tokens, optimizer steps and estimated seconds (None where nothing measured says how long), and for those that
    train the most bytes of one step (None where the base is not on this machine).

    Tokens are upper bounds: an episode may fill its context.  Times are for the small model on 2 CPU cores: training
    7,000 tokens/s and decoding 9,000 tokens/s at 1.3M parameters, in inverse proportion to the parameters."""
    c, play = config, min(config.agent.turns * config.agent.turn_tokens, config.policy.context)
    heldout = c.synthesis.heldout + c.synthesis.catalogue
    small = c.policy.base is None
    scale = parameter_count(c.policy) / 1.3e6 if small else 1.0

    def row(samples: int, tokens: int, steps: int, decoded: int, trained: int, overhead: float) -> dict[str, Any]:
        seconds = round(decoded * scale / 9000 + trained * scale / 7000 + overhead, 1) if small else None
        return {"samples": samples, "tokens": tokens, "optimizer_steps": steps, "seconds": seconds}

    rows = {
        "synthesis": row(c.synthesis.train + heldout, 0, 0, 0, 0, 1.5 * min(c.synthesis.max_candidates, 4 * heldout))
    }
    tokens = c.bootstrap.steps * c.bootstrap.tokens_per_step if small else 0
    rows["bootstrap"] = row(
        c.bootstrap.examples if small else 0, tokens, c.bootstrap.steps if small else 0, 0, tokens, 10
    )
    limit = c.bootstrap.max_seconds
    if limit and rows["bootstrap"]["seconds"]:
        rows["bootstrap"]["seconds"] = min(rows["bootstrap"]["seconds"], limit + 10)
    for name, ppo, length in (("warmup", c.warmup, c.agent.turn_tokens), ("agentic", c.agentic, play)):
        length = min(length, ppo.context)
        tokens = ppo.steps * ppo.episodes_per_step * length
        rows[name] = row(
            ppo.steps * ppo.episodes_per_step,
            tokens,
            ppo.steps * ppo.epochs * ppo.minibatches,
            tokens // 2,
            tokens * ppo.epochs,  # half of the bound, twice: policy and critic
            ppo.steps * ppo.episodes_per_step * 0.05,
        )
    episodes = c.synthesis.train * c.collect.samples
    rows["collect"] = row(episodes, episodes * play, 0, episodes * play // 2, 0, episodes * 0.05)
    for name, part in (("rft", c.rft), ("critic", c.critic)):
        tokens = episodes * play * part.epochs
        rows[name] = row(episodes, tokens, math.ceil(tokens / part.tokens_per_step), 0, tokens // 2, 2)
    episodes = heldout * c.evaluate.samples
    play = min(c.evaluate.turns * c.agent.turn_tokens, c.policy.context)
    for name in ("base", "warmup", "rft", "agentic"):
        rows[f"evaluate-{name}"] = row(episodes, episodes * play, 0, episodes * play // 2, 0, episodes * 0.1)
    order = ["synthesis", "bootstrap", "warmup", "collect", "rft", "critic", "agentic"]
    for name in ("bootstrap", "warmup", "rft", "critic", "agentic"):
        rows[name]["memory"] = training_memory(config, name)
    rows = {name: rows[name] for name in [*order, *(name for name in rows if name not in order)]}
    total = sum(value["seconds"] for value in rows.values()) if small else None
    return {
        "parameters": parameter_count(c.policy) if small else None,
        "base": c.policy.base,
        "stages": rows,
        "optimizer_steps": sum(value["optimizer_steps"] for value in rows.values()),
        "seconds": total,
    }


def training_memory(config: Config, stage: str) -> int | None:
    """Most bytes that a training step of ``stage`` takes on a processor, of all ranks together, when a sequence fills
    its context.  None where the base's configuration cannot be read here."""
    shape = _shape(config.policy)
    if shape is None:
        return None
    settings = getattr(config, stage)
    longest = getattr(settings, "context", config.policy.context)
    tokens = max(config.training.microbatch_tokens or MICROBATCH_TOKENS["cpu"], longest)
    setting, ranks = config.training.checkpointing, 1 if stage == "bootstrap" else config.training.num_processes
    step = peak(
        shape,
        tokens,
        precision="fp32",
        checkpointing=setting == "on" or (setting == "auto" and tokens > AUTO_TOKENS),
        ranks=ranks,
        parallelism=config.training.parallelism,
        lora_rank=0 if stage == "bootstrap" else config.lora.rank,
        segment=longest,
        device="cpu",
        at_once=config.policy.threads if ranks == 1 and shape.parameters <= SMALL else 1,
    )
    return ranks * (step.total + (step.fixed if stage in ("warmup", "agentic") else 0))  # policy and critic take turns


def _shape(policy: PolicyConfig) -> Shape | None:
    if policy.base is None:
        return shape_of_policy(policy)
    try:
        return shape_of(json.loads(_base_config(policy.base).read_text()))
    except (OSError, ValueError, KeyError):
        return None


def _base_config(base: str) -> Path:
    """Of a folder, or of a model of the hub that was downloaded before."""
    if Path(base).is_dir() or base.count("/") != 1:
        return Path(base) / "config.json"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, "config.json")
    return Path(found) if isinstance(found, str) else Path(base) / "config.json"


def require_base(base: str | None) -> None:
    """Raises ConfigError where ``policy.base`` is plainly a path and there is no model on this machine.  A name such as
    org/name may be one of the hub."""
    if base is None:
        return
    is_path = base.startswith(("/", ".", "~")) or base.endswith("/") or base.count("/") > 1
    if is_path and not (Path(base) / "config.json").is_file():
        raise ConfigError(f"policy.base: there is no folder {base} with a model")


def parameter_count(policy: PolicyConfig) -> int:
    """Parameters of the small model that ``policy`` describes (Qwen3, tied embeddings)."""
    head = policy.hidden // policy.heads
    attention = policy.hidden * head * (2 * policy.heads + 2 * policy.kv_heads) + 2 * head
    layer = attention + 3 * policy.hidden * policy.intermediate + 2 * policy.hidden
    return policy.vocab * policy.hidden + policy.layers * layer + policy.hidden
