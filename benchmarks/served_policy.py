"""Measures a trained policy behind a real vLLM server, and compares it with the run's own evaluation in process.

    CUDA_AGENT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/served_policy.py last --tasks 12 --json served.json

`cuda-agent optimize` uses the server's OpenAI address on held-out tasks, as a person would. The run's evaluation of the
policy has played the same tasks. Both play with the same turns, tokens and temperature, but different random numbers.
Prints a table in Markdown.

Every result folder with a solution is then tried in a process that can import PyTorch but nothing of this project. The
process compares ``model_new.py`` with ``model.py`` on the task's own inputs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cuda_agent.agent.progress import factor, read_events  # noqa: E402
from cuda_agent.config import Config  # noqa: E402
from cuda_agent.errors import ConfigError, PolicyError  # noqa: E402
from cuda_agent.pipeline import runs  # noqa: E402
from cuda_agent.pipeline.graph import STAGES  # noqa: E402
from cuda_agent.policy.engines.vllm_server import (  # noqa: E402
    NAME,
    Replica,
    VllmServer,
    interpreter,
)
from cuda_agent.policy.episode import Episode, read_episodes  # noqa: E402
from cuda_agent.rl.scores import ScoreRow, score  # noqa: E402
from cuda_agent.sandbox.wire import Verdict  # noqa: E402
from cuda_agent.storage import Store, StoreUnavailable, local_folder, open_store  # noqa: E402
from cuda_agent.tasks.io import read_tasks  # noqa: E402
from cuda_agent.tasks.task import Task  # noqa: E402
from tests.optimize import fresh  # noqa: E402

TRIAL = """
import torch, model, model_new
torch.manual_seed(0)
init = model.get_init_inputs()
old, new = model.Model(*init).eval(), model_new.ModelNew(*init).eval()
new.load_state_dict(old.state_dict())
inputs = model.get_inputs()
with torch.no_grad():
    one, other = old(*inputs), new(*inputs)
assert torch.allclose(one, other, atol=1e-2, rtol=1e-2), (one - other).abs().max()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="last", help="a finished run, the beginning of its name, or last")
    parser.add_argument("--store", default=".cuda-agent/store")
    parser.add_argument("--policy", default="agentic", choices=["agentic", "rft", "warmup", "base"])
    parser.add_argument("--tasks", type=int, default=12, help="held-out ones, of the teacher's family first")
    parser.add_argument("--work", type=Path, help="folder for the results; default: a temporary one")
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    try:
        interpreter()
        folder = local_folder(options.store)
        if folder is not None and not folder.is_dir():
            raise StoreUnavailable(f"there is no store at {folder}")
        store = open_store(options.store)
        run = runs.find_run(store, options.run)
    except (PolicyError, StoreUnavailable, ConfigError) as error:
        print(f"nothing measured: {error}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        figures = asyncio.run(measure(store, run, options.policy, options.tasks, work))
    print(table(figures))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))


async def measure(store: Store, run: runs.Run, policy: str, count: int, work: Path) -> dict[str, Any]:
    config, manifests = runs.read_config(store, run.config), runs.run_manifests(store, run, STAGES)
    evaluated = manifests[f"evaluate-{policy}"]
    for name, digest in (evaluated.inputs | {"scores": evaluated.outputs["scores"]}).items():
        store.get_folder(digest, work / "given" / name)
    heldout = [task for task in read_tasks(work / "given" / "tasks") if task.split == "heldout"]
    tasks = sorted(heldout, key=lambda task: task.family != "teacher")[:count]
    names = {task.name for task in tasks}
    played = [e for e in read_episodes(work / "given" / "scores" / "episodes.jsonl") if e.task in names]
    packages = fresh.only_torch(work / "only-torch")
    home = runs.local_home(store.uri)
    results = []
    async with served(work / "given" / "policy", config, home / "cache" / "lease") as url:
        for task in tasks:
            results.append(await asyncio.to_thread(optimized, task, url, config, store.uri, work, packages))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    seed, clock = config.seed, config.sandbox.clock
    inside = score("", played, tasks, clock, seed)
    rows = {"in process, final answer": inside.final.overall, "in process, best of the way": inside.best.overall}
    for mode in ("quick", "strict"):
        outside = score("", [as_episode(result, mode) for result in results], tasks, clock, seed)
        rows[f"served, {mode} verdict"] = outside.final.overall
    return {
        "run": run.name,
        "policy": policy,
        "tasks": [task.name for task in tasks],
        "episodes in process": len(played),
        "rows": {name: vars(row) for name, row in rows.items()},
        "results": results,
    }


