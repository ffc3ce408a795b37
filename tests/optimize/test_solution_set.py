"""Sets of solutions of others: every form becomes records with their tasks, and nothing is lost."""

import json

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.optimize.evaluation import LARGEST
from cuda_agent.optimize.solution_set import read_set
from cuda_agent.tasks.task import Task

MODEL = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + {}
def get_inputs():
    return [torch.randn(8)]
def get_init_inputs():
    return []
"""
TASKS = [
    Task("level1/1_Square", MODEL.format(1), family="level1"),
    Task("level1/19_ReLU", MODEL.format(2), family="level1"),
    Task("level2/1_Conv", MODEL.format(3), family="level2"),
    Task("softmax", MODEL.format(4)),
]
NEW = "class ModelNew: pass\n"


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(source, tasks=TASKS, format="python"):
    return read_set(source, tasks, format)


def tasks_of(found):
    return [(one.name, one.task.name if one.task else one.why) for one in found.records]


def write(folder, *names, text=NEW):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_records_with_level_and_number_find_their_tasks_and_keep_their_claims(tmp_path):
    row = {"level_id": 1, "task_id": 19, "custom_code": NEW, "score_default": 2.75, "score_torch_compile_default": 1.5}
    found = read(lines(tmp_path / "h100.json", row, row | {"level_id": 2, "task_id": 1, "score_default": None}))
    assert found.name == "h100" and tasks_of(found) == [("level1/19", "level1/19_ReLU"), ("level2/1", "level2/1_Conv")]
    first, second = found.records
    assert first.solution.files == {"model_new.py": NEW} and (first.claim_eager, first.claim_compile) == (2.75, 1.5)
    assert second.claim_eager is None


def test_every_record_that_cannot_be_judged_says_why(tmp_path):
    row = {"level_id": 1, "task_id": 19, "custom_code": NEW}
    found = read(
        lines(
            tmp_path / "set.jsonl",
            row | {"custom_code": None},
            row | {"custom_code": "None"},
            '{"level_id": 1,',
            "[1]",
            row | {"task_id": 77},
            row | {"custom_code": "x" * (LARGEST + 1)},
            row | {"custom_code": "\ud800"},
            {"custom_code": NEW},
            "",
            row,
        )
    )
    why = [
        "no_solution",
        "no_solution",
        "unreadable",
        "unreadable",
        "no_task",
        "unreadable",
        "unreadable",
        "no_task",
        "",
    ]
    assert [one.why for one in found.records] == why
    assert (
        found.records[2].name == "line 3" and "no task of the set fits level 1, number 77" in found.records[4].message
    )
    assert all(one.message for one in found.records[:-1]) and found.records[-1].solution


def test_a_solution_of_another_format_is_told_which_one_fits(tmp_path):
    row = {"level_id": 1, "task_id": 19, "files": {"plan.json": "{}", "kernels/k.cu": ""}}
    (found,) = read(lines(tmp_path / "set.jsonl", row)).records
    assert found.why == "unreadable" and "sandbox.format=plan judges plan.json" in found.message


def test_a_line_that_is_no_utf8_is_one_record(tmp_path):
    (tmp_path / "set.jsonl").write_bytes(b'{"task": "\xff"}\n' + json.dumps({"task": "softmax", "code": NEW}).encode())
    assert [one.why for one in read(tmp_path / "set.jsonl").records] == ["unreadable", ""]


def test_json_may_be_a_list_or_lists_by_level_and_name_tasks(tmp_path):
    path = tmp_path / "set.json"
    path.write_text(
        json.dumps([{"task": "level1/19_ReLU.py", "code": NEW}, {"problem_name": "softmax", "kernel": NEW}])
    )
    assert tasks_of(read(path)) == [("level1/19_ReLU", "level1/19_ReLU"), ("softmax", "softmax")]
    path.write_text(json.dumps({"1": [{"task_id": 1, "custom_code": NEW}], "2": [{"task_id": 1, "custom_code": NEW}]}))
    assert tasks_of(read(path)) == [("level1/1", "level1/1_Square"), ("level2/1", "level2/1_Conv")]


def test_samples_have_names_of_their_own(tmp_path):
    row = {"level": 1, "problem_id": 19, "code": NEW}
    found = read(lines(tmp_path / "s.jsonl", row | {"sample_id": 0}, row | {"sample_id": 1}, row, row))
    assert [one.name for one in found.records] == [
        "level1/19, sample 0", "level1/19, sample 1", "level1/19", "level1/19 (2)",
    ]  # fmt: skip


def test_files_of_a_kernelbench_run_find_their_tasks(tmp_path):
    names = [
        f"level_{level}_problem_{n}_sample_{s}_kernel" for level, n, s in ((1, 19, 0), (1, 19, 1), (2, 1, 0), (3, 1, 0))
    ]
    write(tmp_path / "runs" / "mine", *(f"{name}.py" for name in names), "eval_results.json")
    found = read(tmp_path / "runs")
    assert [task for _, task in tasks_of(found)] == ["level1/19_ReLU", "level1/19_ReLU", "level2/1_Conv", "no_task"]
    assert found.skipped == ["mine/eval_results.json"]


def test_folders_of_levels_and_of_tasks_find_their_tasks(tmp_path):
    write(
        tmp_path, "level1/1_Square.py", "level1/19_OtherName.py", "level2/1_Conv/model_new.py",
        "softmax/0.py", "softmax/1.py", "softmax/sample_2/model_new.py", "nothing/1.py", "level2/19_ReLU.py",
        "__pycache__/1_Square.py",
    )  # fmt: skip
    assert tasks_of(read(tmp_path)) == [
        ("level1/1_Square", "level1/1_Square"),
        ("level1/19_OtherName", "level1/19_ReLU"),
        ("level2/19_ReLU", "no_task"),  # a task of this name is in another level
        ("level2/1_Conv", "level2/1_Conv"),
        ("nothing/1", "no_task"),  # a sample's number is no task's number
        ("softmax/0", "softmax"),
        ("softmax/1", "softmax"),
        ("softmax/sample_2", "softmax"),
    ]


def test_a_folder_of_plans_is_read_whole(tmp_path):
    write(tmp_path, "softmax/plan.json", "softmax/kernels/a.cpp", "softmax/notes.txt", text="x")
    (record,) = read(tmp_path, format="plan").records
    assert sorted(record.solution.files) == ["kernels/a.cpp", "plan.json"] and record.task.name == "softmax"


def test_links_and_files_of_another_encoding_are_unreadable(tmp_path):
    (tmp_path / "secret").write_text(NEW)
    folder = write(tmp_path / "set", "softmax/model_new.py")
    (folder / "level1").mkdir()
    (folder / "level1" / "1_Square.py").symlink_to(tmp_path / "secret")
    (folder / "level1" / "19_ReLU.py").write_bytes(b"# \xff\n")
    (folder / "linked").symlink_to(tmp_path)
    found = read(folder)
    assert {one.name: one.why for one in found.records} == {
        "level1/1_Square": "unreadable", "level1/19_ReLU": "unreadable", "linked": "unreadable", "softmax": "",
    }  # fmt: skip


def test_without_tasks_each_record_brings_its_own(tmp_path):
    row = {"level_id": 1, "task_id": 19, "custom_code": NEW, "ref_code": MODEL.format(1)}
    found = read(
        lines(
            tmp_path / "set.jsonl", row, row, row | {"custom_code": None, "ref_code": MODEL.format(2)},
            row | {"ref_code": "x = 1"}, row | {"ref_code": None},
        ),
        tasks=None,
    )  # fmt: skip
    assert [one.why for one in found.records] == ["", "", "no_solution", "no_task", "no_task"]
    first, again, other = found.tasks[0], found.records[1].task, found.tasks[1]
    assert first.name == "level1/19" and again is first and len(found.tasks) == 2 and other.name != first.name
    assert first.family == "level1" and first.ops[0] == "torch.relu" and "no class Model" in found.records[3].message


def test_a_record_that_was_written_for_another_version_of_its_task_is_marked(tmp_path):
    row = {"level_id": 1, "task_id": 19, "custom_code": NEW, "ref_code": MODEL.format(2) + "\n"}
    found = read(lines(tmp_path / "set.jsonl", row, row | {"ref_code": MODEL.format(99)}))
    assert [one.other_reference for one in found.records] == [False, True]


@pytest.mark.parametrize("name", ["nowhere", "empty", "empty.json"])
def test_a_source_without_records_is_one_clear_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(TaskError, match="no such file" if name == "nowhere" else "holds no solution"):
        read(tmp_path / name)


def test_a_file_of_another_kind_is_one_clear_error(tmp_path):
    (tmp_path / "model_new.py").write_text(NEW * 3)
    with pytest.raises(TaskError, match="neither JSON nor JSON lines: line 1: "):
        read(tmp_path / "model_new.py")
