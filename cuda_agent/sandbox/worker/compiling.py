"""Speeds up ``torch.compile`` in jailed workers, which reuse results that a trusted worker stored.

TorchInductor's first compilation in a process spends most of its time on two things: it tests vector instructions, and
it precompiles a large header. A trusted worker, the warm-up, does both once per machine and stores the results in a
folder. ``share`` makes other workers take them from this folder.

The import of this module also computes digests of the sources of torch and Triton, which the process caches. The
process that forks compiling workers imports the module before it forks, so that the workers inherit the digests."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import functorch.compile  # noqa: F401
import torch._inductor.codecache as codecache
import torch._inductor.cpu_vec_isa as cpu_vec_isa

with contextlib.suppress(Exception):
    codecache.torch_key()  # this call and ``triton_key`` cache the digest of a whole library's sources
    from triton.runtime.cache import triton_key

    triton_key()
if not any(Path("/dev").glob("nvidia*")):  # this import queries a GPU, and then no fork can use it
    import torch.utils.cpp_extension  # noqa: F401


def share(folder: Path, record: bool) -> None:
    """Patches TorchInductor so that it reuses two things from ``folder``: precompiled headers, and the results of tests
    of vector instructions. If ``record`` is true, also stores new results in ``folder``. Raises ``AttributeError`` if
    this version of torch lacks the internals that are patched."""
    notes, home = folder / "facts.json", folder if record else Path(os.environ["TMPDIR"])
    home.mkdir(exist_ok=True)
    facts: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    check_build, precompile = cpu_vec_isa.VecISA.check_build, codecache._precompile_header

    def known(parts: Sequence[object], find: Callable[[], Any]) -> Any:
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key in facts:
            return facts[key]
        found = find()
        if record:
            facts[key] = found
            notes.write_text(json.dumps(facts))
        return found

    def checked(self: Any, code: str) -> bool:
        parts = type(self).__name__, self.build_arch_flags(), code
        return bool(known(parts, lambda: bool(check_build(self, code))))

    def precompiled(header: str, command: str, **options: Any) -> str:
        def path() -> str:
            made = precompile(header, command, **options)
            return os.path.relpath(made, folder) if record else made

        # ``command`` holds every flag except the optimisation level.
        return str(folder / known((header, command, options.get("min_optimize")), path))

    codecache._HEADER_DIR = str(home / "headers")
    codecache._HEADER_LOCK_DIR = str(home / "locks")
    cpu_vec_isa.VecISA.check_build = checked  # type: ignore[method-assign]
    codecache._precompile_header = precompiled  # type: ignore[assignment]
