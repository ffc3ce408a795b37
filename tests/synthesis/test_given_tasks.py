"""A task set in place of new tasks (``synthesis.tasks``)."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cuda_agent.config import Synthesis
from cuda_agent.errors import BadConfiguration, TaskError
from cuda_agent.stages.synthesis import check_splits
from cuda_agent.synthesis.card import refusals
from cuda_agent.synthesis.stream import read_given
from cuda_agent.tasks.io import write_tasks
from cuda_agent.tasks.task import Task
from tests.synthesis.test_synthesize import SMALL, InProcess, make


@pytest.fixture(scope="module")
def made() -> list[Task]:
    return make()[0]


class Slow(InProcess):
    """Counts the probes that run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    async def probe(self, task, compile=True):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        try:
            return await super().probe(task, compile)
        finally:
            self.running -= 1


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


def test_the_card_says_in_words_what_was_refused(tmp_path, made):
    broken = replace(made[0], code=made[0].code.replace("return ", "return missing + "))
    said = refusals(taken(tmp_path, [broken, replace(broken, name="again")])[1])
    assert said.startswith("new bytes: 1 of 2 candidates of given; runs in eager: 1 of 1 candidates of given; ")
    assert "missing" in said.split("most often: ")[1]
    assert refusals(taken(tmp_path / "none", [])[1]) == ""


def test_an_empty_set_is_not_replaced_by_new_tasks(tmp_path):
    tasks, card = taken(tmp_path, [])
    assert tasks == [] and card["writer"] == "given" and card["short"]


def test_a_set_without_a_held_out_task_is_refused_and_says_why(tmp_path, made):
    tasks, card = taken(tmp_path, [replace(task, split="train") for task in made], heldout=0, catalogue=0)
    assert tasks
    with pytest.raises(BadConfiguration, match=rf"no held-out task, and {len(tasks)} others\. No task was refused: "):
        check_splits(tasks, card)
    with pytest.raises(BadConfiguration, match=r"no training task, and 0 others.+there are too few"):
        check_splits(*taken(tmp_path / "none", []))
    broken = replace(made[0], code=made[0].code.replace("return ", "return missing + "))
    with pytest.raises(BadConfiguration, match=r"no training task, and 0 others.+runs in eager: 1 of 1 "):
        check_splits(*taken(tmp_path / "broken", [broken]))


def test_what_is_no_set_of_tasks_is_refused_before_a_task_runs(tmp_path, made):
    twice = [made[0], replace(made[1], name=made[0].name)]
    pq.write_table(pa.Table.from_pylist([vars(task) for task in twice]), tmp_path / "twice.parquet")
    with pytest.raises(TaskError, match="names are not unique"):
        read_given(tmp_path / "twice.parquet")
    write_tasks(tmp_path, [replace(made[0], split="test")])
    with pytest.raises(TaskError, match="expected the split train or heldout, got 'test'"):
        read_given(tmp_path)


def test_a_task_that_the_teacher_cannot_solve_is_not_of_its_family(tmp_path, made):
    ours = next(task for task in made if task.family == "teacher")
    edited = replace(ours, name="edited", code=ours.code.replace("torch.randn(", "2 * torch.randn("))
    write_tasks(tmp_path, [ours, edited])
    assert [task.family for task in read_given(tmp_path)] == ["teacher", "given"]


def test_training_tasks_are_probed_ahead_though_held_out_ones_have_their_operators(tmp_path, made):
    heldout = [replace(task, split="heldout", ops=("torch.relu",)) for task in made[:2]]
    train = [replace(task, split="train", ops=("torch.relu",)) for task in made[2:]]
    prober = Slow()
    taken(tmp_path, [*heldout, *train], prober)
    assert prober.most >= 3, "of them at the same time"


def test_a_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TaskError, match="nowhere"):
        make(Synthesis(tasks=str(tmp_path / "nowhere")))
