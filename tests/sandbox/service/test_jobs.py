"""The service's queue as a data structure: order, joining, room, and what is forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.sandbox.protocol import ServiceError
from cuda_agent.sandbox.service.jobs import Job, Queue

OK = {"status": "ok"}


def put(queue: Queue, id: str, priority: int = 0, now: float = 0.0, place: str = "a", size: int = 1) -> Job:
    return queue.submit(id, "evaluate", place, priority, size, {"request": id}, now)[0]


def drained(queue: Queue) -> list[str]:
    """Ids in the order in which they are taken, each finished before the next is."""
    order = []
    while job := queue.take(0.0):
        order.append(job.id)
        queue.finish(job, 0.0, OK)
    return order


def test_higher_priorities_go_first_and_equals_in_their_order():
    queue = Queue({"a": 1})
    for id, priority in (("low1", 0), ("high1", 5), ("low2", 0), ("high2", 5), ("below", -1)):
        put(queue, id, priority)
    assert drained(queue) == ["high1", "high2", "low1", "low2", "below"]


def test_a_place_gets_no_more_than_it_can_use_and_another_place_is_not_held_up():
    queue = Queue({"a": 2, "b": 1})
    for id, place in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        put(queue, id, place=place)
    taken = [queue.take(0.0) for _ in range(4)]
    assert [job.id if job else None for job in taken] == ["a1", "a2", "b1", None]
    assert (queue.queued, queue.running) == (1, 3)
    assert taken[0] is not None
    queue.finish(taken[0], 1.0, OK)
    assert (job := queue.take(1.0)) is not None and job.id == "a3"


def test_the_same_content_joins_what_is_queued_or_running_or_judged():
    queue = Queue({"a": 1})
    first = put(queue, "x")
    assert put(queue, "x") is first and first.interest == 2
    assert queue.take(0.0) is first
    assert put(queue, "x") is first
    queue.finish(first, 1.0, OK)
    assert put(queue, "x") is first and queue.queued == 0


@pytest.mark.parametrize(
    ("result", "error"), [({"status": "infra"}, None), (None, {"kind": "task", "message": "no Model"})]
)
def test_what_is_no_verdict_is_tried_anew(result, error):
    queue = Queue({"a": 1})
    first = put(queue, "x")
    queue.take(0.0)
    queue.finish(first, 1.0, result, error)
    again = put(queue, "x", now=2.0)
    assert again is not first and again.state == "queued" and queue.find("x") is again


def test_a_more_urgent_submission_of_the_same_moves_it_up_and_keeps_its_turn():
    queue = Queue({"a": 1})
    for id in ("one", "two", "three"):
        put(queue, id)
    put(queue, "four", 5)
    three = put(queue, "three", 5)
    assert queue.position(three) == 0, "it came before four"
    put(queue, "three", -5)
    assert three.priority == 5
    assert drained(queue) == ["three", "four", "one", "two"]


def test_a_cancelled_job_is_never_taken_and_a_running_one_runs_on_without_a_result():
    queue = Queue({"a": 1})
    running, queued, other = put(queue, "running"), put(queue, "queued"), put(queue, "other")
    queue.take(0.0)
    queue.cancel(queued, 1.0)
    queue.cancel(queued, 1.0)
    queue.cancel(running, 1.0)
    assert (queued.state, running.state, queue.running) == ("cancelled", "running", 1)
    assert queue.take(1.0) is None, "the judge is still busy with it"
    queue.finish(running, 2.0, OK)
    assert (running.state, running.result) == ("cancelled", None)
    assert queue.take(2.0) is other


def test_who_asks_again_before_a_cancelled_evaluation_ends_gets_its_verdict():
    queue = Queue({"a": 1})
    job = put(queue, "x")
    queue.take(0.0)
    queue.cancel(job, 1.0)
    assert put(queue, "x") is job
    queue.finish(job, 2.0, OK)
    assert (job.state, job.result) == ("done", OK)


def test_one_of_two_who_asked_cannot_cancel_for_the_other():
    queue = Queue({"a": 1})
    job = put(queue, "x")
    put(queue, "x")
    queue.cancel(job, 1.0)
    assert job.state == "queued" and queue.take(1.0) is job


def test_a_full_queue_says_when_there_is_room_from_the_pace_of_the_last_jobs():
    queue = Queue({"a": 1}, most_jobs=2)
    put(queue, "x0")
    for number in range(1, 60):  # three seconds a job
        put(queue, f"x{number}")
        job = queue.take(3.0 * (number - 1))
        assert job is not None
        queue.finish(job, 3.0 * number, OK)
    put(queue, "last")
    waits = []
    for number in range(3):
        with pytest.raises(ServiceError) as full:
            put(queue, f"more{number}")
        waits.append(full.value.retry_after)
    assert waits == pytest.approx([3, 6, 9], rel=0.01), "each comes after those who were sent away before"
    job = queue.take(180.0)
    assert job is not None
    queue.finish(job, 183.0, OK)
    put(queue, "more0")


def test_bytes_are_bounded_too():
    queue = Queue({"a": 1}, most_bytes=10)
    put(queue, "x", size=8)
    with pytest.raises(ServiceError):
        put(queue, "y", size=3)
    queue.take(0.0)
    put(queue, "y", size=3)


def test_finished_jobs_are_forgotten_oldest_first_and_hold_no_request():
    queue = Queue({"a": 1}, kept=3)
    for number in range(6):
        job = put(queue, f"x{number}")
        queue.take(0.0)
        queue.finish(job, 0.0, OK)
        assert job.request is None
    assert [queue.find(f"x{number}") is not None for number in range(6)] == [False] * 3 + [True] * 3


def test_handing_back_fails_what_waits_and_leaves_what_runs():
    queue = Queue({"a": 1})
    running, queued = put(queue, "running"), put(queue, "queued")
    queue.take(0.0)
    queue.hand_back(1.0, "draining", "elsewhere")
    assert (running.state, queued.state) == ("running", "failed")
    assert queued.error == {"kind": "draining", "message": "elsewhere"} and queue.queued == 0


def test_every_change_of_a_job_is_told_once():
    seen = []
    queue = Queue({"a": 1}, changed=lambda job: seen.append((job.id, job.state)))
    job = put(queue, "x")
    put(queue, "x")
    queue.take(1.0)
    queue.finish(job, 2.0, OK)
    assert seen == [("x", "queued"), ("x", "running"), ("x", "done")]
    assert [event["event"] for event in job.events] == ["queued", "running", "done"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "take", "finish", "cancel"]),
        st.integers(0, 12),
        st.integers(-2, 2),
        st.sampled_from("ab"),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_no_job_is_lost_or_run_twice_whatever_happens(actions):
    """Against a list that is searched: the queue takes what is most urgent among the places that are free."""
    queue = Queue({"a": 2, "b": 1}, most_jobs=6, kept=1000)
    free = {"a": 2, "b": 1}
    waiting: list[Job] = []
    running: list[Job] = []
    for action, number, priority, place in actions:
        if action == "submit":
            place = "ab"[number % 2]
            try:
                job, new = queue.submit(str(number), "evaluate", place, priority, 1, None, 0.0)
            except ServiceError:
                assert len(waiting) == 6
                continue
            assert new == (job not in waiting and job not in running and job.state == "queued")
            if new:
                waiting.append(job)
        elif action == "take":
            able = [job for job in waiting if free[str(job.place)]]
            best = min(able, key=lambda job: -job.priority, default=None)
            taken = queue.take(0.0)
            assert taken is best
            if taken is not None:
                waiting.remove(taken)
                running.append(taken)
                free[str(taken.place)] -= 1
        elif action == "finish" and running:
            job = running.pop(number % len(running))
            free[str(job.place)] += 1
            queue.finish(job, 0.0, OK)
            assert job.over
        elif action == "cancel" and (job := queue.find(str(number))) is not None:
            queue.cancel(job, 0.0)
            waiting = [job for job in waiting if job.state == "queued"]
        assert (queue.queued, queue.running) == (len(waiting), len(running))
