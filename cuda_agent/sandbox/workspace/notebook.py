"""Edits one cell of a Jupyter notebook (JSON in nbformat 4), for the agent's tool NotebookEdit. Reads and writes no
files."""

import json
from typing import Any

from cuda_agent.sandbox.wire import shallow
from cuda_agent.sandbox.workspace.files import ToolRefused

DEPTH = 50  # most nested levels of a notebook: one of some hundreds takes seconds to write
MODES = ("replace", "insert", "delete")
TYPES = ("code", "markdown")


def edited(text: str, new_source: str, cell_id: str | None, cell_type: str | None, edit_mode: str) -> str:
    """Returns the notebook ``text`` with one cell replaced, inserted or deleted.

    Args:
        text: The JSON of a notebook.
        new_source: The cell's new text. Ignored if ``edit_mode`` is ``delete``.
        cell_id: The id of the cell to replace or delete. If no cell has the id ``cell-3``, this id names the fourth
            cell. A new cell comes after the cell ``cell_id``, or at the beginning if ``cell_id`` is None.
        cell_type: ``code`` or ``markdown``. A new cell needs it. For a replaced cell, None keeps the cell's type.
        edit_mode: ``replace``, ``insert`` or ``delete``.

    Raises:
        ToolRefused: ``text`` is not a notebook, there is no such cell, or an argument is wrong."""
    if edit_mode not in MODES:
        raise ToolRefused(f"edit_mode must be one of {', '.join(MODES)}")
    if cell_type is not None and cell_type not in TYPES:
        raise ToolRefused(f"cell_type must be one of {', '.join(TYPES)}")
    notebook = _notebook(text)
    cells = notebook["cells"]
    if edit_mode == "insert":
        if cell_type is None:
            raise ToolRefused("a new cell needs cell_type")
        place = 0 if cell_id is None else _index(cells, cell_id) + 1
        cell = {"cell_type": cell_type, "metadata": {}}
        if (notebook.get("nbformat", 0), notebook.get("nbformat_minor", 0)) >= (4, 5):
            cell["id"] = _new_id(cells)
        cells.insert(place, _changed(cell, cell_type, new_source))
    elif cell_id is None:
        raise ToolRefused(f"{edit_mode} needs cell_id")
    elif edit_mode == "delete":
        del cells[_index(cells, cell_id)]
    else:
        cell = cells[_index(cells, cell_id)]
        _changed(cell, cell_type or cell.get("cell_type", "code"), new_source)
    return _written(notebook)


def _notebook(text: str) -> dict[str, Any]:
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        notebook = None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ToolRefused("the file is not a Jupyter notebook")
    if not all(type(notebook.get(name, 0)) is int for name in ("nbformat", "nbformat_minor")):
        raise ToolRefused("nbformat and nbformat_minor of the notebook must be integers")
    try:
        shallow(notebook, DEPTH)
    except ValueError:
        raise ToolRefused(f"the notebook has more than {DEPTH} nested levels") from None
    return notebook


def _written(notebook: dict[str, Any]) -> str:
    """Returns ``notebook`` as JSON text. Escapes non-ASCII characters only if UTF-8 cannot encode the notebook, because
    a string in it has a lone surrogate."""
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(notebook, indent=1)
    return text + "\n"


def _index(cells: list[dict[str, Any]], cell_id: str) -> int:
    for index, cell in enumerate(cells):
        if cell.get("id") == cell_id:
            return index
    number = cell_id.removeprefix("cell-")
    if cell_id != number and number.isdecimal() and len(number) < 9 and int(number) < len(cells):
        return int(number)
    raise ToolRefused(f"the notebook has no cell {cell_id[:40]!r}")


def _new_id(cells: list[dict[str, Any]]) -> str:
    taken = {cell.get("id") for cell in cells if isinstance(cell.get("id"), str)}
    return next(name for number in range(len(cells) + 1) if (name := f"new-{number}") not in taken)


def _changed(cell: dict[str, Any], cell_type: str, source: str) -> dict[str, Any]:
    """Sets the type and the source text of ``cell`` in place, and returns ``cell``. Removes the outputs of the previous
    source, and the fields that a cell of the new type cannot have. Keeps all other fields."""
    cell |= {"cell_type": cell_type, "source": source.splitlines(keepends=True)}
    if cell_type == "code":
        cell |= {"execution_count": None, "outputs": []}
        cell.pop("attachments", None)
    else:
        cell.pop("execution_count", None)
        cell.pop("outputs", None)
    return cell