@contextlib.asynccontextmanager
async def served(policy: Path, config: Config, lease: Path) -> AsyncIterator[str]:
    """Starts a vLLM server for ``policy`` and yields its OpenAI address. The server itself listens on a Unix socket, so
    TCP connections are forwarded to this socket."""
    server = VllmServer(policy, config.policy.model_copy(update={"engine_batch": 4}), lease, None)
    try:
        await Replica(f"unix:{server.socket}", server).ready()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_unix_connection(str(server.socket))
            await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))

        door = await asyncio.start_server(connect, "127.0.0.1", 0)
        async with door:
            yield f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def optimized(task: Task, url: str, config: Config, store: str, work: Path, packages: Path) -> dict[str, Any]:
    """Runs `cuda-agent optimize` on a task. Returns its exit ``code``, its ``seconds``, and the best ``quick`` and the
    final ``strict`` verdict (None without one). If there is a result, ``alone`` says whether its folder works with
    PyTorch alone. If the command fails, the result has ``error`` instead of verdicts."""
    source, folder = work / "tasks" / task.name / "model.py", work / "results" / task.name
    source.parent.mkdir(parents=True)
    source.write_text(task.code)
    how = config.evaluate
    command = [sys.executable, "-m", "cuda_agent.cli", "optimize", str(source), "--output", str(folder), "--json"]
    command += ["--base-url", url, "--model", NAME, "--style", "compact", "--format", "plan", "--device", "cpu"]
    command += ["--context", str(config.policy.context), "--answer-tokens", str(config.agent.turn_tokens)]
    command += ["--turns", str(how.turns), "--temperature", str(how.temperature), "--target", "inf"]
    command += ["--seed", str(config.seed), f"run.store={store}", *overrides(config)]
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    found: dict[str, Any] = {"task": task.name, "code": ended.returncode, "seconds": round(time.monotonic() - began, 1)}
    if ended.returncode not in (0, 79):
        return found | {"error": ended.stderr[-400:]}
    events = read_events(folder / "transcript.jsonl")
    judged = [event["verdict"] for event in events if event["kind"] == "verdict"]
    quick = [verdict for verdict in judged if verdict["mode"] == "quick"]
    best = max(quick, key=lambda one: (one["status"] == "ok", factor(Verdict.from_json(one)) or 0.0), default=None)
    strict = json.loads((folder / "verdict.json").read_text()) if ended.returncode == 0 else None
    found |= {"quick": best, "strict": strict, "why": json.loads(ended.stdout.splitlines()[-1])["why"]}
    if strict:
        tried = fresh.run(packages, TRIAL, folder, work / "home")
        found["alone"] = tried.returncode == 0
        found["said"] = tried.stderr[-300:]
    return found


def overrides(config: Config) -> list[str]:
    """Returns overrides for the settings of the run's sandbox that differ from the defaults, except ``format`` and
    ``device``."""
    standard = type(config.sandbox)().model_dump(mode="json")
    own = config.sandbox.model_dump(mode="json")
    return [
        f"sandbox.{k}={json.dumps(v)}" for k, v in own.items() if v != standard[k] and k not in ("format", "device")
    ]


def as_episode(result: dict[str, Any], mode: str) -> Episode:
    """Returns a result of ``optimized`` as an episode, so that ``score`` can read it. Its verdict is the one of this
    ``mode``; without such a verdict, the reward is -1. If the command failed, the reward is None."""
    verdict = result.get(mode) or (result.get("quick") if mode == "quick" else None)
    reward = -1.0 if verdict is None else float(verdict["reward"] or 0)
    lost = "error" in result
    name = result["task"]
    return Episode(name, name, "agent", [], [], [], [], [], None if lost else reward, "answer", verdict)


def table(figures: dict[str, Any]) -> str:
    columns = ["", "tasks", "correct", "faster than eager", "faster than compile", "× eager", "× compile"]
    about = f"run {figures['run']}, policy {figures['policy']}, {figures['episodes in process']} episodes in process"
    lines = [about, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, fields in figures["rows"].items():
        row = ScoreRow(**fields)
        cells = [share(row, "passed"), share(row, "faster_eager"), share(row, "faster_compile")]
        cells += [ratio(row, "speedup_eager"), ratio(row, "speedup_compile")]
        lines.append(f"| {name} | {row.tasks} | {' | '.join(cells)} |")
    alone = [result["alone"] for result in figures["results"] if "alone" in result]
    lines += ["", f"{sum(alone)} of {len(alone)} result folders work in a process that finds PyTorch alone."]
    return "\n".join(lines)


def share(row: ScoreRow, name: str) -> str:
    return within(getattr(row, name), row.intervals.get(name), lambda value: f"{100 * value:.0f} %")


def ratio(row: ScoreRow, name: str) -> str:
    return within(getattr(row, name), row.intervals.get(name), lambda value: f"{value:.2f}")


def within(value: float | None, interval: Sequence[float] | None, say: Any) -> str:
    if value is None:
        return "none"
    return say(value) + (f" ({say(interval[0])} to {say(interval[1])})" if interval else "")


if __name__ == "__main__":
    main()
