"""Measures whether a short kernel gets the same time while a policy decodes and trains on the same GPU.

    python benchmarks/sandbox_with_policy.py --repeats 20

The kernel takes about 20 us. It is judged alone, then beside an engine and a trainer, and then alone again. The engine
and the trainer work without a pause, and take the timing lease (the machine-wide lock around timed kernels). Every
verdict is measured anew. Prints the medians of time and speed-up, and how much the policy got done meanwhile.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

from sandbox_gpu import SIZES, solution, task

from cuda_agent.config import PolicyConfig, SandboxConfig
from cuda_agent.lease import Lease
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.model import new_policy, train_tokenizer
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.training import recipes
from cuda_agent.training.packing import batch_of, tokens_of
from cuda_agent.training.trainer import Trainer

_SIZE = "20 us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        print(json.dumps(asyncio.run(measure(options.repeats, Path(cache))), indent=1))


async def measure(repeats: int, cache: Path) -> dict[str, Any]:
    rows, rounds, _, _ = SIZES[_SIZE]
    one, numbers = task(rows, rounds), iter(range(1_000_000))
    answer: dict[str, Any] = {}
    async with LocalSandbox(SandboxConfig(device="cuda", memory_mb=8192), cache) as sandbox:

        async def judged(name: str) -> None:
            verdicts = [await sandbox.evaluate(one, solution("plan", _SIZE, next(numbers))) for _ in range(repeats)]
            if failed := [v for v in verdicts if v.status != "ok"]:
                raise SystemExit(f"{name}: {failed[0].status}: {failed[0].message}")
            seconds = sorted(v.seconds or 0.0 for v in verdicts)
            answer[name] = {
                "us": [1e6 * seconds[0], 1e6 * statistics.median(seconds), 1e6 * seconds[-1]],
                "speed-up": statistics.median(v.speedup_eager or 0.0 for v in verdicts),
                "rewards": sorted({v.reward for v in verdicts}),
            }

        await judged("warm-up")
        await judged("alone")
        tokenizer = train_tokenizer([one.code] * 4, 320)
        shape = PolicyConfig(layers=8, hidden=512, heads=8, kv_heads=4, context=2048)
        work = Work(new_policy(shape, tokenizer, 1), new_policy(shape, tokenizer, 2), sandbox.lease_folder)
        trained = threading.Thread(target=work.train)
        trained.start()
        decoded = asyncio.ensure_future(work.decode())
        try:
            await asyncio.sleep(5)
            before = work.steps, work.engine.counts.sampled
            await judged("beside")
            answer["meanwhile"] = {
                "training steps": work.steps - before[0], "tokens": work.engine.counts.sampled - before[1],
            }  # fmt: skip
        finally:
            work.ended = True
            await decoded
            await asyncio.to_thread(trained.join)
            await work.engine.close()
        await judged("alone again")
    alone, beside = answer["alone"]["us"][1], answer["beside"]["us"][1]
    return answer | {"beside / alone": beside / alone}


class Work:
    """Decodes with one policy and trains another until ``ended`` is set. ``steps`` counts the training steps."""

    def __init__(self, player: Any, learner: Any, lease: Path) -> None:
        self.engine = LocalEngine(player, batch=64, device="cuda", lease=Lease(lease))
        self._trainer = Trainer(learner, row_tokens=8192, device="cuda", precision="bf16", lease=Lease(lease))
        self._vocabulary = player.config.vocab_size
        self.steps, self.ended = 0, False

    async def decode(self) -> None:
        prompt = [number % self._vocabulary for number in range(200)]
        while not self.ended:
            await asyncio.gather(*(self.engine.generate(prompt, SamplingParams(256, seed=i)) for i in range(64)))

    def train(self) -> None:
        ids = [number % self._vocabulary for number in range(1500)]
        batch = batch_of([tokens_of(ids, [1] * len(ids))] * 16)
        while not self.ended:
            recipes.sft_step(self._trainer, batch, 1e-5)
            self.steps += 1


if __name__ == "__main__":
    main()
