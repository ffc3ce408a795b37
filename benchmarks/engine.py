"""Tokens per second of the in-process engine against ``transformers.generate``: same weights, same prompts, same batch,
same number of tokens, interleaved in one run so that other load hits both.

    python benchmarks/engine.py --batch 32 --prompt 200 --tokens 200 --threads 2 --rounds 5 --json engine.json

Every prompt is a different one, and the engine's kept prefixes are dropped between rounds: none profits from another.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import time

import torch
import transformers

from cuda_agent.config import Policy
from cuda_agent.policy.engine import SamplingParams
from cuda_agent.policy.local import LocalEngine
from cuda_agent.policy.model import load_model, new_policy, train_tokenizer


def engine_round(engine: LocalEngine, prompts: list[list[int]], tokens: int, seed: int) -> float:
    async def everything() -> None:
        jobs = [engine.generate(p, SamplingParams(tokens, seed * 1000 + i)) for i, p in enumerate(prompts)]
        assert all(len(completion.ids) == tokens for completion in await asyncio.gather(*jobs))

    engine._kept.clear()
    started = time.perf_counter()
    asyncio.run(everything())
    return time.perf_counter() - started


def generate_round(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> float:
    ids = torch.tensor(prompts, device=model.device)
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **settings)
    assert out.shape[1] == len(prompts[0]) + tokens
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal model; default: a new one of the default configuration")
    parser.add_argument("--device", default="cpu")
    for name, default in (("batch", 32), ("prompt", 200), ("tokens", 200), ("threads", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    if args.model:
        model = load_model(args.model)
    else:
        words = ["".join(random.Random(i).choices("abcdefgh", k=6)) for i in range(2000)]
        model = new_policy(Policy(), train_tokenizer([" ".join(words)], Policy().vocab), seed=0)
    model = model.to(args.device)
    engine = LocalEngine(model, args.threads, args.batch, device=args.device)
    rng = random.Random(0)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(args.prompt)] for _ in range(args.batch)]

    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    for index in range(args.rounds + 1):  # the first round warms both up
        seconds["engine"].append(engine_round(engine, prompts, args.tokens, index))
        seconds["generate"].append(generate_round(model, prompts, args.tokens))
    asyncio.run(engine.close())

    sampled = args.batch * args.tokens
    rates = {name: [sampled / s for s in values[1:]] for name, values in seconds.items()}
    ratio = statistics.median(e / g for e, g in zip(rates["engine"], rates["generate"], strict=True))
    print(f"batch {args.batch}, prompt {args.prompt}, {args.tokens} tokens each, {args.threads} threads, {args.device}")
    for name, values in rates.items():
        print(f"{name:10} {statistics.median(values):9,.0f} tokens/s   ({min(values):,.0f} to {max(values):,.0f})")
    print(f"engine / generate, median of rounds: {ratio:.2f}")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "tokens_per_second": rates, "ratio": ratio, "versions": versions}, file)


if __name__ == "__main__":
    main()
