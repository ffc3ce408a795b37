"""Speeds up ``torch.compile`` inside the jail by reusing the preparation of a trusted worker.

On its first compilation in a process, TorchInductor tests which vector instructions its builds may use (it builds and
loads a test library for each) and precompiles its large header: most of that compilation's time. ``use`` takes both
results from a folder that one trusted warm-up worker filled (``record``); other results stay private to the worker. The
warm parent of compiling workers imports this module, and with it torch's compiler, which saves each worker 1.5 s of
processor time.

It patches torch's internals. If they have an unexpected form it patches nothing, and compiling is only slower.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import functorch.compile  # noqa: F401
import torch._inductor.codecache as codecache
import torch._inductor.cpu_vec_isa as cpu_vec_isa

with contextlib.suppress(Exception):
    codecache.torch_key()  # this and the next cache the digest of a whole library's sources
    from triton.runtime.cache import triton_key

    triton_key()
if not any(Path("/dev").glob("nvidia*")):  # else they query the driver, after which no fork could use a device
    import torch._inductor.compile_fx
    import torch.utils.cpp_extension  # noqa: F401

_FACTS, _HEADERS = "facts.json", "headers"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _isa_key(isa: Any, code: str) -> str:
    return _key(type(isa).__name__, isa.build_arch_flags(), code)


def _header_key(header: str, command: str, options: dict[str, Any]) -> str:
    """Return the key of a header. ``command`` holds every flag except the optimisation level."""
    return _key(header, command, options.get("min_optimize"))


def record(home: Path) -> None:
    """Keep the results in ``home`` from now on."""
    check_build, precompile = cpu_vec_isa.VecISA.check_build, codecache._precompile_header
    facts: dict[str, dict[str, Any]] = {"isa": {}, "header": {}}

    def note() -> None:
        (home / _FACTS).write_text(json.dumps(facts))

    def checked(self: Any, code: str) -> bool:
        result = facts["isa"][_isa_key(self, code)] = bool(check_build(self, code))
        note()
        return result

    def precompiled(header: str, command: str, **options: Any) -> str:
        path = precompile(header, command, **options)
        facts["header"][_header_key(header, command, options)] = os.path.relpath(path, home)
        note()
        return path

    codecache._HEADER_DIR = str(home / _HEADERS)
    codecache._HEADER_LOCK_DIR = str(home / "locks")
    cpu_vec_isa.VecISA.check_build = checked  # type: ignore[method-assign]
    codecache._precompile_header = precompiled  # type: ignore[assignment]


def use(known: Path, home: Path) -> None:
    """Take the results from ``known`` from now on; results missing there are computed in ``home``."""
    facts = json.loads((known / _FACTS).read_text())
    check_build, precompile = cpu_vec_isa.VecISA.check_build, codecache._precompile_header

    def checked(self: Any, code: str) -> bool:
        answer = facts["isa"].get(_isa_key(self, code))
        return bool(check_build(self, code)) if answer is None else bool(answer)

    def precompiled(header: str, command: str, **options: Any) -> str:
        path = facts["header"].get(_header_key(header, command, options))
        return str(precompile(header, command, **options)) if path is None else str(known / path)

    codecache._HEADER_DIR = str(home / _HEADERS)
    codecache._HEADER_LOCK_DIR = str(home / "locks")
    cpu_vec_isa.VecISA.check_build = checked  # type: ignore[method-assign]
    codecache._precompile_header = precompiled  # type: ignore[assignment]
