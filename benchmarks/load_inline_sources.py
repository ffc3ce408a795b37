"""Builds other people's load_inline solutions twice, with stand-ins for torch's headers and with torch's own, and
compares the outputs of the two builds.

    python benchmarks/load_inline_sources.py solutions.jsonl --output results.jsonl --parallel 12

A line of ``solutions.jsonl`` is a JSON object with ``id``, ``task`` (source of ``model.py``) and ``code`` (source of
``model_new.py``). The two sources run without a sandbox, so use this on a machine that holds nothing else. A line of
``results.jsonl`` tells for both builds: seconds, error, digests of the outputs, and the largest difference to the
reference of the task. It needs a GPU.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox.formats import first_pass
from cuda_agent.sandbox.worker import stand_ins
from cuda_agent.sandbox.worker.replay import link_libraries

KINDS = ("stand-ins", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=2, help="builds side by side")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of one build and its run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.solutions, options.one)))
        return
    rows = [json.loads(line) for line in options.solutions.read_text().splitlines()]
    results: dict[str, dict[str, Any]] = {row["id"]: {} for row in rows}
    for kind in KINDS:
        # A solution that builds nothing with the stand-ins catches its own error, or has no build on this machine.
        rows = [row for row in rows if kind == KINDS[0] or results[row["id"]][KINDS[0]].get("with_stand_ins")]
        with ThreadPoolExecutor(options.parallel) as pool:
            run = partial(apart, kind=kind, timeout=options.timeout)
            for row, result in zip(rows, pool.map(run, rows), strict=True):
                results[row["id"]][kind] = result
                print(row["id"], kind, {name: value for name, value in result.items() if name != "outputs"}, flush=True)
    options.output.write_text("".join(json.dumps({"id": name, **found}) + "\n" for name, found in results.items()))
    both = [results[row["id"]] for row in rows if "outputs" in results[row["id"]]["torch"]]
    equal = sum(found["torch"]["outputs"] == found["stand-ins"]["outputs"] for found in both)
    print(
        f"{len(results)} solutions; stand-ins build {len(rows)}, torch's headers {len(both)} of these; equal: {equal}"
    )


def apart(row: dict[str, str], kind: str, timeout: float) -> dict[str, Any]:
    """Runs ``one`` in a new process. Returns its result, or ``{"error": …}``."""
    with tempfile.TemporaryDirectory() as place:
        for name in ("task", "code"):
            (Path(place) / f"{name}.py").write_text(row[name])
        toolchain = first_pass._toolchain(architecture())
        link_libraries(Path(place, "links"), toolchain["CUDA_HOME"])
        environment = os.environ | toolchain | {
            "TORCH_EXTENSIONS_DIR": f"{place}/extensions",
            "LIBRARY_PATH": f"{place}/links",
            "MAX_JOBS": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, place, "--output", "-", "--one", kind]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"no result after {timeout:.0f} s"}
        seconds = round(time.monotonic() - begin, 1)
        if done.returncode:
            said = re.findall(r".*\b(?:error|Error)\b.*", done.stderr) or done.stderr.strip().splitlines()[-1:]
            return {"error": " | ".join(said[:2])[:600], "seconds": seconds}
        return {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def one(place: Path, kind: str) -> dict[str, Any]:
    """Builds and runs the solution in ``place`` with one ``kind`` of headers."""
    import torch.utils.cpp_extension as extensions

    extensions.CUDA_HOME = os.environ["CUDA_HOME"]  # type: ignore[attr-defined]
    built: list[str] = []
    if kind == "stand-ins":
        stand_ins.write_headers(place, first_pass.stand_ins({"model_new.py": (place / "code.py").read_text()}))
        stand_ins.offer(place)
    build = extensions._jit_compile

    def told(*given: Any, **options: Any) -> Any:
        module = build(*given, **options)
        built.append(getattr(module, "__file__", ""))
        return module

    extensions._jit_compile = told

    task, new = load(place / "task.py"), load(place / "code.py")
    models = []
    for made in (task["Model"], new["ModelNew"]):
        torch.manual_seed(0)
        models.append(made(*task["get_init_inputs"]()).cuda().eval())
    with contextlib.suppress(RuntimeError):  # other names of parameters: both builds keep what the seed gave
        models[1].load_state_dict(models[0].state_dict())
    torch.manual_seed(1)
    inputs = [x.cuda() if isinstance(x, torch.Tensor) else x for x in task["get_inputs"]()]
    with torch.no_grad():
        expected = list(tensors(models[0](*inputs)))
        found = list(tensors(models[1](*inputs)))
    torch.cuda.synchronize()
    with_stand_ins = bool(built) and all("stand-ins" in path for path in built)
    pairs = zip(expected, found, strict=True)
    differences = [float((a.double() - b.double()).abs().max()) if a.shape == b.shape else "shape" for a, b in pairs]
    outputs = [[str(y.dtype), list(y.shape), digest(y)] for y in found]
    return {"builds": len(built), "with_stand_ins": with_stand_ins, "outputs": outputs, "difference": differences}


def digest(y: torch.Tensor) -> str:
    return hashlib.sha256(y.cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def load(path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


if __name__ == "__main__":
    main()
