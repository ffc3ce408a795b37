"""``python -m drill <store> [overrides]``: executes a run in its own process, which a test can kill."""

import os
import resource
import sys

from cuda_agent.compose import compose
from cuda_agent.pipeline.local import run_pipeline
from drill import table

if __name__ == "__main__":
    if limit := os.environ.get("DRILL_LARGEST_FILE"):  # a full disk, as far as a process can tell
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    outcome = run_pipeline(
        compose([f"run.store={sys.argv[1]}", "run.mlflow=off", *sys.argv[2:]]),
        stages=table.STAGES,
        table=table.NAME,
        preload=(),
        pause=0.05,
    )
    print(outcome.run, outcome.code, outcome.message)
    sys.exit(outcome.code)
