"""The choice of tasks by level and name."""

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.tasks.select import is_kernelbench, level_of, select
from cuda_agent.tasks.task import Task


def tasks(*names: str) -> list[Task]:
    return [Task(name, "", family=name.partition("/")[0]) for name in names]


KERNELBENCH = tasks("level1/1_Square", "level1/19_ReLU", "level2/19_Conv2d_ReLU", "level3/4_LeNet5")


@pytest.mark.parametrize(
    ("levels", "only", "found"),
    [
        ([], [], [0, 1, 2, 3]),
        ([1, 3], [], [0, 1, 3]),
        ([], ["19"], [1, 2]),
        ([1], ["19"], [1]),
        ([], ["level1/19_ReLU"], [1]),
        ([], ["4_LeNet5", "1"], [0, 3]),
        ([], ["*ReLU*"], [1, 2]),
        ([], ["level2/*"], [2]),
    ],
)
def test_tasks_are_chosen_by_level_name_number_and_pattern(levels, only, found):
    assert select(KERNELBENCH, levels, only) == [KERNELBENCH[i] for i in found]


@pytest.mark.parametrize(
    ("levels", "only", "said"),
    [
        ([7], [], "no task of level 7, only of 1, 2, 3"),
        ([], ["4_LeNet"], r"no task 4_LeNet; did you mean 4_LeNet5\?"),
        ([1], ["4"], "no task 4"),
        ([], ["*nothing*"], r"no task \*nothing\*"),
    ],
)
def test_what_fits_no_task_is_an_error(levels, only, said):
    with pytest.raises(TaskError, match=said):
        select(KERNELBENCH, levels, only)
    with pytest.raises(TaskError, match="no task of level 1, of any"):
        select(tasks("relu_sum-0001"), [1])


def test_kernelbenchs_tasks_are_known_by_level_or_family():
    assert [level_of(task) for task in KERNELBENCH] == [1, 1, 2, 3]
    assert level_of(Task("1_a", "", family="level12")) == 12 and level_of(Task("levels/1", "")) is None
    assert is_kernelbench([*KERNELBENCH, Task("relu", "", family="kernelbench")])
    assert not is_kernelbench([*KERNELBENCH, Task("relu", "", family="ops6k")])
