"""Measures evaluations per minute on this machine, and where their time goes. Same as ``cuda-agent sandbox bench``.

python benchmarks/sandbox.py --tasks 4 --solutions 10 --json sandbox.json
"""

import argparse
import asyncio
import json
from pathlib import Path

from cuda_agent.config import SandboxConfig
from cuda_agent.diagnostics import sandbox_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--solutions", type=int, default=10, help="per task, format and round; there are three rounds")
    parser.add_argument("--formats", default="plan,extension,python")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    formats = sandbox_bench.formats_of(options.formats)
    answer = asyncio.run(sandbox_bench.measure(SandboxConfig(), options.tasks, options.solutions, formats))
    print("\n".join(sandbox_bench.lines(answer)))
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
