"""Compares the tokens per second of the in-process engine with those of vLLM behind HTTP.

    CUDA_AGENT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/engines.py --batch 32 --rounds 5 --json engines.json

Both have the same weights, prompts and number of tokens. Their rounds alternate, so that other load on the machine hits
both. On the processor both compute in float32. With ``--device cuda`` both compute in bfloat16. The in-process engine
then uses the first GPU and vLLM the last, which may be the same.

``--update`` measures a change of weights instead: the seconds from the trainer's model to the check that the engine
serves the new weights.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes import SIZES, model_of

from cuda_agent.config import PolicyConfig, Vllm
from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.engines.vllm import VllmEngine, open_vllm
from cuda_agent.policy.engines.vllm_server import interpreter
from cuda_agent.policy.model import load_policy, new_policy, save_policy, train_tokenizer

Engines = dict[str, LocalEngine | VllmEngine]


async def decode(engine: LocalEngine | VllmEngine, prompts: list[list[int]], tokens: int, seed: int) -> float:
    """Returns the seconds that the engine takes for one completion of each prompt."""
    if isinstance(engine, LocalEngine):
        engine._kept.clear()
    started = time.perf_counter()
    jobs = (engine.generate(p, SamplingParams(tokens, seed * 1000 + i, key=str(i))) for i, p in enumerate(prompts))
    assert all(len(completion.ids) == tokens for completion in await asyncio.gather(*jobs))
    return time.perf_counter() - started


async def update(engine: LocalEngine | VllmEngine, model: Any, version: int) -> float:
    started = time.perf_counter()
    await engine.update_from(model, version)
    return time.perf_counter() - started


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    model, _ = load_policy(args.model or folder)
    model = model.to(args.device)
    rng = random.Random(0)
    vocab, context = model.config.vocab_size, args.prompt + args.tokens + 8
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    local = LocalEngine(model, args.threads, args.batch, device=args.device, dtype=dtype)
    vllm = Vllm(replicas=args.replicas, sync=args.sync, gpu_memory=args.memory)
    config = PolicyConfig(vllm=vllm, engine_batch=args.batch, threads=args.threads, context=context)
    async with open_vllm(Path(args.model or folder), model, folder, config) as served:
        engines: Engines = {"in process": local, "vllm": served}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for index in range(args.rounds + 1):  # the first round is a warm-up
            prompts = [[rng.randrange(vocab) for _ in range(args.prompt)] for _ in range(args.batch)]
            with torch.no_grad():
                next(model.parameters()).mul_(1.001)
            for name, engine in engines.items():
                job = update(engine, model, index + 1) if args.update else decode(engine, prompts, args.tokens, index)
                seconds[name].append(await job)
    await local.close()
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a policy; default: a new one of the default configuration")
    parser.add_argument("--size", choices=sorted(SIZES), help="a new model of this size instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=float, default=0.5, help="share of a GPU's memory for vLLM")
    parser.add_argument("--sync", default="disk", choices=["disk", "nccl"])
    for name, default in (("batch", 32), ("prompt", 200), ("tokens", 200), ("threads", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--update", action="store_true", help="measure a change of weights")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    try:
        interpreter()
    except PolicyError as error:
        print(f"nothing measured: {error}")
        return

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # in this thread; the engines set their own number
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.model:
            words = ["".join(random.Random(i).choices("abcdefgh", k=6)) for i in range(2000)]
            tokenizer = train_tokenizer([" ".join(words)], PolicyConfig().vocab)
            model = model_of(args.size) if args.size else new_policy(PolicyConfig(), tokenizer, seed=0)
            save_policy(model, tokenizer, folder)
        seconds = asyncio.run(measure(args, folder))
    print(f"batch {args.batch}, prompts of {args.prompt}, {args.tokens} tokens each, {args.threads} threads, ", end="")
    print(f"{args.replicas} vLLM server(s), {args.device}")
    values = {n: [s if args.update else args.batch * args.tokens / s for s in v] for n, v in seconds.items()}
    for engine, rates in values.items():
        unit = "s an update" if args.update else "tokens/s"
        print(f"{engine:12} {statistics.median(rates):10,.2f} {unit}   ({min(rates):,.2f} to {max(rates):,.2f})")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "values": values, "versions": versions}, file)


if __name__ == "__main__":
    main()
