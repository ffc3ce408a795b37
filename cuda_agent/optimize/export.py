"""Exports a solution as one file ``model_new.py``, which needs nothing of this package.

In the formats ``plan`` and ``extension``, the file needs only PyTorch and a compiler.  It holds the kernels as strings,
and the code that runs them.  This code consists of the package's ``standalone_*`` modules and the definitions that they
use from other modules.  In the format ``plan``, the file also holds the task's source, because its class ``ModelNew``
inherits from the task's ``Model``.  Kernels are built at the first call (format ``plan``) or at import (format
``extension``), and cached in the user's cache folder.  In other formats, the file begins with the solution's entry
file, and needs what that file imports.

Run as a program, the file compares itself with the original.  It is for inference on one device: inputs that require a
gradient are refused.  It does not support CUDA graphs.  Inputs must have the shapes and dtypes of the task's inputs.
Other arguments, such as numbers, must have the same values as in the task."""

import ast
import math
import re
from collections.abc import Callable
from importlib.resources import files as package_files
from typing import Any

from cuda_agent import syntax
from cuda_agent.config import SandboxConfig
from cuda_agent.format_names import Format
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats import extension, plan
from cuda_agent.sandbox.formats.python import check_module
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor

_PRELUDE = "".join(f"#include <{name}>\n" for name in ("cmath", "algorithm", "cstdint", "cstring", "limits"))
_PROGRAM_TESTS = ("__name__ == '__main__'", "'__main__' == __name__")
_RULE = "# " + "-" * 98
_OURS = re.compile(r"^from cuda_agent\b.*\n", re.MULTILINE)

_PLAN = '''
_KERNELS = {runner}(_PROGRAM, _SOURCES, Model.forward)


class ModelNew(Model):
    """What ``Model`` computes, by the kernels above.  For inference, with inputs as ``get_inputs()`` gives them."""

    _weights = None

    def __init__(self, *args, **kwargs):
        _check_init(Model, _PROGRAM["init"], args, kwargs)
        super().__init__(*args, **kwargs)

    def forward(self, *args):
        return _KERNELS(self, args)

    def _apply(self, *args, **kwargs):
        self._weights = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):  # a parent's load_state_dict calls only this
        self._weights = None
        return super()._load_from_state_dict(*args, **kwargs)
'''


_END = """
ModelNew.forward = _for_inference(ModelNew.forward)

if __name__ == "__main__":
    raise SystemExit(_compare({original}, ModelNew, {device!r}, {train!r}, {tolerance!r}))
"""


def model_new(task_code: str, solution: Solution, spec: TaskSpec, settings: SandboxConfig, about: str = "") -> str:
    """Returns the source of ``model_new.py`` for ``solution``, as judged with ``settings``.  The source begins with the
    text ``about`` as comments.

    Raises:
        SolutionError: The files are not a valid solution."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())
    code, original = module_code(task_code, solution, spec, settings.device), "globals()"
    parts = [body("standalone_program.py")]
    if solution.format != "plan":
        parts, original = [*parts, f"_ORIGINAL = {literal(task_code)}"], "_names(_ORIGINAL)"
    values = {"device": settings.device, "train": settings.train_mode, "tolerance": settings.tolerance}
    program = "\n\n\n".join([*parts, _END.format(original=original, **values).strip()])
    return head + code.rstrip("\n") + "\n\n\n" + sections(("What compares it with the original.", program))


def module_code(task_code: str, solution: Solution, spec: TaskSpec, device: str) -> str:
    """Returns the part of ``model_new.py`` that defines ``ModelNew``, without the program that compares it with the
    original.  In the format ``plan`` it begins with ``task_code``, which defines the class ``Model``.

    Raises:
        SolutionError: The files are not a valid solution."""
    if exporter := _EXPORTERS.get(solution.format):
        return exporter(task_code, solution, spec, device)
    return solution.files[FORMATS[solution.format].entry]


def _of_plan(task_code: str, solution: Solution, spec: TaskSpec, device: str) -> str:
    program = plan.compile_plan(solution.files, spec, device)
    values: dict[str, Any] = program.to_json() | {
        "inputs": [_described(tensor) for tensor in spec.inputs],
        "outputs": [_described(tensor) for tensor in spec.outputs],
        "weights": {name: _described(tensor) for name, tensor in spec.weights.items()},
        "arguments": list(spec.arguments),
        "init": list(spec.init),
    }
    sources: dict[str, str] = {}
    if program.source:
        used = {name: text for name, text in solution.files.items() if name != "plan.json"}
        prelude = _PRELUDE if device == "cpu" else ""
        sources = {**used, f"unit.{'cpp' if device == 'cpu' else 'cu'}": prelude + program.source}
    if device == "cpu":
        parts, runner = (_LIBRARY | _CPU, "standalone_cpu.py"), "_OnCpu"
        values |= {"flags": list(toolchain.FLAGS), "runtime": _source("sandbox/worker/runtime.cpp")}
    else:
        parts, runner = (_LIBRARY | _GPU, "standalone_cuda.py"), "_OnCuda"
        values |= {"expressions": program.expressions, "nvrtc": _source("sandbox/build/nvrtc.py")}
    return sections(
        ("The model as it was given.", without_program(task_code)),
        ("The kernels.", f"_SOURCES = {_value(dict(sorted(sources.items())))}"),
        ("The plan, with every number worked out.", f"_PROGRAM = {_value(values)}"),
        ("What runs them.", _runtime(*parts)),
        ("", _PLAN.format(runner=runner).strip()),
    )


def _of_extension(task_code: str, solution: Solution, spec: TaskSpec, device: str) -> str:
    check_module(solution.files, spec)
    sources, units, uses = extension.sources_of(solution.files, device)
    if device == "cpu":
        flags = [*toolchain.FLAGS, "-include", "prelude.h", "-I.", "-Isurface", "-fopenmp"]
        sources["prelude.h"] = _PRELUDE
    else:
        flags = [
            "-O3", "--use_fast_math", "-std=c++20", "-Xcompiler", "-fPIC,-O3", "-DCUDA_EXTENSION_ON_CUDA",
            *(["-DCUDA_EXTENSION_USES_CUBLAS"] if "cublas" in uses else []), "-I.", "-Isurface",
        ]  # fmt: skip
    code = solution.files["model_new.py"]
    start = f"_extension(_SOURCES, {units!r}, {device!r}, {flags!r}, {uses!r})"
    return sections(
        ("The kernels and their bindings.", f"_SOURCES = {_value(dict(sorted(sources.items())))}"),
        ("What builds and calls them.", _runtime(_CPU | _BINDING, "standalone_extension.py")),
        ("The solution's own module.", f"_MODULE = {literal(code)}\n\n_with_extension({start}, _MODULE, globals())"),
    )


_EXPORTERS: dict[Format, Callable[[str, Solution, TaskSpec, str], str]] = {"plan": _of_plan, "extension": _of_extension}


# Variable of an exported file -> module of this package, and the definitions of it that are used.
_LIBRARY = {"_library_nodes": ("sandbox.worker.library_nodes", ["bind"])}
_CPU = {"_machine": ("machine", ["processor"])}
_GPU = {
    "_driver": ("sandbox.driver", ["Module", "Launch"]),
    "_gpu": ("sandbox.worker.gpu", ["_arguments"]),
    "_toolchain": ("sandbox.build.toolchain", ["nvrtc_files"]),
}
_BINDING = {
    "_toolchain": ("sandbox.build.toolchain", ["find_nvcc"]),
    "_binding": ("sandbox.worker.binding", ["load_module"]),
}


def _runtime(shared: dict[str, tuple[str, list[str]]], part: str) -> str:
    """Returns the sources of ``standalone_plan`` and of the file ``part`` as one text, without the imports from this
    package.  Instead of importing a module, the text defines a small one that holds only the needed definitions of the
    original.  ``shared`` lists these modules: variable for the module -> (the original in this package, names of the
    needed definitions)."""
    bodies = [body(name) for name in ("standalone_plan.py", part)]
    modules = []
    for variable, (module, names) in shared.items():
        source = _definitions(_source(f"{module.replace('.', '/')}.py"), names)
        modules.append(f"{variable} = _module({module!r}, {literal(source)})")
    return "\n\n\n".join([bodies[0], *modules, bodies[1]])


def body(name: str) -> str:
    """Returns the source of a module of this folder without its docstring and its imports from this package."""
    return _OURS.sub("", _source(f"optimize/{name}").partition('"""\n\n')[2]).strip()


