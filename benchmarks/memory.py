"""Compares the estimated memory of a training step with the memory that the operating system reports, by length.

    python benchmarks/memory.py --tokens 4096 8192 16384 --json memory.json
    python benchmarks/memory.py --table          # the table of docs/training.md

Each length runs in a separate process, on the CPU, with a small model and one sequence per row. "worked out" is the
estimate of ``training.memory.peak``. "resident" is the growth of the process's largest resident size since before the
model existed.
"""

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any, Literal

from cuda_agent.config import PolicyConfig
from cuda_agent.training.memory import Shape, peak, shape_of_policy

QWEN3_4B = Shape(36, 2560, 32, 8, 128, 9728, 151_936, True)
QWEN3_30B_A3B = Shape(48, 2048, 32, 4, 128, 768, 151_936, False, experts=128, active=8)
LENGTHS = (4096, 16_384, 32_768, 65_536, 131_072)


def table() -> str:
    """Returns the table of estimates as Markdown, in GiB on one rank."""
    lines = ["| model | trained | ranks | fixed | " + " | ".join(f"{n // 1024}k" for n in LENGTHS) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(LENGTHS))
    everything, adapters = "all weights", "adapters, rank 16"
    rows: list[tuple[str, Shape, str, int, Literal["data", "context"]]] = [
        ("Qwen3-4B", QWEN3_4B, everything, 1, "data"),
        ("Qwen3-4B", QWEN3_4B, everything, 8, "data"),
        ("Qwen3-4B", QWEN3_4B, everything, 8, "context"),
        ("Qwen3-4B", QWEN3_4B, adapters, 1, "data"),
        ("Qwen3-4B", QWEN3_4B, adapters, 8, "context"),
        ("Qwen3-30B-A3B", QWEN3_30B_A3B, everything, 8, "data"),
        ("Qwen3-30B-A3B", QWEN3_30B_A3B, everything, 8, "context"),
        ("Qwen3-30B-A3B", QWEN3_30B_A3B, everything, 64, "data"),
    ]
    for name, shape, trained, ranks, parallelism in rows:
        rank = 16 if trained == adapters else 0
        found = [peak(shape, tokens, ranks=ranks, lora_rank=rank, parallelism=parallelism) for tokens in LENGTHS]
        numbers = " | ".join(f"{one.total / 2**30:.0f}" for one in found)
        kind = f"{ranks}, rows cut" if parallelism == "context" else str(ranks)
        lines.append(f"| {name} | {trained} | {kind} | {found[0].fixed / 2**30:.0f} | {numbers} |")
    return "\n".join(lines)


def step(tokens: int, checkpointing: bool, policy: PolicyConfig, answer: Any) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cuda_agent.training import recipes
    from cuda_agent.training.packing import batch_of, tokens_of
    from cuda_agent.training.trainer import Trainer

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shape = shape_of_policy(policy)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head,
            tie_word_embeddings=True,
            max_position_embeddings=tokens,
        )
    )
    trainer = Trainer(model, row_tokens=tokens, gradient_checkpointing=checkpointing)
    trainer.workers = 1
    ids = torch.randint(shape.vocab, (tokens,)).tolist()
    batch = batch_of([tokens_of(ids, [0] + [1] * (tokens - 1))])
    started = time.monotonic()
    recipes.sft_step(trainer, batch, 1e-3)
    seconds = time.monotonic() - started
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    rows = []
    policy = PolicyConfig(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=192)
    for tokens in options.tokens:
        for checkpointing in (False, True):
            worked_out = peak(
                shape_of_policy(policy), tokens, precision="fp32", checkpointing=checkpointing, device="cpu"
            ).total
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=step, args=(tokens, checkpointing, policy, theirs)
            )
            process.start()
            theirs.close()
            resident, seconds = ours.recv()
            process.join()
            rows.append(
                {
                    "tokens": tokens,
                    "checkpointing": checkpointing,
                    "worked_out": worked_out,
                    "resident": resident,
                    "seconds": round(seconds, 1),
                }
            )
            print(
                f"{tokens:>8,} tokens, {'computed twice' if checkpointing else 'kept':14}: worked out "
                f"{worked_out / 2**20:8,.0f} MiB, resident {resident / 2**20:8,.0f} MiB, {seconds:6.1f} s",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
