"""A small policy, a few of the teacher's tasks, and the context of a stage that learns from rewards."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_agent.compose import restricted
from cuda_agent.config import Bootstrap, Config
from cuda_agent.context import StageContext
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.model import new_policy, save_policy, train_tokenizer
from cuda_agent.rl.dialogues import corpus, texts
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.storage import open_store
from cuda_agent.synthesis.teacher.family import sample_task
from cuda_agent.tasks.io import write_tasks
from cuda_agent.tracking import FileTracker, read_metrics
from tests import made_once

POLICY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "vocab": 512, "context": 1024}


def config(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "policy": POLICY | {"engine": "scripted", "threads": 1},
        "sandbox": {"clock": "model", "checks": 2, "timed_calls": 3},
        "warmup": {"steps": 2, "episodes_per_step": 4, "samples_per_prompt": 2, "minibatches": 2, "context": 1024},
        "agent": {"turn_tokens": 300},
        "collect": {"samples": 2},
        "ray": {"max_off_policy_steps": 0},
    }
    for name, settings in sections.items():
        values[name] = {**values.get(name, {}), **settings} if isinstance(settings, dict) else settings
    return Config.model_validate(values)


def make_inputs(folder: Path, **policy: Any) -> dict[str, Path]:
    """Writes a policy with random weights and tasks to folders, and returns name -> folder."""
    inputs = {name: folder / name for name in ("policy", "tasks")}
    for path in inputs.values():
        path.mkdir(parents=True)
    tokenizer = train_tokenizer(texts(corpus(Bootstrap(examples=40), 0, set())), POLICY["vocab"])
    save_policy(new_policy(config(policy=policy).policy, tokenizer, 0), tokenizer, inputs["policy"])
    rng = random.Random(5)
    write_tasks(inputs["tasks"], [sample_task(rng) for _ in range(2)])
    return inputs


def context(folder: Path, settings: Config, inputs: dict[str, Path], name: str = "warmup") -> StageContext:
    """Returns a context for the stage ``name`` like the executor's, with all its folders below ``folder``."""
    (stage,) = (stage for stage in STAGES if stage.name == name)
    for part in ("policy", *stage.outputs, "scratch", "work"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    tracker = FileTracker(folder / "said")
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    return StageContext(
        name=name,
        config=restricted(settings, stage.config),
        inputs=inputs,
        outputs={output: folder / output for output in ("policy", *stage.outputs)},
        work=folder / "work",
        tracker=tracker,
        checkpoints=StageCheckpoints(open_store(str(folder / "store")), name, "key", folder / "scratch", tracker),
        should_stop=lambda: False,
        cache=made_once.share(cache),
    )


def wait_until(true: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Calls ``true`` until its result is true, and returns this result. Raises AssertionError if this takes longer than
    ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


def alive(pid: int) -> bool:
    """Returns whether the process runs. A dead process that its parent has not reaped (a zombie) does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def of_ray(folder: Path | None = None) -> list[int]:
    """Returns the ids of the processes whose command line names ``folder``, the folder of a Ray session. Without
    ``folder``, returns those of all Ray sessions that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"cuda-agent-ray-%d-" % os.getpid() in words if folder is None else str(folder).encode() in words:
            found.append(int(entry.name))
    return found


def learnt(folder: Path) -> tuple[bytes, list[int], list[float]]:
    """Returns the result of a stage that ran in ``folder``: the bytes of the final weights, the steps, and each step's
    reward."""
    steps = read_metrics(folder / "said" / "metrics.jsonl")
    rewards = [values["reward"] for values in steps.values()]
    return (folder / "policy" / "model.safetensors").read_bytes(), list(steps), rewards


def busy(title: str, below: int | None = None) -> list[int]:
    """Returns the process ids of Ray actors whose process title begins with ``title``. Searches the descendants of this
    process, or of the process ``below``."""
    found = []
    for pid in descendants(below or os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(f"ray::{title}".encode()):
            found.append(pid)
    return found


class Killer(threading.Thread):
    """A thread that waits until ``when`` is true and then kills one Ray actor with this ``title``. ``of`` filters the
    list of matching process ids; the thread kills the first one that is left."""

    def __init__(self, title: str, when=lambda: True, of=lambda found: found) -> None:
        super().__init__(daemon=True)
        self.title, self.when, self.of, self.killed = title, when, of, []
        self.start()

    def run(self) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and not self.killed:
            if self.when() and (found := self.of(busy(self.title))):
                os.kill(found[0], signal.SIGKILL)
                self.killed.append(found[0])
            time.sleep(0.001)


def step_done(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: any(folder.glob(f"store/checkpoints/warmup/key/{step:08d}-*.json"))
