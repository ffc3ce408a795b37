"""Measures the executor's own cost: seconds per cached stage without MLflow, and seconds of ``cuda-agent --help``.

    python benchmarks/executor.py --stages 12 --rounds 5 --json executor.json

The stages do almost nothing. The first round runs them; in later rounds they come from the cache. The aims are 0.5 s
per cached stage and 0.3 s for the help.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cuda_agent.config import Config
from cuda_agent.pipeline.graph import Stage
from cuda_agent.pipeline.local import run_pipeline

MODULE = """
from cuda_agent.pipeline.graph import Stage
STAGES = tuple(
    Stage(f"s{n}", "bench_stages", {"a": f"s{n - 1}.a"} if n else {}, ("a",), ("critic",)) for n in range(%d)
)
def run(ctx):
    (ctx.outputs["a"] / "a.bin").write_bytes(ctx.name.encode() * 100_000)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_stages.py").write_text(MODULE % options.stages)
        sys.path.insert(0, folder)
        import bench_stages

        stages: tuple[Stage, ...] = bench_stages.STAGES
        config = Config.model_validate({"run": {"store": f"{folder}/store", "mlflow": "off"}})
        made, cached = run_once(config, stages), [run_once(config, stages) for _ in range(options.rounds)]
    helps = [help_once() for _ in range(options.rounds)]
    result = {
        "made_seconds_a_stage": made / options.stages,
        "cached_seconds_a_stage": statistics.median(cached) / options.stages,
        "cached_worst": max(cached) / options.stages,
        "help_seconds": statistics.median(helps),
        "help_worst": max(helps),
        "stages": options.stages,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def run_once(config: Config, stages: tuple[Stage, ...]) -> float:
    began = time.perf_counter()
    outcome = run_pipeline(config, stages=stages, table="bench_stages:STAGES", preload=())
    assert outcome.code == 0, outcome.message
    return time.perf_counter() - began


def help_once() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "cuda_agent.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
