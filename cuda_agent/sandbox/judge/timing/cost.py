"""Computes simulated times. They replace measured times if the setting ``sandbox.clock`` is ``model``, as in tests.

A simulated time is a pure function of the task, the solution and the number of CPU threads. It does not predict real
time. It still rewards the usual optimizations, so a language model can be trained with it. These shorten the time:
fewer passes over memory, fewer operators, at least one block per thread, and hints for vectorization."""

import re
from typing import Any

from cuda_agent.sandbox.judge.memory.buffers import byte_count, call_bytes
from cuda_agent.sandbox.messages import EvaluateRequest
from cuda_agent.sandbox.wire import TaskSpec

_CALL, _BYTES_PER_SECOND = 2e-6, 1e10  # seconds of one operator; bytes/s of one thread


def eager(operators: int, touched: int, threads: int) -> float:
    """Returns the simulated seconds of one call of a model in eager PyTorch. The call runs ``operators`` operators,
    which read and write ``touched`` bytes, on ``threads`` threads."""
    return _CALL * operators + touched / (_BYTES_PER_SECOND * threads)


def compiled(spec: TaskSpec, operators: int, touched: int, threads: int) -> float:
    """Returns the simulated seconds of one call of a model with ``torch.compile``, on ``threads`` threads. The same
    call in eager PyTorch runs ``operators`` operators, which read and write ``touched`` bytes. The simulated compiler
    fuses them into 1 + ``operators`` / 4 operators. The fused operators touch all bytes of the inputs and outputs of
    ``spec``, and a quarter of the other bytes."""
    least = call_bytes(spec)
    return _CALL * (1 + operators / 4) + (least + max(0, touched - least) / 4) / (_BYTES_PER_SECOND * threads)


def candidate(request: EvaluateRequest, spec: TaskSpec, threads: int) -> float:
    """Returns the simulated seconds of one call of the solution in ``request``, on ``threads`` threads."""
    if request["traits"]["host_is_ours"]:
        return plan(request["load"], spec, request["files"], threads)
    return extension(spec, request["files"], threads)


def plan(program: dict[str, Any], spec: TaskSpec, files: dict[str, str], threads: int) -> float:
    """Returns the simulated seconds of one call of a plan, a solution whose kernels the sandbox launches. ``program``
    is the compiled plan (``plan.Program``) as JSON. At most ``threads`` blocks run at the same time. The time depends
    on the plan's nodes (kernels, library calls and memsets), the bytes of their buffers, and the number of blocks of
    each kernel. Kernels take 10 % longer per byte if ``files`` contain no hint for vectorization, such as
    ``restrict``."""
    sizes = {f"in:{i}": byte_count(t) for i, t in enumerate(spec.inputs)}
    sizes |= {f"out:{i}": byte_count(t) for i, t in enumerate(spec.outputs)}
    sizes |= {f"w:{i}": byte_count(t) for i, t in enumerate(spec.weights.values())}
    sizes |= {f"ws:{name}": item["bytes"] for name, item in program["workspaces"].items()}
    hint = 1.0 if any(re.search(r"#pragma|restrict", text) for text in files.values()) else 1.1
    total = 0.0
    for node in program["nodes"]:
        if "memset" in node:
            total += _CALL / 2 + node["bytes"] / (_BYTES_PER_SECOND * threads)
        elif "library" in node:
            used = {item["buffer"] for item in node["tensors"].values()}
            total += _CALL + sum(sizes[name] for name in used) / (_BYTES_PER_SECOND * threads)
        else:
            used = {a["buffer"] for a in node["args"] if "buffer" in a}
            rate = _BYTES_PER_SECOND * min(threads, node["grid"])
            total += _CALL + node["grid"] * 1e-8 + hint * sum(sizes[name] for name in used) / rate
    return total


def extension(spec: TaskSpec, files: dict[str, str], threads: int) -> float:
    """Returns the simulated seconds of one call of a solution that is not a plan. The time grows with the bytes of
    inputs, outputs and weights, and with the number of functions that ``files`` export."""
    least = sum(byte_count(t) for t in (*spec.inputs, *spec.outputs, *spec.weights.values()))
    calls = sum(len(re.findall(r"REGISTER_BINDING", text)) for text in files.values())
    return _CALL * (2 + calls) + least / (_BYTES_PER_SECOND * threads)
