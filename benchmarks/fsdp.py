"""Measures the trainer's tokens per second on one rank and on two ranks that share its weights, and their ratio.

    python benchmarks/fsdp.py                                                 # a small model, on the processor
    python benchmarks/fsdp.py --device cuda --size 0.6b --precision bf16 --json fsdp.json    # needs two GPUs

A step is supervised fine-tuning on one batch, the same for one rank and for two. Its sequences fill half a row each.
Repeats on one rank and on two alternate, so that other load hits both. On GPUs, the optimizer's last kernels may end
only in the next repeat. The losses are compared too: they must agree, or the ranks did not compute the same.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from shapes import SIZES, model_of

from cuda_agent.training import recipes
from cuda_agent.training.distributed import DistributedTrainer
from cuda_agent.training.packing import Batch, batch_of, tokens_of
from cuda_agent.training.ranks import Ranks


def batch(row_tokens: int, rows: int, vocab: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    length = row_tokens // 2
    ids = torch.randint(vocab, (2 * rows, length), generator=draw).tolist()
    return batch_of(tokens_of(one, [0] * (length // 3) + [1] * (length - length // 3)) for one in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--row-tokens", type=int, default=0, help="default: 1,024 on a processor, 8,192 on GPUs")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit(f"needs two GPUs, and there are {torch.cuda.device_count()}")
    row_tokens = options.row_tokens or (8192 if options.device == "cuda" else 1024)
    settings = {"row_tokens": row_tokens, "precision": options.precision}
    settings["gradient_checkpointing"] = options.checkpointing
    work = batch(row_tokens, options.rows, SIZES[options.size]["vocab_size"])
    tokens = sum(len(sequence) for sequence in work.sequences)
    rates: dict[int, list[float]] = {1: [], 2: []}
    losses: dict[int, list[float]] = {1: [], 2: []}
    with Ranks(1, device=options.device) as one, Ranks(2, device=options.device) as two:
        learners = {
            count: DistributedTrainer(ranks, "policy", model_of(options.size), **settings)
            for count, ranks in ((1, one), (2, two))
        }
        for repeat in range(options.repeats + 1):
            for count, learner in learners.items():
                started = time.perf_counter()
                losses[count].append(recipes.sft_step(learner, work, 1e-4)["loss"])
                if repeat:  # the first repeat is a warm-up
                    rates[count].append(tokens / (time.perf_counter() - started))
    worst = max(abs(a - b) for a, b in zip(losses[1], losses[2], strict=True))
    median = {count: statistics.median(found) for count, found in rates.items()}
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(f"{options.size}, {options.precision}, rows of {row_tokens:,}, {tokens:,} tokens a step, {machine}")
    for count, found in rates.items():
        spread = f"({min(found):,.0f} to {max(found):,.0f})"
        print(f"  {count} rank{'s' if count > 1 else ' '}: {median[count]:12,.0f} tokens/s {spread}")
    print(f"  ratio {median[2] / median[1]:.2f}; losses differ by at most {worst:.1e}")
    if options.json:
        facts = {"size": options.size, "precision": options.precision, "row_tokens": row_tokens, "machine": machine}
        answer = facts | {"tokens_per_second": rates, "ratio": median[2] / median[1], "loss_difference": worst}
        options.json.write_text(json.dumps(answer, indent=1))
    if worst > (1e-4 if options.precision == "fp32" else 2e-2):
        raise SystemExit("one rank and two did not compute the same")


if __name__ == "__main__":
    main()
