"""Makes prompts, which show a task to a model. Parses the answers of models that have no tools.

A prompt has one of two styles. The style "full" is for general models, and states all rules. The style "compact" is for
a small model that is trained with compact prompts. A compact prompt consists of one word and the shortened source of
the task (``compact_source``). The word is "agent" if there are tools, and "answer" if there are none."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from cuda_agent import syntax
from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import Style
from cuda_agent.format_names import Format
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.tasks.inspect import is_docstring
from cuda_agent.tasks.task import Task

_FENCE = re.compile(r"^```(\w+) ([\w./-]+)\n(.*?)^```[ \t]*$", re.M | re.S)
_ANSWER_BYTES, _ANSWER_FILES = 1 << 20, 64

_ONE_SHOT = """You write fast kernels. Answer with the files of your solution, each in a fenced block whose first line
names language and path, like this:
{example}You have one answer and no tools.
"""
_AGENT = """You write fast kernels, working alone in a folder with tools. `model.py` is the problem and `SKILL.md` the
rules, which are repeated here. When you are done, answer without calling a tool: the files in the folder are then
judged.
"""


def one_shot_messages(task: Task, style: Style, format: Format = "plan", device: str = "cpu") -> list[dict[str, Any]]:
    if style == "compact":
        return _messages("answer", compact_source(task.code))
    example = "".join(f"```{language} {path}\n...\n```\n" for language, path in FORMATS[format].example)
    system = f"{_ONE_SHOT.format(example=example)}\n{skill_text(format, device)}"
    return _messages(system, f"```python model.py\n{task.code.rstrip()}\n```")


def agent_messages(task: Task, style: Style, format: Format = "plan", device: str = "cpu") -> list[dict[str, Any]]:
    if style == "compact":
        return _messages("agent", compact_source(task.code))
    user = f"Optimise the model in `model.py`:\n```python\n{task.code.rstrip()}\n```"
    return _messages(f"{_AGENT}\n{skill_text(format, device)}", user)


def parse_answer(text: str) -> dict[str, str]:
    """Returns the files (text by path) in the answer ``text``. A file is a fenced block whose first line names a
    language and a path. If several blocks have the same path, the last one counts.

    Ignores unclosed blocks, files that are too large or too many, and unsafe paths, such as "../a". Also ignores
    ``model.py`` and ``SKILL.md``, because a solution must not change the task and the rules."""
    files: dict[str, str] = {}
    for match in _FENCE.finditer(text[: 4 * _ANSWER_BYTES]):
        path, content = match[2], match[3]
        inside = not path.startswith("/") and ".." not in path.split("/") and path not in ("model.py", "SKILL.md")
        if inside and len(content) <= _ANSWER_BYTES and (path in files or len(files) < _ANSWER_FILES):
            files[path] = content
    return files


def write_answer(files: dict[str, str]) -> str:
    """Returns an answer with ``files`` as fenced blocks, in the form that ``parse_answer`` reads."""
    language = {"cpp": "cpp", "cu": "cuda", "json": "json", "py": "python"}
    return "\n".join(
        f"```{language.get(path.rpartition('.')[2], 'text')} {path}\n{text.rstrip()}\n```"
        for path, text in files.items()
    )


def compact_source(code: str) -> str:
    """Returns a shortened form of a task's source ``code``, which has fewer tokens. The form is for reading: it is not
    always valid Python.

    Leaves out imports, docstrings, comments, annotations, empty constructors, and the first line of the class
    ``Model``. Indents by one space per level. A ``get_inputs`` that only returns a value becomes ``inputs: [...]``.
    Source that cannot be parsed stays unchanged."""
    try:
        return "\n".join(_short_parts(_Shorten().visit(syntax.parse(code))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def _short_parts(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            yield from (_unparsed(item).replace("(self, ", "(", 1) for item in node.body)
        elif isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"):
            only = node.body[0] if len(node.body) == 1 else None
            if isinstance(only, ast.Return) and only.value is not None:
                if not (node.name == "get_init_inputs" and ast.unparse(only.value) in ("[]", "()")):
                    yield f"{node.name.removeprefix('get_')}: {ast.unparse(only.value)}"
            else:
                yield _unparsed(node)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield _unparsed(node)


class _Shorten(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        self.generic_visit(node)
        body = [item for item in _without_docstring(node.body) if not _calls_super(item)]
        if node.name == "__init__" and not body:
            return None
        node.body, node.returns = body or [ast.Pass()], None
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = _without_docstring(node.body) or [ast.Pass()]
        return node


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if body and is_docstring(body[0]) else body


def _calls_super(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and re.fullmatch(r"super\(.*?\)\.__init__\(\)", ast.unparse(node)) is not None


def _unparsed(node: ast.stmt) -> str:
    """Returns the source of ``node``, indented by one space per level. A function's source lacks the leading ``def``.

    The smaller indent does not change the text inside strings, because no string has more than one line:
    ``ast.unparse`` writes only docstrings on several lines, and docstrings were removed before."""
    text = re.sub(r"^(?: {4})+", lambda match: match[0][::4], ast.unparse(node), flags=re.M)
    return text.removeprefix("def ") if isinstance(node, ast.FunctionDef) else text


def _messages(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
