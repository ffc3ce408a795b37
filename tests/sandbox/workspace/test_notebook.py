"""Edits of a notebook's cells, on text and through the work folder."""

import json

import pytest

from cuda_agent.sandbox.workspace.files import Folder, ToolRefused
from cuda_agent.sandbox.workspace.notebook import edited
from cuda_agent.sandbox.workspace.worker import checked

CELLS = [
    {"cell_type": "markdown", "id": "top", "metadata": {}, "source": ["# Title"]},
    {"cell_type": "code", "id": "run", "metadata": {"tags": ["x"]}, "source": ["a = 1\n", "a"],
     "execution_count": 3, "outputs": [{"output_type": "stream", "text": ["1"]}]},
]  # fmt: skip
NOTEBOOK = json.dumps({"cells": CELLS, "metadata": {"kernelspec": {}}, "nbformat": 4, "nbformat_minor": 5})


def cells(text):
    notebook = json.loads(text)
    assert notebook["metadata"] == {"kernelspec": {}} and notebook["nbformat"] == 4
    return notebook["cells"]


def test_a_replaced_code_cell_keeps_its_id_and_metadata_and_loses_its_outputs():
    first, second = cells(edited(NOTEBOOK, "b = 2\nb\n", "run", None, "replace"))
    assert first == CELLS[0]
    assert second == {
        "cell_type": "code", "id": "run", "metadata": {"tags": ["x"]}, "source": ["b = 2\n", "b\n"],
        "execution_count": None, "outputs": [],
    }  # fmt: skip


def test_a_code_cell_can_become_markdown():
    cell = cells(edited(NOTEBOOK, "text", "cell-1", "markdown", "replace"))[1]
    assert cell == {"cell_type": "markdown", "id": "run", "metadata": {"tags": ["x"]}, "source": ["text"]}


@pytest.mark.parametrize(("after", "place"), [(None, 0), ("top", 1), ("run", 2), ("cell-0", 1)])
def test_a_new_cell_comes_after_the_named_one_or_first(after, place):
    made = cells(edited(NOTEBOOK, "c", after, "code", "insert"))
    assert len(made) == 3 and made[place]["source"] == ["c"] and made[place]["outputs"] == []
    again = cells(edited(json.dumps(json.loads(NOTEBOOK) | {"cells": made}), "d", after, "markdown", "insert"))
    assert len({cell["id"] for cell in again}) == 4, "ids differ"


def test_a_notebook_of_an_older_format_gets_no_ids():
    old = json.dumps(json.loads(NOTEBOOK) | {"nbformat_minor": 4})
    assert "id" not in cells(edited(old, "c", None, "code", "insert"))[0]


def test_everything_else_of_the_notebook_stays():
    """Keys in their order, also ones that nbformat does not know, and embedded pictures of a text."""
    cell = {"cell_type": "markdown", "id": "a", "attachments": {"p.png": {}}, "own": 1, "metadata": {}, "source": []}
    text = json.dumps({"cells": [cell], "metadata": {}, "other": [1, None]})
    made = json.loads(edited(text, "x", "a", None, "replace"))
    assert list(made) == ["cells", "metadata", "other"] and made["cells"] == [cell | {"source": ["x"]}]
    assert "attachments" not in json.loads(edited(text, "x", "a", "code", "replace"))["cells"][0]


def test_text_that_is_no_valid_unicode_stays_escaped():
    text = json.dumps({"cells": [], "metadata": {"broken": "\ud800", "umlaut": "\u00fc"}})
    made = edited(text, "x", None, "code", "insert")
    made.encode()
    assert json.loads(made)["metadata"] == {"broken": "\ud800", "umlaut": "\u00fc"}


@pytest.mark.parametrize("depth", [60, 100_000])
def test_a_deeply_nested_notebook_is_refused_at_once(depth):
    text = f'{{"cells": [], "metadata": {"[" * depth}{"]" * depth}}}'
    with pytest.raises(ToolRefused, match=r"nested levels|not a Jupyter notebook"):
        edited(text, "x", None, "code", "insert")


def test_a_deleted_cell_is_gone():
    assert [cell["id"] for cell in cells(edited(NOTEBOOK, "", "top", None, "delete"))] == ["run"]


@pytest.mark.parametrize(
    ("text", "cell_id", "cell_type", "mode", "message"),
    [
        (NOTEBOOK, "run", None, "swap", "edit_mode must be"),
        (NOTEBOOK, "run", "raw", "replace", "cell_type must be"),
        (NOTEBOOK, None, None, "replace", "replace needs cell_id"),
        (NOTEBOOK, None, None, "delete", "delete needs cell_id"),
        (NOTEBOOK, None, None, "insert", "a new cell needs cell_type"),
        (NOTEBOOK, "cell-2", None, "delete", "has no cell 'cell-2'"),
        (NOTEBOOK, "0", None, "delete", "has no cell '0'"),
        (NOTEBOOK, "cell-\u00b2", None, "delete", "has no cell"),
        ("no json", "run", None, "replace", "not a Jupyter notebook"),
        ("[]", "run", None, "replace", "not a Jupyter notebook"),
        ('{"cells": [1]}', "run", None, "replace", "not a Jupyter notebook"),
        ('{"cells": [], "nbformat": "4"}', None, "code", "insert", "must be integers"),
    ],
)
def test_a_wrong_edit_is_refused_with_its_reason(text, cell_id, cell_type, mode, message):
    with pytest.raises(ToolRefused, match=message):
        edited(text, "new", cell_id, cell_type, mode)


def test_a_notebook_in_the_work_folder_must_have_been_read(tmp_path):
    (tmp_path / "work").mkdir()
    folder = Folder(str(tmp_path / "work"), {})
    folder.fill({"a.ipynb": NOTEBOOK})
    with pytest.raises(ToolRefused, match=r"read a\.ipynb first"):
        folder.change("a.ipynb", lambda text: edited(text, "x", "run", None, "replace"))
    folder.read("a.ipynb")
    assert folder.change("a.ipynb", lambda text: edited(text, "x", "run", None, "replace")) == "ok"
    assert cells(folder.read("a.ipynb"))[1]["source"] == ["x"]


def test_arguments_of_the_tool_are_texts():
    given = {"path": "a.ipynb", "new_source": "x", "cell_id": "run", "edit_mode": "delete"}
    assert checked("NotebookEdit", given) == given
    with pytest.raises(ToolRefused, match="cell_id must be text"):
        checked("NotebookEdit", given | {"cell_id": 3})
