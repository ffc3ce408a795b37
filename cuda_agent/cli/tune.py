"""The command `tune`, which finds the best values of a solution's declared parameters."""

import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from cuda_agent.cli.options import (
    AsJson,
    Device,
    ModelFile,
    Overrides,
    SolutionFolder,
    SolutionFormat,
    TrainMode,
    command,
    command_group,
    show,
    with_train_mode,
)
from cuda_agent.errors import EXIT_DONE, EXIT_GATE, EXIT_RETRY

tune_commands = command_group()


@command(
    tune_commands,
    "cuda-agent tune model.py my-solution/",
    "cuda-agent tune model.py my-solution/ --most 64 --output faster/",
)
def tune(
    task: ModelFile,
    solution: SolutionFolder,
    overrides: Overrides = None,
    most: Annotated[int, Option(min=2, help="most variants; of more, so many are drawn at random")] = 256,
    output: Annotated[Path | None, Option(help="new folder for the fastest variant [default: SOLUTION-tuned]")] = None,
    format: SolutionFormat = None,
    device: Device = None,
    train_mode: TrainMode = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest values of the parameters that a solution declares.

    A line in a kernel's file such as `// tune: BLOCK 64 128 256` (in Python: `# tune: ...`) declares values of BLOCK.
    BLOCK is a constant of plan.json, or a line of the same file gives its number, as in `#define BLOCK 128` or
    `constexpr int BLOCK = 128;`. All variants are judged in quick mode, and the fastest four in strict mode, against
    eager PyTorch alone. The fastest correct one is written to the output folder, with its verdict. Exit code 0: there
    is one; 79: there is none; 75: the sandbox failed."""
    from cuda_agent.optimize import evaluation, tuning
    from cuda_agent.optimize.folder import OptimizeError, write_solution
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.tasks.io import task_from_file

    target = output or solution.with_name(f"{solution.resolve().name}-tuned")
    if target.exists():
        raise OptimizeError(f"--output {target}: exists already; name a new folder")
    given, files = task_from_file(task), evaluation.solution_files(solution)
    settings, cache = evaluation.settings_for(files, with_train_mode(overrides, train_mode), format, device)
    first = evaluation.checked_solution(files, settings.sandbox.format, str(solution))

    async def work() -> tuning.Tuning:
        async with open_sandbox(settings.sandbox, cache, compiled=False) as sandbox:
            return await tuning.tune(given, first, sandbox, most, lambda line: print(line, file=sys.stderr, flush=True))

    found = evaluation.run_to_end(work())
    if found.best and found.best.strict:
        write_solution(target, found.best.solution.files)
        (target / "verdict.json").write_text(json.dumps(found.best.strict.to_json(), indent=1))
    lines = tuning.tuning_lines(found) + ([f"it is in {target}"] if found.best else [])
    show(as_json, found.to_json(), lines)
    sys.exit(EXIT_DONE if found.best else EXIT_RETRY if found.faulty else EXIT_GATE)
