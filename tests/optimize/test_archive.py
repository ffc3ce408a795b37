"""Which solution an attempt of a search starts from."""

from collections import Counter
from dataclasses import replace

import pytest

from cuda_agent.agent.progress import Find
from cuda_agent.optimize.archive import choose, island_of, islands, weights
from cuda_agent.sandbox.wire import Solution, Verdict

OK = Verdict("ok", "plan", "quick", "cpu", "model", seconds=1.0)


def find(text: str, ratio: float, attempt: int, strict: float | None = None) -> Find:
    solution = Solution("plan", {"k.cpp": text})
    careful = None if strict is None else replace(OK, mode="strict", eager_seconds=strict)
    return Find(solution, replace(OK, eager_seconds=ratio), attempt, 0, careful)


@pytest.mark.parametrize(("attempts", "count"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4), (64, 4)])
def test_islands_leave_attempts_that_start_from_others(attempts: int, count: int) -> None:
    assert islands(attempts) == count
    assert [island_of(number, count) for number in (1, count, count + 1)] == [0, count - 1, 0]


def test_the_first_attempt_of_an_island_starts_from_nothing() -> None:
    finds = [find("a", 2.0, 1)]
    assert choose(finds, {}, 2, 2, 0) is None and choose(finds, {}, 3, 2, 0) is finds[0]
    assert choose([], {}, 3, 2, 0) is None


def test_most_start_from_their_own_island_and_some_from_another() -> None:
    own, others = find("a", 1.0, 1), find("b", 9.0, 2)
    chosen = Counter(choose([own, others], {}, 3, 2, seed).attempt for seed in range(400))
    assert 280 < chosen[1] < 400 and chosen[2] > 20
    assert choose([others], {}, 3, 2, 0) is others, "its island has none"


def test_fast_new_and_little_used_solutions_weigh_more() -> None:
    text = "\n".join(f"line {n}" for n in range(10))
    fast, same, new = find(text, 3.0, 1), find(text + "\nmore", 2.9, 1), find("other\nwords", 2.8, 1)
    first, second, third = weights([fast, same, new], [])
    assert first == 1.0 and second < third, "the second is nearly the first"
    used = weights([fast, same, new], [fast.solution.digest] * 2)
    assert used[0] == pytest.approx(first / 3) and used[1:] == [second, third]


def test_a_strict_verdict_replaces_the_quick_one_and_a_refused_solution_is_no_start() -> None:
    slow = find("a", 9.0, 1, strict=1.0)
    refused = Find(Solution("plan", {"k.cpp": "b"}), replace(OK, eager_seconds=8.0), 1, 0, replace(OK, status="wrong"))
    better = find("c", 2.0, 1)
    chosen = Counter(choose([slow, refused, better], {}, 2, 1, seed).solution.files["k.cpp"] for seed in range(200))
    assert chosen["c"] > chosen["a"] > 0 and "b" not in chosen


def test_equal_searches_choose_equally() -> None:
    finds = [find(str(n), 1.0 + n, 1 + n % 2) for n in range(6)]
    assert [choose(finds, {}, 9, 2, 3) for _ in range(3)] == [choose(finds[::-1], {}, 9, 2, 3)] * 3
