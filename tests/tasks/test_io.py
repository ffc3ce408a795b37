"""Task sets on disk."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cuda_agent.errors import TaskError
from cuda_agent.tasks.io import import_tasks, read_any, read_ops6k, read_tasks, write_tasks
from cuda_agent.tasks.task import Task

CODE = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn({})]
def get_init_inputs():
    return []
"""


def task(name: str, size: int = 2) -> Task:
    return Task(name, CODE.format(size), ("torch.relu",), "torch#1", "teacher", "heldout")


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_written_tasks_read_back_equal(tmp_path):
    tasks = [task("a"), task("b", 3)]
    write_tasks(tmp_path / "set", tasks)
    assert read_tasks(tmp_path / "set") == tasks == read_any(tmp_path / "set")


def test_an_empty_set_reads_back_empty(tmp_path):
    write_tasks(tmp_path, [])
    assert read_tasks(tmp_path) == []


def test_names_must_be_unique(tmp_path):
    with pytest.raises(TaskError, match="not unique: a"):
        write_tasks(tmp_path, [task("a"), task("a", 3)])


@pytest.mark.parametrize("ops", [[["torch.relu"]], [json.dumps(["torch.relu"])], ["torch.relu"]])
def test_ops6k_takes_lists_and_json_lists(tmp_path, ops):
    path = parquet(tmp_path / "data.parquet", ops=ops, data_source=["torch#1"], code=[CODE.format(2)])
    (read,) = read_ops6k(path)
    assert (read.ops, read.data_source, read.name) == (("torch.relu",), "torch#1", "ops6k-0000")


def test_ops6k_refuses_ops_of_another_form(tmp_path):
    path = parquet(tmp_path / "data.parquet", ops=['{"a": 1}'], data_source=["torch#1"], code=["x"])
    with pytest.raises(TaskError, match="row 0: ops"):
        read_ops6k(path)


def test_kernelbench_levels_become_families_in_natural_order(tmp_path):
    for name in ("level1/10_b.py", "level1/2_a.py", "level2/1_c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CODE.format(4))
    tasks = read_any(tmp_path)
    assert [t.name for t in tasks] == ["level1/2_a", "level1/10_b", "level2/1_c"]
    assert [t.family for t in tasks] == ["level1", "level1", "level2"]
    assert {t.split for t in tasks} == {"heldout"} and tasks[0].ops == ("torch.relu",)
    assert [t.name for t in read_any(tmp_path / "level2")] == ["1_c"]


def clone(folder: Path) -> Path:
    """A clone of KernelBench: the levels lie in its folder KernelBench, beside other folders."""
    for size, name in enumerate(("level1/10_b", "level1/2_a", "level2/1_c"), start=2):
        path = folder / "KernelBench" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CODE.format(size))
    (folder / "src" / "kernelbench").mkdir(parents=True)
    (folder / "src" / "kernelbench" / "score.py").write_text("x = 1\n")
    return folder


def published(folder: Path) -> dict[int, list[dict[str, object]]]:
    """The rows of KernelBench's data set by level, as its script makes them: sorted by text."""
    return {
        level: [
            {"code": path.read_text(), "level": level, "name": path.stem, "problem_id": int(path.stem.split("_")[0])}
            for path in sorted((folder / "KernelBench" / f"level{level}").iterdir())
        ]
        for level in (1, 2)
    }


def test_a_clone_of_kernelbench_is_read_as_it_is(tmp_path):
    tasks = read_any(clone(tmp_path / "kb"))
    assert [t.name for t in tasks] == ["level1/2_a", "level1/10_b", "level2/1_c"]
    assert tasks == read_any(tmp_path / "kb" / "KernelBench")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_kernelbenchs_published_tables_hold_the_tasks_of_its_clone(tmp_path, form):
    tasks = read_any(clone(tmp_path / "kb"))
    data = tmp_path / "hf" / "data"
    data.mkdir(parents=True)
    for level, rows in published(tmp_path / "kb").items():
        path = data / f"level_{level}-00000-of-00001.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_any(tmp_path / "hf") == read_any(data) == tasks
    assert read_any(data / f"level_1-00000-of-00001.{form}") == tasks[:2]
    assert import_tasks(tmp_path / "hf", tmp_path / "set").tasks == tasks == read_tasks(tmp_path / "set")


