"""Runs a stage in its own process, which a test can kill: ``python -m tests.rl.ray.ray_stage FOLDER INPUTS CONFIG``."""

import signal
import sys
from pathlib import Path

from cuda_agent.compose import validate
from cuda_agent.errors import StageError
from cuda_agent.stages import warmup
from tests import made_once
from tests.rl.ray.ray_cases import context


def main(folder: Path, inputs: Path, settings: str) -> int:
    import json

    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    made_once.keep_in(folder.parent / "made-once")
    ctx = context(folder, validate(json.loads(settings)), {path.name: path for path in inputs.iterdir()})
    ctx.should_stop = lambda: bool(stopped)
    try:
        warmup.run(ctx)
    except StageError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
