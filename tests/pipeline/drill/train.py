import hashlib
import json
import os
import signal
import time

from cuda_agent.context import StageContext
from cuda_agent.errors import TryAgain
from drill import journal


def run(ctx: StageContext) -> None:
    journal.write(ctx.cache, "train")
    state = hashlib.sha256((ctx.inputs["numbers"] / "n.txt").read_bytes()).hexdigest()
    start = 0

    def write(folder):
        (folder / "state.json").write_text(json.dumps([state, step + 1]))

    def read(folder):
        nonlocal state, start
        state, start = json.loads((folder / "state.json").read_text())

    ctx.checkpoints.load(read)
    how = journal.asked(ctx.cache, "train")
    total = ctx.config.critic.epochs
    for step in range(start, total):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
        time.sleep(0.03)
        ctx.tracker.log(step, {"loss": 1 / (step + 1), "tokens": 10, "tokens_per_second": time.monotonic()})
        if how == "lose" and step == 3:
            ctx.tracker.log(step, {"lost": 2.0})
        ctx.tracker.progress(step + 1, total, tokens_per_second=100.0)
        journal.write(ctx.cache, f"step {step}")
        if how == "die-before-save" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.checkpoints.save(step, write)
        if how == "die-after-save" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "wait" and step == 5 and not ctx.should_stop():
            time.sleep(0.01)
        if ctx.should_stop():
            raise TryAgain(f"stopped after step {step}")
    (ctx.outputs["state"] / "state.txt").write_text(state)
