"""Compares reinforcement learning in one process with Ray's workers on the same cores.

    python benchmarks/rollout_workers.py --store .cuda-agent/store --steps 3      # after `make demo`
    python benchmarks/rollout_workers.py --overhead --episodes 64

The steps are those of the stage ``agentic``. Tasks, policy and critic come from the newest run in the store. The
variants (``KINDS``) take turns, ``--rounds`` times, so that other load hits all of them. The first step of every
variant is not counted, because it includes compilation.

``--overhead`` measures something else: the time of a turn beyond that of engine and sandbox.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.agent.loop import EpisodeSettings, run_episode
from cuda_agent.compose import compose
from cuda_agent.config import Bootstrap, Config, SandboxConfig
from cuda_agent.context import StageContext
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Completion, SamplingParams
from cuda_agent.policy.model import train_tokenizer
from cuda_agent.rl.dialogues import corpus, episode, texts
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.stages import agentic
from cuda_agent.storage import Store, open_store
from cuda_agent.synthesis.teacher.family import sample_task
from cuda_agent.tracking import FileTracker, read_metrics

KINDS: dict[str, dict[str, Any]] = {
    "one process": {"runtime": "local"},
    "Ray, 1 worker": {"runtime": "ray", "ray": {"workers": 1, "max_off_policy_steps": 0}},
    "Ray, 2 workers": {"runtime": "ray", "ray": {"workers": 2, "max_off_policy_steps": 0}},
    "Ray, 2 workers, 1 step ahead": {"runtime": "ray", "ray": {"workers": 2, "max_off_policy_steps": 1}},
}


def inputs_of(store: Store, folder: Path) -> dict[str, Path]:
    """Copies the inputs of ``agentic`` from the newest run in the store that has all of them. Returns input -> folder.
    Raises SystemExit if no run has them."""
    wanted = {name: source.split(".") for name, source in next(s for s in STAGES if s.name == "agentic").inputs.items()}
    for run in reversed(runs.list_runs(store)):
        made = runs.run_manifests(store, run, STAGES)
        if all(stage in made for stage, _ in wanted.values()):
            for name, (stage, artifact) in wanted.items():
                store.get_folder(made[stage].outputs[artifact], folder / name)
            return {name: folder / name for name in wanted}
    raise SystemExit("The store has no run with tasks, policy and critic: `make demo` makes one.")


def steps_of(config: Config, inputs: dict[str, Path], folder: Path, cache: Path) -> list[dict[str, float]]:
    """Runs ``agentic`` and returns the metrics of each step, without the first step."""
    for part in ("policy", "critic", "scratch", "work"):
        (folder / part).mkdir(parents=True)
    tracker = FileTracker(folder / "said")
    checkpoints = StageCheckpoints(open_store(str(folder / "store")), "agentic", "key", folder / "scratch", tracker)
    agentic.run(
        StageContext(
            name="agentic",
            config=config,
            inputs=inputs,
            outputs={name: folder / name for name in ("policy", "critic")},
            work=folder / "work",
            tracker=tracker,
            checkpoints=checkpoints,
            should_stop=lambda: False,
            cache=cache,
        )
    )
    return list(read_metrics(folder / "said" / "metrics.jsonl").values())[1:]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    base = compose(["experiment=demo", f"policy.threads={args.threads}", f"sandbox.clock={args.clock}"])
    ppo = base.agentic.model_copy(update={"steps": args.steps + 1, "episodes_per_step": args.batch})
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        inputs = inputs_of(open_store(args.store), home / "inputs")
        for number in range(args.rounds):
            for name, changes in KINDS.items():
                values = base.model_dump(mode="json") | {"agentic": ppo.model_dump()}
                values |= {"runtime": changes["runtime"], "ray": values["ray"] | changes.get("ray", {})}
                config = Config.model_validate(values)
                cache = home / f"cache-{number}-{name}"  # a separate cache: a cached verdict would cost nothing
                cache.mkdir()
                measured[name] += steps_of(config, inputs, home / f"{number}-{name}", cache)
    table = {}
    print(f"{args.rounds} rounds of {args.steps} steps of {args.batch} episodes, {args.threads} threads a process")
    print(f"{'':30} {'s a step':>18} {'s of them playing':>18} {'tokens/s':>9} {'reward':>7}")
    for name, steps in measured.items():
        seconds = sorted(step["step_seconds"] for step in steps)
        playing = statistics.median(step["rollout_seconds"] for step in steps)
        rate = statistics.median(step["sampled_tokens_per_second"] for step in steps)
        reward = statistics.mean(step["reward"] for step in steps)
        table[name] = {"seconds": seconds, "playing": playing, "tokens_per_second": rate, "reward": reward}
        spread = f"{statistics.median(seconds):.1f} ({seconds[0]:.1f}-{seconds[-1]:.1f})"
        print(f"{name:30} {spread:>18} {playing:>18.1f} {rate:>9.0f} {reward:>7.2f}")
    return table


class Readout:
    """An engine that replays prepared turns: ``turns`` maps each episode to its turns. A call of ``generate`` takes
    about ``seconds``, up to half more or less, drawn from the call's seed. ``spent`` sums these planned seconds. It
    does not include delays of the event loop."""

    def __init__(self, turns: dict[str, list[list[int]]], seconds: float) -> None:
        self._turns, self._seconds = turns, seconds
        self.spent = 0.0
        self.calls = 0

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        ids = self._turns[params.key].pop(0)
        seconds = self._seconds * random.Random(params.seed).uniform(0.5, 1.5)
        await asyncio.sleep(seconds)
        self.spent += seconds
        self.calls += 1
        return Completion(ids, [-1.0] * len(ids), 0, "stop")

    async def update(self, version: int, folder: str) -> None: ...

    async def close(self) -> None: ...


class Clocked:
    """Wraps the sandbox of one episode. Records in ``log`` every answer and its seconds, and sums the seconds in
    ``spent``. A verdict that is asked for inside a tool call is part of that call, and is not recorded separately."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox
        self._depth = 0
        self.spent = 0.0
        self.log: list[tuple[float, Any]] = []  # seconds, answer

    async def evaluate(self, *arguments: Any) -> Any:
        return await self._clocked(self._sandbox.evaluate(*arguments))

    @contextlib.asynccontextmanager
    async def workspace(self, files: Any, protected: Any, commands: Any) -> AsyncIterator[Any]:
        opened = self._sandbox.workspace(files, protected, commands)
        folder = await self._clocked(opened.__aenter__())
        clock = self

        class Folder:
            async def call(self, tool: str, arguments: Any) -> Any:
                return await clock._clocked(folder.call(tool, arguments))

            async def files(self) -> Any:
                return await clock._clocked(folder.files())

        try:
            yield Folder()
        finally:
            await self._clocked(opened.__aexit__(None, None, None))

    async def _clocked(self, job: Any) -> Any:
        began = time.perf_counter()
        self._depth += 1
        try:
            answer = await job
        finally:
            self._depth -= 1
        if not self._depth:
            self.log.append((time.perf_counter() - began, answer))
            self.spent += self.log[-1][0]
        return answer