def _definitions(source: str, names: list[str]) -> str:
    """Returns a part of ``source``: the definitions of ``names`` and, recursively, the top-level definitions that they
    use.  Names in annotations do not count as used."""
    tree, lines = syntax.parse(source), source.splitlines()
    named: dict[str, list[ast.stmt]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    for statement in tree.body:
        for name in _named(statement):
            named.setdefault(name, []).append(statement)
    pending, kept = list(names), set[ast.stmt]()
    while pending:
        for statement in named.get(pending.pop(), []):
            if statement not in kept:
                kept.add(statement)
                pending += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    parts = ["from __future__ import annotations"]
    for statement in sorted(kept, key=lambda item: item.lineno):
        first = min([statement.lineno, *(item.lineno for item in getattr(statement, "decorator_list", ()))])
        parts.append("\n".join(lines[first - 1 : statement.end_lineno]))
    return "\n\n".join(parts) + "\n"


def _named(statement: ast.stmt) -> list[str]:
    """Returns the names that a top-level ``statement`` sets: ``x`` for ``x = 1``, ``x.y = 1`` and ``import x``."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _source(path: str) -> str:
    return (package_files("cuda_agent") / path).read_text()


def _described(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), tensor.dtype]


def sections(*sections: tuple[str, str]) -> str:
    return "\n\n".join(f"{_RULE}\n# {title}\n\n{text}\n" if title else f"{text}\n" for title, text in sections)


def without_program(code: str) -> str:
    """Returns the source ``code`` without its top-level statements ``if __name__ == "__main__":``.  The exported file,
    run as a program, compares its models instead."""
    lines = code.splitlines()
    for statement in reversed(syntax.parse(code).body):
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in _PROGRAM_TESTS and not statement.orelse:
            del lines[statement.lineno - 1 : statement.end_lineno]
    return "\n".join(lines).rstrip()


def literal(text: str) -> str:
    """Returns a Python literal of ``text``: a raw multi-line string if possible, else the ``repr``."""
    if "'''" not in text and not text.endswith(("'", "\\")) and all(c.isprintable() or c in "\n\t" for c in text):
        return f"r'''{text}'''"
    return repr(text)


def _repr(value: Any) -> str:
    """Returns a Python expression of ``value``. That of an infinite number or NaN is no name, as its ``repr`` is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_repr, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_repr(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _value(values: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + "".join(f"        {_repr(item)},\n" for item in value) + "    ]"
        return literal(value) if isinstance(value, str) else _repr(value)

    return "{\n" + "".join(f"    {key!r}: {written(value)},\n" for key, value in values.items()) + "}"
