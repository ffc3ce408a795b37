"""Defines the schemas of the agent's tools, and the output of the commands compile, verify, profile and restore.

The agent runs these commands in its tool Bash. The first three judge the agent's solution, and restore brings back the
best one so far. The agent loop and the code that writes example dialogues for training both call ``describe``, so that
both show the same text for the same verdict. The tools themselves run in ``sandbox.workspace``."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from cuda_agent.format_names import Format
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import Solution, Verdict

Style = Literal["compact", "full"]

_COMPACT_MESSAGE = 100  # characters of a build error in compact style
# g++ writes "path:line:column: error: text", NVRTC and nvcc "path(line): error: text".
_COMPILER = re.compile(r"^(\S+?)(?::(\d+):(?:\d+:)?|\((\d+)\):) (?:fatal )?error: (.+)$", re.M)


def merit(verdict: Verdict) -> tuple[float, float]:
    """Returns the sort key of verdicts: a better verdict has a greater pair (reward, speed-up). The speed-up is over
    torch.compile, or over eager if the one over torch.compile is unknown. A missing reward or speed-up is 0."""
    return float(verdict.reward or 0), verdict.speedup_compile or verdict.speedup_eager or 0.0


def describe(verdict: Verdict, command: str, style: Style, before: Verdict | None = None) -> str:
    """Returns the text that ``command`` (compile, verify or profile) prints for ``verdict``.

    ``before`` is the best verdict that the agent got before, or None. The text of profile says whether the judged
    solution is slower than that one, or the best so far. In the style "compact", the text is one short line, such as a
    status, the first build error, or the speed-ups over eager PyTorch and ``torch.compile``."""
    if verdict.status == "build_error":
        return f"build error: {first_error(verdict.message) if style == 'compact' else verdict.message}"
    if command == "compile":
        return "compile: ok"
    if verdict.status != "ok":
        return f"{command}: {verdict.status}" + (f": {verdict.message}" if style == "full" and verdict.message else "")
    if command == "verify":
        return "verify: ok" if style == "compact" else f"verify: ok ({verdict.checks} checks passed)"
    if verdict.untimed:
        return f"profile: correct, not timed: {verdict.untimed}"
    text = f"profile: {_ratios(verdict)}"
    faster = before if before and merit(verdict) < merit(before) else None
    if style == "compact":
        return f"{text}, {'slower' if faster else 'best'}"
    text += f"\nslower than the best solution so far: {_ratios(faster)}" if faster else "\nthe best solution so far"
    if verdict.clock == "real":
        times = {"solution": verdict.seconds, "eager": verdict.eager_seconds, "torch.compile": verdict.compile_seconds}
        text += "\n" + "\n".join(f"{name}: {value * 1e6:.1f} us" for name, value in times.items() if value is not None)
    return text


def describe_restored(verdict: Verdict | None, style: Style) -> str:
    """Returns the text that the command restore prints. ``verdict`` is the verdict on the restored solution, or None if
    there is no correct solution."""
    if verdict is None:
        return "restore: no correct solution so far"
    ratios = _ratios(verdict)
    return "restore: ok" if style == "compact" or not ratios else f"restore: ok, the best solution so far: {ratios}"


def limiter(verdict: Verdict) -> tuple[str, float]:
    """Returns what limits a task according to ``verdict``, and the least time in seconds that follows from it.

    The limit is "memory" (the time to move all inputs and outputs) or "arithmetic" (the time to do the reference's
    counted operations: matrix products, convolutions and attention), the longer of the two at the device's peak rates.
    A time that is unknown counts as 0. Returns ("", 0.0) if the solution is not correct, if its time is unknown or
    simulated, or if both times are 0."""
    if verdict.status != "ok" or verdict.clock == "model" or not verdict.seconds:
        return "", 0.0
    least = {
        "memory": (verdict.bytes or 0) / (verdict.peak_bytes_per_second or math.inf),
        "arithmetic": (verdict.flops or 0) / (verdict.peak_flops or math.inf),
    }
    name, seconds = max(least.items(), key=lambda item: item[1])
    return (name, seconds) if seconds else ("", 0.0)


def standing(verdict: Verdict) -> str:
    """Returns one line that compares the solution's time with the roofline bound of the task (``limiter``), or "" if
    the bound is not known."""
    name, seconds = limiter(verdict)
    if not name or not verdict.seconds:
        return ""
    share = seconds / verdict.seconds
    return f"limit: {name}, {seconds * 1e6:.1f} us at the device's peak; the solution reaches {share:.0%} of it"


def failed(verdict: Verdict, command: str) -> bool:
    """Returns whether ``command`` fails (exits with 1) because of ``verdict``. The command compile fails only if the
    solution does not build. The commands verify and profile fail if the solution is not correct."""
    return verdict.status == "build_error" or (command != "compile" and verdict.status != "ok")


def first_error(message: str) -> str:
    """Returns the first error in a compiler's ``message`` as ``path:line: text``, or the message's first line if no
    error is found. The result has at most ``_COMPACT_MESSAGE`` characters."""
    if found := _COMPILER.search(message):
        message = f"{found[1]}:{found[2] or found[3]}: {found[4]}"
    return (message.splitlines() or [""])[0][:_COMPACT_MESSAGE]


def solution_of(files: Mapping[str, str], format: Format) -> Solution:
    """Returns the solution that is in a work folder with ``files`` (text by path). The solution consists of the files
    that belong to ``format``. Other files are left out."""
    return Solution(format, {path: text for path, text in files.items() if FORMATS[format].belongs(path)})


def _ratios(verdict: Verdict) -> str:
    against = {"eager": verdict.speedup_eager, "compile": verdict.speedup_compile}
    return " ".join(f"{_ratio(value)}x {name}" for name, value in against.items() if value is not None)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _tool(name: str, description: str, required: list[str], **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _list(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "object", "properties": properties, "required": required}}


def _bash(more: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    said = "Run a command in bash. The current folder and exported variables last from call to call; everything else "
    timeout = {"type": "number", "description": "seconds before it is killed"}
    known = {"command": _text("the command"), "timeout": timeout}
    return _tool("Bash", f"{said}that the command started ends with it{more}", ["command"], **known, **parameters)


_PATH = _text("path relative to the work folder")
_EDIT: dict[str, dict[str, Any]] = {
    "old_string": _text("text to replace; must occur exactly once unless replace_all is set"),
    "new_string": _text("text to put in its place"),
    "replace_all": {"type": "boolean", "description": "replace every occurrence"},
}
TOOLS = [
    _bash(
        ", unless run_in_background is set: then it goes on, for some minutes at most, and BashOutput tells what it "
        "has printed. There is no network. compile, verify, profile and restore are commands here, though not in "
        "the background.",
        run_in_background={"type": "boolean", "description": "do not wait for it"},
    ),
    _tool(
        "BashOutput", "What a background command has printed since it was asked last, and whether it still runs.",
        ["id"], id=_text("the id that Bash gave"),
    ),
    _tool("KillBash", "End a background command.", ["id"], id=_text("the id that Bash gave")),
    _tool(
        "Read", "Read a text file.", ["path"], path=_PATH,
        offset={"type": "integer", "description": "first line, from 1"},
        limit={"type": "integer", "description": "number of lines"},
    ),
    _tool(
        "Write", "Write a whole file. A file that exists must have been read first.", ["path", "content"],
        path=_PATH, content=_text("the whole content"),
    ),
    _tool(
        "Edit", "Replace text in a file that was read or written before.", ["path", "old_string", "new_string"],
        path=_PATH, **_EDIT,
    ),
    _tool(
        "MultiEdit", "Make several replacements in one file, in order: all of them or none.", ["path", "edits"],
        path=_PATH, edits=_list(["old_string", "new_string"], **_EDIT),
    ),
    _tool(
        "NotebookEdit", "Replace, insert or delete one cell of a Jupyter notebook that was read before.",
        ["path", "new_source"], path=_PATH, new_source=_text("the cell's new text"),
        cell_id=_text("the cell's id, or cell-0, cell-1, ...; a new cell comes after it, or first without it"),
        cell_type={"type": "string", "enum": ["code", "markdown"]},
        edit_mode={"type": "string", "enum": ["replace", "insert", "delete"]},
    ),
    _tool(
        "Glob", "List files by pattern, such as kernels/*.cpp or **/*.json.", ["pattern"],
        pattern=_text("the pattern"), path=_text("folder to start from"),
    ),
    _tool(
        "Grep", "Search files for an extended regular expression; prints path:line:text.", ["pattern"],
        pattern=_text("the expression"), path=_PATH, glob=_text("only files whose name matches"),
    ),
    _tool(
        "TodoWrite", "Note what is left to do; replaces the previous list.", ["todos"],
        todos=_list(
            ["content", "status"],
            content=_text("what to do"),
            status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
        ),
    ),
]  # fmt: skip
