"""What the answers of all ranks come to."""

from concurrent.futures import Future

import pytest

from cuda_agent.training import distributed
from cuda_agent.training.distributed import TrainerLost, joint_results


def answers(*outcomes) -> list[Future]:
    """Futures with these results or exceptions; None never answers."""
    calls = []
    for outcome in outcomes:
        calls.append(Future())
        if isinstance(outcome, Exception):
            calls[-1].set_exception(outcome)
        elif outcome is not None:
            calls[-1].set_result(outcome)
    return calls


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 0.1)


def test_results_are_in_the_order_of_the_ranks():
    assert joint_results(answers("first", "second")) == ["first", "second"]


def test_an_error_of_all_ranks_is_raised_as_it_is():
    with pytest.raises(ValueError, match="first"):
        joint_results(answers(ValueError("first"), ValueError("second")))


@pytest.mark.parametrize("other", ["done", None], ids=["answers", "hangs"])
def test_a_rank_that_fails_alone_loses_the_trainer(other):
    with pytest.raises(TrainerLost, match="do not follow the others: alone"):
        joint_results(answers(other, ValueError("alone")))


def test_a_rank_that_is_gone_is_the_cause_also_where_another_failed_first(monkeypatch):
    with pytest.raises(TrainerLost, match="rank 1"):
        joint_results(answers(RuntimeError("connection closed by peer"), TrainerLost("rank 1 is gone")))
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 1e6)
    with pytest.raises(TrainerLost, match="its machine"):
        joint_results(answers(None, ConnectionError("its machine")), ConnectionError)