def test_a_row_of_a_published_table_that_is_no_task_is_named_and_import_drops_it(tmp_path):
    rows = published(clone(tmp_path / "kb"))[1]
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | {"name": "11_d", "code": "x = 1"}]))
    with pytest.raises(TaskError, match=r"table\.jsonl: 11_d: not a task: no class Model"):
        read_any(path)
    imported = import_tasks(path, tmp_path / "set")
    assert [t.name for t in imported.tasks] == ["level1/2_a", "level1/10_b"] and len(imported.dropped) == 1
    path.write_text(json.dumps(rows[0] | {"level": "one"}) + "\n")
    with pytest.raises(TaskError, match="row 0: level holds no number"):
        read_any(path)
    path.write_text("{'code': ")
    with pytest.raises(TaskError, match="not a file of JSON lines"):
        read_any(path)


def test_several_tables_that_are_not_kernelbenchs_are_not_read_together(tmp_path):
    for name in ("a", "b"):
        parquet(tmp_path / f"{name}.parquet", ops=[["torch.relu"]], data_source=["x"], code=[CODE.format(2)])
    with pytest.raises(TaskError, match="no task files"):
        read_any(tmp_path)


def test_import_recomputes_ops_and_drops_copies(tmp_path):
    path = parquet(
        tmp_path / "data.parquet",
        ops=[["nn.Linear"], ["nn.Linear"], ["torch.relu"]],
        data_source=["torch#1"] * 3,
        code=[CODE.format(2), CODE.format(2), "no task"],
    )
    imported = import_tasks(path, tmp_path / "out")
    assert [t.ops for t in imported.tasks] == [("torch.relu",)]
    assert read_tasks(tmp_path / "out") == imported.tasks and imported.copies == 1
    assert [line.split(":")[0] for line in imported.dropped] == ["ops6k-0002"]


def test_import_of_a_folder_drops_and_names_files_that_are_no_task(tmp_path):
    source = tmp_path / "ts"
    source.mkdir()
    (source / "helper.py").write_text("x = 1\n")
    (source / "latin.py").write_bytes(b"# \xff\n")
    with pytest.raises(TaskError, match=r"holds no task with Model.* \(.*helper\.py: not a task: no class Model"):
        import_tasks(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (source / "relu.py").write_text(CODE.format(2))
    (source / "same.py").write_text(CODE.format(2))
    imported = import_tasks(source, tmp_path / "out")
    assert [t.name for t in imported.tasks] == [t.name for t in read_tasks(tmp_path / "out")] == ["relu"]
    assert [Path(line.split(":")[0]).name for line in imported.dropped] == ["helper.py", "latin.py"]
    assert imported.copies == 1
    with pytest.raises(TaskError, match=r"helper\.py: not a task"):
        read_any(source)  # as benchmark and `tasks show` do


def test_import_of_one_file(tmp_path):
    (tmp_path / "model.py").write_text(CODE.format(2))
    assert [t.name for t in import_tasks(tmp_path / "model.py", tmp_path / "out").tasks] == ["model"]


def test_a_set_that_cannot_be_written_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "tasks.parquet").mkdir(parents=True)
    for folder in (Path("/proc/x"), tmp_path / "file", tmp_path / "taken"):
        with pytest.raises(TaskError, match=f"^{folder}: cannot be written: "):
            write_tasks(folder, [task("a")])


def test_what_cannot_be_read_is_said_plainly(tmp_path):
    (tmp_path / "text.parquet").write_text("hello")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "empty").mkdir()
    small = parquet(tmp_path / "small.parquet", code=["x"])
    for source, message in [
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path / "text.parquet", "not a parquet file"),
        (tmp_path / "broken.py", "line 1: syntax error"),
        (tmp_path / "empty", "no task files"),
        (small, "no column ops, data_source; it has code"),
    ]:
        with pytest.raises(TaskError, match=message):
            import_tasks(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("column", ["code", "ops", "data_source"])
def test_a_row_with_an_empty_cell_is_named(tmp_path, column):
    good = {"ops": ["relu"], "data_source": "here", "code": "x", "name": "a", "family": "f", "split": "train"}
    pq.write_table(pa.Table.from_pylist([good, good | {column: None}]), tmp_path / "tasks.parquet")
    for read in (read_tasks, read_ops6k):
        with pytest.raises(TaskError, match=f"row 1: {column} holds no text"):
            read(tmp_path / "tasks.parquet")
