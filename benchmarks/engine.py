"""Compares the tokens per second of the in-process engine with those of ``transformers.generate``.

    python benchmarks/engine.py --batch 32 --prompt 200 --tokens 200 --threads 2 --rounds 5 --json engine.json
    python benchmarks/engine.py --size 27m --device cuda --batch 256 --prompt 448 --tokens 128 --rounds 3

Both have the same weights, prompts, batch size and number of tokens. Their rounds alternate, so that other load on the
machine hits both. Both compute in the engine's thread, because computing in two threads makes both slower.

The rates ``engine`` and ``generate`` include the time for the prompts. The rate ``decoding`` is that of the engine
without the prompts: from the time of a round, it subtracts the time of a round that ends with the first token.
``--samples`` is the number of completions per prompt. With 1, the engine can reuse nothing; in training it is 4 or
more. The engine's cached prefixes are dropped between rounds, so that no round profits from another. ``--cpu-time``
measures processor time instead of wall time, for a machine that others use too (compare with one thread only).
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from shapes import SIZES, model_of

from cuda_agent.config import PolicyConfig
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.model import load_model, new_policy, train_tokenizer

Clock = Callable[[], float]


def engine_round(engine: LocalEngine, prompts: list[list[int]], tokens: int, seed: int, clock: Clock) -> float:
    async def everything() -> None:
        jobs = [engine.generate(p, SamplingParams(tokens, seed * 1000 + i)) for i, p in enumerate(prompts)]
        assert all(len(completion.ids) == tokens for completion in await asyncio.gather(*jobs))

    engine._kept.clear()
    started = clock()
    asyncio.run(everything())
    return clock() - started


def generate_round(
    engine: LocalEngine, model: torch.nn.Module, prompts: list[list[int]], tokens: int, clock: Clock
) -> float:
    def everything() -> float:
        ids = torch.tensor(prompts, device=model.device)
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
        started = clock()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **settings)
        assert out.shape[1] == len(prompts[0]) + tokens
        return clock() - started

    return asyncio.run(engine.compute(everything))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal model; default: a new one of the default configuration")
    parser.add_argument("--size", choices=sorted(SIZES), help="a new model of this size instead")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    for name, default in (
        ("batch", 32),
        ("prompt", 200),
        ("tokens", 200),
        ("threads", 2),
        ("rounds", 5),
        ("samples", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # in this thread; the engine's thread uses args.threads
    if args.model:
        model = load_model(args.model)
    elif args.size:
        model = model_of(args.size).eval()
    else:
        words = ["".join(random.Random(i).choices("abcdefgh", k=6)) for i in range(2000)]
        model = new_policy(PolicyConfig(), train_tokenizer([" ".join(words)], PolicyConfig().vocab), seed=0)
    model = model.to(args.device, getattr(torch, args.dtype))
    engine = LocalEngine(model, args.threads, args.batch, device=args.device)
    rng = random.Random(0)
    prompts = [
        prompt
        for _ in range(args.batch // args.samples)
        for prompt in [[rng.randrange(model.config.vocab_size) for _ in range(args.prompt)]] * args.samples
    ]

    clock = time.process_time if args.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {"engine": [], "prompts": [], "generate": []}
    for index in range(args.rounds + 1):  # the first round is a warm-up
        seconds["engine"].append(engine_round(engine, prompts, args.tokens, index, clock))
        seconds["prompts"].append(engine_round(engine, prompts, 1, index, clock))
        seconds["generate"].append(generate_round(engine, model, prompts, args.tokens, clock))
    asyncio.run(engine.close())

    sampled, first = len(prompts) * args.tokens, seconds.pop("prompts")
    rates = {name: [sampled / s for s in values[1:]] for name, values in seconds.items()}
    steps = zip(seconds["engine"][1:], first[1:], strict=True)
    rates["decoding"] = [(sampled - len(prompts)) / (whole - prompt) for whole, prompt in steps]
    ratio = statistics.median(e / g for e, g in zip(rates["engine"], rates["generate"], strict=True))
    print(f"batch {len(prompts)}, {args.samples} of each prompt of {args.prompt}, {args.tokens} tokens each, ", end="")
    print(f"{args.threads} threads, {args.device}, {args.dtype}, {'processor' if args.cpu_time else 'wall'} time")
    for name, values in rates.items():
        print(f"{name:10} {statistics.median(values):9,.0f} tokens/s   ({min(values):,.0f} to {max(values):,.0f})")
    print(f"engine / generate, median of rounds: {ratio:.2f}")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "tokens_per_second": rates, "ratio": ratio, "versions": versions}, file)


if __name__ == "__main__":
    main()
