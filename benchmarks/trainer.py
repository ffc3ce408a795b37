"""Measures the trainer's tokens per second: imitation, value pretraining and PPO of a Qwen3 on random episodes.

    OMP_NUM_THREADS=2 python benchmarks/trainer.py [--json FILE]
    python benchmarks/trainer.py --size 27m --device cuda --episodes 256 --precision bf16 --compile

``sft``, ``value`` and ``ppo`` use the same code as the stages. ``ActorCritic`` makes the trainers from a configuration,
with the timing lease. ``ppo`` is its method ``update``: two optimizer steps of policy and critic. In bf16 the trainer
computes the denominators of PPO's ratio itself.

``plain`` uses transformers alone, on the same model: forward and backward with padded batches of 8 episodes (32 on a
GPU), logits at every position, and cross-entropy. Its bf16 is autocast too.

Episodes are as long as those of the demo: 300 to 600 tokens, a third of them sampled. Prints the best and the median of
the repeats.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, model_of

from cuda_agent.config import Config, CriticConfig
from cuda_agent.context import WorkerContext
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.runtime import ActorCritic
from cuda_agent.training import recipes
from cuda_agent.training.critic import Critic
from cuda_agent.training.packing import batch_of, tokens_of_episode

WARM = 2  # untimed steps: layers are compiled, and then compiled again for rows of any length


def episodes(count: int, vocab: int) -> list[Episode]:
    draw = random.Random(0)
    made = []
    for number in range(count):
        length = draw.randint(300, 600)
        mask = [0] * (length // 3) + [1] * (length // 6) + [0] * (length // 3)
        mask += [1] * (length - len(mask))
        made.append(
            Episode(
                id=str(number),
                task="",
                kind="agent",
                ids=[draw.randrange(vocab) for _ in mask],
                mask=mask,
                logprobs=[-6.9 * sampled for sampled in mask],
                versions=mask,
                turns=mask,
                reward=draw.choice([-1.0, 1.0, 2.0, 3.0]),
                ended="answer",
            )
        )
    return made


def measure(tokens: int, repeats: int, step: Callable[[], Any], device: str) -> dict[str, float]:
    for _ in range(WARM):
        step()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - start))
    return {"best": max(rates), "median": statistics.median(rates)}


def plain_step(model: Any, data: list[Episode], device: str, precision: str) -> None:
    together = 32 if device == "cuda" else 8
    for start in range(0, len(data), together):
        part = data[start : start + together]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(e.ids) for e in part], batch_first=True).to(device)
        labels = [torch.where(torch.tensor(e.mask) == 1, torch.tensor(e.ids), -100) for e in part]
        target = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100).to(device)
        attention = torch.nn.utils.rnn.pad_sequence([torch.ones(len(e.ids)) for e in part], batch_first=True).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, attention_mask=attention.long(), labels=target, use_cache=False).loss
        loss.backward()


def learner(options: Any, precision: str, folder: Path) -> ActorCritic:
    """Returns the trainers of policy and critic that the stage ``agentic`` makes."""
    denominators = {"behavior_logprobs": "trainer" if precision == "bf16" else "engine"}
    batch = {"episodes_per_step": options.episodes, "samples_per_prompt": 1, "minibatches": 2}
    values = {
        "policy": {"dtype": "bfloat16" if precision == "bf16" else "float32", "threads": torch.get_num_threads()},
        "training": {
            "device": options.device, "compile": options.compile, "microbatch_tokens": options.row_tokens,
            "checkpointing": options.checkpointing,
        },
        "warmup": denominators,
        "agentic": batch | denominators,
    }  # fmt: skip
    config = Config.model_validate(values)
    ctx = WorkerContext("agentic", config, {}, folder, folder)
    return ActorCritic(ctx, config.agentic, model_of(options.size), Critic(model_of(options.size).model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default=None, choices=["fp32", "bf16"], help="default: both")
    parser.add_argument("--row-tokens", type=int, help="default: training.microbatch_tokens")
    parser.add_argument("--checkpointing", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--compile", action="store_true", help="torch.compile for the trainer's layers")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    data = episodes(options.episodes, SIZES[options.size]["vocab_size"])
    tokens = sum(len(episode.ids) for episode in data)
    batch = batch_of(tokens_of_episode(episode) for episode in data)

    def timed(step: Callable[[], Any]) -> dict[str, float]:
        return measure(tokens, options.repeats, step, options.device)

    model = model_of(options.size).to(options.device)
    figures = {}
    for precision in [options.precision] if options.precision else ["fp32", "bf16"]:
        if precision == "fp32" or options.device == "cuda":
            figures[f"plain {precision}"] = timed(
                lambda precision=precision: plain_step(model, data, options.device, precision)
            )
        with tempfile.TemporaryDirectory() as folder:
            trainers = learner(options, precision, Path(folder))
            actor, critic, numbers = trainers.actor, trainers.critic, count()
            figures[f"sft {precision}"] = timed(lambda actor=actor: recipes.sft_step(actor, batch, 1e-4))
            figures[f"value {precision}"] = timed(
                lambda critic=critic: recipes.value_epoch(critic, data, CriticConfig(lr=1e-4), seed=0, epoch=0)
            )
            figures[f"ppo {precision}"] = timed(
                lambda trainers=trainers, numbers=numbers: trainers.update(next(numbers), data)
            )

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {tokens} tokens, {torch.get_num_threads()} threads, {options.device}")
    print(f"{'':12}{'best':>12}{'median':>12}   tokens/s")
    for name, figure in figures.items():
        print(f"{name:12}{figure['best']:12,.0f}{figure['median']:12,.0f}")
    if options.json:
        about = {
            "parameters": parameters,
            "tokens": tokens,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        with open(options.json, "w") as file:
            json.dump({**about, **vars(options), "tokens_per_second": figures}, file, indent=1)


if __name__ == "__main__":
    main()