class Recorded:
    """Replays the sandbox of an episode from the ``log`` of ``Clocked``: it gives the same answers after the same
    times, without any work. ``spent`` sums these times, without delays of the event loop."""

    def __init__(self, log: Sequence[tuple[float, Any]]) -> None:
        self._log = iter(log)
        self.spent = 0.0

    async def evaluate(self, *arguments: Any) -> Any:
        return await self._next()

    async def call(self, tool: str, arguments: Any) -> Any:
        return await self._next()

    async def files(self) -> Any:
        return await self._next()

    @contextlib.asynccontextmanager
    async def workspace(self, *arguments: Any) -> AsyncIterator[Any]:
        await self._next()
        yield self
        await self._next()

    async def _next(self) -> Any:
        seconds, answer = next(self._log)
        await asyncio.sleep(seconds)
        self.spent += seconds
        return answer


async def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the milliseconds per turn in which an episode waits for neither engine nor sandbox, with ``--episodes``
    episodes at once. First they run with a real sandbox on the same processors (``works``). This time includes waits of
    the loop's process for a processor that the sandbox occupies. Then the same episodes run with ``Recorded`` sandboxes
    (``answers``). ``computed`` is the processor time of the loop's thread per turn in that second run. Returns each as
    a sorted list with one value per round; the first of several rounds is left out."""
    rng = random.Random(0)
    chat = Chat(train_tokenizer(texts(corpus(Bootstrap(examples=300), 0, set())), 1024), "compact")
    tasks = [sample_task(rng) for _ in range(4)]
    settings = EpisodeSettings(
        turns=8, turn_tokens=512, tool_tokens=96, context=4096, deadline_seconds=600.0, style="compact"
    )
    found: dict[str, list[float]] = {"works": [], "answers": [], "computed": []}

    async def live(number: int, name: str, engine: Readout, sandbox: Any) -> float:
        began = time.perf_counter()
        played = await run_episode(tasks[number % len(tasks)], engine, chat, sandbox, settings, number, name)
        assert played.ended == "answer", played.ended
        return time.perf_counter() - began - sandbox.spent

    async def together(turns: dict[str, list[list[int]]], sandboxes: Sequence[Any], kind: str) -> float:
        """Plays all episodes at once and appends the waiting time to ``found[kind]``. Returns the seconds that the
        loop's thread computed, per turn."""
        engine = Readout({name: list(said) for name, said in turns.items()}, args.latency)
        began = time.thread_time()
        jobs = [live(i, name, engine, box) for i, (name, box) in enumerate(zip(turns, sandboxes, strict=True))]
        lived = await asyncio.gather(*jobs)
        found[kind].append(1000 * (sum(lived) - engine.spent) / engine.calls)
        return (time.thread_time() - began) / engine.calls

    with tempfile.TemporaryDirectory() as temporary:
        async with LocalSandbox(SandboxConfig(clock="model"), Path(temporary)) as local:
            for round_ in range(args.rounds):
                turns: dict[str, list[list[int]]] = {}
                for number in range(args.episodes):
                    said = episode(tasks[number % len(tasks)], rng, number % 2 == 0)
                    turns[f"{round_}/{number}"] = [chat.turn_ids(m) for m in said if m["role"] == "assistant"]
                clocked = [Clocked(local) for _ in turns]
                await together(turns, clocked, "works")
                computed = await together(turns, [Recorded(box.log) for box in clocked], "answers")
                found["computed"].append(1000 * computed)
    counted = {kind: sorted(values[1:] or values) for kind, values in found.items()}
    shown = {kind: f"{statistics.median(v):.2f} ms ({v[0]:.2f}-{v[-1]:.2f})" for kind, v in counted.items()}
    print(
        f"{args.episodes} episodes at once, {args.latency * 1000:.0f} ms a completion on average: a turn waits "
        f"{shown['answers']} for neither engine nor sandbox, {shown['works']} where the sandbox works on the same "
        f"processors; the loop computes {shown['computed']} of it"
    )
    return {f"milliseconds_a_turn_{kind}": values for kind, values in counted.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=".cuda-agent/store", help="with a finished run")
    parser.add_argument("--steps", type=int, default=3, help="counted, of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="episodes a step")
    parser.add_argument("--threads", type=int, default=1, help="of each process's engine and trainer")
    parser.add_argument("--clock", default="real", choices=["real", "model"])
    parser.add_argument("--overhead", action="store_true", help="measure the loop's own time a turn instead")
    parser.add_argument("--episodes", type=int, default=64, help="at once, with --overhead")
    parser.add_argument(
        "--latency", type=float, default=0.2, help="seconds of a completion on average, with --overhead"
    )
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    result = asyncio.run(overhead(args)) if args.overhead else compare(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
