"""A task set in place of new tasks (``synthesis.tasks``)."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_agent.config import Synthesis
from cuda_agent.errors import TaskError
from cuda_agent.tasks.io import write_tasks
from cuda_agent.tasks.task import Task
from tests.synthesis.test_synthesize import SMALL, InProcess, make


@pytest.fixture(scope="module")
def made() -> list[Task]:
    return make()[0]


def taken(folder: Path, given: list[Task], prober: InProcess | None = None, **limits: int):
    write_tasks(folder, given)
    config = Synthesis(tasks=str(folder), train=100, heldout=50, catalogue=50, max_candidates=1)
    return make(config.model_copy(update=limits), prober=prober)


def test_a_set_keeps_its_names_families_and_splits(tmp_path, made):
    tasks, card = taken(tmp_path, made)
    assert {(task.name, task.family, task.split) for task in tasks} == {
        (task.name, task.family, task.split) for task in made
    }
    assert card["writer"] == "given" and card["left_out"] == 0
    assert card["by_family_and_split"] == Counter(f"{task.family}/{task.split}" for task in made)


def test_every_task_goes_through_the_filters(tmp_path, made):
    broken = replace(made[0], name="broken", code=made[0].code.replace("return ", "return missing + "))
    copy = replace(made[0], name="copy")
    tasks, card = taken(tmp_path, [*made, broken, copy])
    assert {task.name for task in tasks} == {task.name for task in made}
    rows = {row["filter"]: row["dropped"] for row in card["yield"]["given"]}
    assert rows["runs in eager"] == 1 and rows["new bytes"] == 1 and card["left_out"] == 0


def test_limits_leave_tasks_out_and_the_card_counts_them(tmp_path, made):
    tasks, card = taken(tmp_path, made, train=2, heldout=3, catalogue=2)
    assert Counter(task.split for task in tasks) == {"train": 2, "heldout": 5}
    assert card["left_out"] == len(made) - 7


def test_of_a_set_without_a_split_combinations_of_operators_are_held_out(tmp_path, made):
    tasks, _ = taken(tmp_path, [replace(task, split="train", family="ops6k") for task in made], train=9, heldout=4)
    splits = {split: {task.ops for task in tasks if task.split == split} for split in ("train", "heldout")}
    assert splits["train"] and splits["heldout"] and not splits["train"] & splits["heldout"]
    assert {task.family for task in tasks} == {"ops6k"}
    again, _ = taken(tmp_path / "again", [replace(task, split="heldout") for task in made], train=9, heldout=4)
    assert {task.name for task in again if task.split == "train"} == {
        task.name for task in tasks if task.split == "train"
    }


def test_more_tasks_than_candidates_may_be_compiled(tmp_path, made):
    prober = InProcess()
    tasks, _ = taken(tmp_path, made, prober)
    assert len(tasks) == len(made) > SMALL.train and sum(compiled for _, compiled in prober.calls) == len(made)


def test_an_empty_set_is_not_replaced_by_new_tasks(tmp_path):
    tasks, card = taken(tmp_path, [])
    assert tasks == [] and card["writer"] == "given" and card["short"]


def test_a_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TaskError, match="nowhere"):
        make(Synthesis(tasks=str(tmp_path / "nowhere")))
