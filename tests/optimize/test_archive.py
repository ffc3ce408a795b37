"""Which solution an attempt of a search starts from."""

from collections import Counter
from dataclasses import replace

import pytest

from cuda_agent.agent.progress import Find
from cuda_agent.optimize.archive import beside, choose, weights
from cuda_agent.sandbox.wire import Solution, Verdict

OK = Verdict("ok", "plan", "quick", "cpu", "model", seconds=1.0)


def find(text: str, ratio: float, attempt: int = 1, strict: float | None = None) -> Find:
    solution = Solution("plan", {"k.cpp": text})
    careful = None if strict is None else replace(OK, mode="strict", eager_seconds=strict)
    return Find(solution, replace(OK, eager_seconds=ratio), attempt, 0, careful)


@pytest.mark.parametrize(("attempts", "first", "later"), [(1, 1, 1), (2, 1, 1), (3, 2, 2), (6, 2, 3), (64, 2, 4)])
def test_two_attempts_begin_from_nothing_and_four_from_solutions(attempts: int, first: int, later: int) -> None:
    assert (beside(attempts, False), beside(attempts, True)) == (first, later)
    finds = [find("a", 2.0)]
    begun = [""] * first + ["x"] * (attempts - first)
    starts = [choose(finds, begun[:number], first, 0, range(1, attempts)) for number in range(attempts)]
    assert starts == [None] * first + finds * (attempts - first)
    assert choose([], begun, first, 0, ()) is None


def test_an_attempt_starts_from_a_nearly_fastest_solution_wherever_it_was_found() -> None:
    finds = [find("a", 3.0, 1), find("b", 2.9, 2), find("c", 2.9, 3), find("d", 2.3, 4)]
    chosen = Counter(str(choose(finds, [""] * 4, 2, seed, ()).attempt) for seed in range(400))
    assert chosen["1"] > chosen["2"] > 60 and chosen["3"] > 60, "a few per cent are noise"
    assert chosen["4"] < 10, "a quarter slower"


def test_an_attempt_starts_from_nothing_after_four_that_gained_nothing() -> None:
    finds, begun = [find("a", 2.0, attempt=1)], ["", "", *["A"] * 4]
    begun = [finds[0].solution.digest if start else "" for start in begun]
    assert choose(finds, begun, 2, 0, ()) is None
    assert choose(finds, begun, 2, 0, [4]) is finds[0], "one of them may still gain something"
    finds.append(find("b", 1.9, attempt=4))
    assert choose(finds, begun, 2, 0, ()) is None, "a new solution that is slower is no gain"
    finds.append(find("c", 2.2, attempt=4))
    assert choose(finds, begun, 2, 0, ()) is not None


def test_the_more_attempts_gain_nothing_the_more_start_from_nothing() -> None:
    finds = [find("a", 2.0, attempt=1), find("b", 1.0, attempt=2)]
    begun = ["", ""]
    while len(begun) < 17:
        chosen = choose(finds, begun, 2, 0, ())
        begun.append(chosen.solution.digest if chosen else "")
    assert "".join("x" if start else "." for start in begun) == "..xxxx.xx.x.x.x.x"
    finds.append(find("c", 1.2, attempt=16))
    assert choose(finds, begun, 2, 0, ()) is None, "16 began from nothing and is slower than the fastest"
    finds.append(find("d", 2.5, attempt=16))
    assert choose(finds, begun, 2, 0, ()) is not None


def test_only_attempts_that_began_from_nothing_after_a_solution_failed_count() -> None:
    finds, start = [find("a", 2.0, attempt=1)], find("a", 2.0).solution.digest
    assert choose(finds, ["", "", "", "", *[start] * 4], 2, 0, ()) is None, "four places began from nothing"
    assert choose(finds, ["", "", *[start] * 4, None, None], 2, 0, ()) is None, "of two nothing is known"
    assert choose(finds, ["", "", *[start] * 4, "", start], 2, 0, ()) is not None


def test_a_gain_over_a_slow_start_counts() -> None:
    finds = [find("a", 2.0, attempt=1), find("b", 1.0, attempt=2), find("c", 1.5, attempt=6)]
    slow = finds[1].solution.digest
    assert choose(finds, ["", "", *[slow] * 4], 2, 0, ()) is not None
    assert choose(finds[:2], ["", "", *[slow] * 4], 2, 0, ()) is None


def test_new_and_little_used_solutions_weigh_more() -> None:
    text = "\n".join(f"line {n}" for n in range(10))
    fast, same, new = find(text, 3.0), find(text + "\nmore", 3.0), find("other\nwords", 2.9)
    first, second, third = weights([fast, same, new], [])
    assert first == 1.0 and second < third, "the second is nearly the first"
    used = weights([fast, same, new], [fast.solution.digest] * 2)
    assert used[0] == pytest.approx(first / 3) and used[1:] == [second, third]


def test_a_strict_verdict_replaces_the_quick_one_and_a_refused_solution_is_no_start() -> None:
    slow = find("a", 9.0, strict=1.9)
    refused = Find(Solution("plan", {"k.cpp": "b"}), replace(OK, eager_seconds=8.0), 1, 0, replace(OK, status="wrong"))
    better = find("c", 2.0)
    chosen = Counter(choose([slow, refused, better], [""], 1, seed, ()).solution.files["k.cpp"] for seed in range(200))
    assert chosen["c"] > chosen["a"] > 0 and "b" not in chosen


def test_equal_searches_choose_equally() -> None:
    finds = [find(str(n), 1.0 + n, 1 + n % 2) for n in range(6)]
    assert [choose(finds, [""] * 8, 2, 3, ()) for _ in range(3)] == [choose(finds[::-1], [""] * 8, 2, 3, ())] * 3
