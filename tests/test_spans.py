"""Spans: a tree of intervals in a file, and nothing where no file is recorded."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cuda_agent import spans
from cuda_agent.spans import span

ROOT = "b7ad6b7169203331"


def read(path: Path) -> dict[str, dict]:
    """The spans of a file, by name."""
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def parents(path: Path) -> dict[str, str]:
    """Name of a span -> name of its parent."""
    found = read(path)
    names = {line["id"]: name for name, line in found.items()} | {ROOT: "root"}
    return {name: names[line["parent"]] for name, line in found.items()}


def test_spans_form_a_tree_whose_children_lie_inside_their_parents(tmp_path):
    file = tmp_path / "new" / "a.jsonl"
    with spans.recording(file, ROOT):
        with span("step", step=3) as facts:
            with span("play"):
                pass
            with span("learn"):
                pass
            facts["lost"] = 1
        spans.add("known", 5, 9, id="0" * 16, code=0)
    assert parents(file) == {"play": "step", "learn": "step", "step": "root", "known": "root"}
    found = read(file)
    assert found["step"]["attributes"] == {"step": 3, "lost": 1}
    times = [found[name][end] for name, end in (("step", "start"), ("play", "start"), ("play", "end"))]
    times += [found[name][end] for name, end in (("learn", "start"), ("learn", "end"), ("step", "end"))]
    assert times == sorted(times)
    assert found["known"] == {
        "id": "0" * 16, "parent": ROOT, "name": "known", "start": 5, "end": 9, "attributes": {"code": 0}
    }  # fmt: skip


def test_nothing_is_recorded_outside_of_a_recording(tmp_path):
    with spans.recording(tmp_path / "a.jsonl", ROOT):
        pass
    with span("late"):
        spans.add("later", 1, 2)
        spans.add_phases({"build": 1.0})
    assert (tmp_path / "a.jsonl").read_text() == ""


def test_an_exception_is_named_and_goes_on(tmp_path):
    with spans.recording(tmp_path / "a.jsonl", ROOT), pytest.raises(KeyError), span("step"):
        raise KeyError("x")
    assert read(tmp_path / "a.jsonl")["step"]["attributes"] == {"error": "KeyError"}


def test_a_function_is_measured_at_each_call(tmp_path):
    @span("work")
    def work(number):
        return number + 1

    with spans.recording(tmp_path / "a.jsonl", ROOT):
        assert [work(1), work(2)] == [2, 3]
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["work", "work"] and lines[0]["id"] != lines[1]["id"]


def test_tasks_and_threads_side_by_side_keep_their_own_parents(tmp_path):
    @span("thread")
    def in_a_thread():
        return None

    async def episode(name: str) -> None:
        with span(name):
            await asyncio.sleep(0)
            with span(f"turn of {name}"):
                await asyncio.sleep(0)
        if name == "a":
            await asyncio.to_thread(in_a_thread)

    async def play() -> None:
        with span("play"):
            await asyncio.gather(episode("a"), episode("b"))

    with spans.recording(tmp_path / "a.jsonl", ROOT):
        asyncio.run(play())
    found = parents(tmp_path / "a.jsonl")
    assert found == {"turn of a": "a", "turn of b": "b", "a": "play", "b": "play", "thread": "play", "play": "root"}


def test_a_full_file_keeps_only_the_roots_children(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "MOST", 3)
    with spans.recording(tmp_path / "a.jsonl", ROOT):
        for step in range(2):
            with span(f"step {step}"), span(f"play {step}"), span(f"turn {step}"):
                spans.add_phases({f"phase {step}": 0.0})
    assert parents(tmp_path / "a.jsonl") == {
        "turn 0": "play 0", "play 0": "step 0", "step 0": "root", "step 1": "root"
    }  # fmt: skip


def test_a_task_that_outlives_the_recording_is_not_disturbed(tmp_path):
    with spans.recording(tmp_path / "a.jsonl", ROOT):
        late = span("late")
        late.__enter__()
    late.__exit__(None, None, None)
    assert (tmp_path / "a.jsonl").read_text() == ""


def test_phases_follow_each_other_up_to_now(tmp_path):
    with spans.recording(tmp_path / "a.jsonl", ROOT), span("evaluate"):
        spans.add_phases({"build": 0.5, "check": 0.25})
    found = read(tmp_path / "a.jsonl")
    build, check = found["build"], found["check"]
    assert build["end"] - build["start"] == 500_000_000 and check["end"] - check["start"] == 250_000_000
    assert build["end"] == check["start"] and check["end"] <= found["evaluate"]["end"]
    assert parents(tmp_path / "a.jsonl")["build"] == "evaluate"


def test_opening_and_closing_are_measured_and_the_manager_sees_an_exception(tmp_path):
    seen = []

    @asynccontextmanager
    async def sandbox():
        try:
            yield "open"
        except ValueError:
            seen.append("ValueError")
            raise
        seen.append("closed")

    async def use(fail: bool) -> None:
        async with spans.opened("sandbox", sandbox()) as value:
            assert value == "open"
            with span("use"):
                pass
            if fail:
                raise ValueError

    with spans.recording(tmp_path / "a.jsonl", ROOT):
        asyncio.run(use(fail=False))
        with pytest.raises(ValueError):
            asyncio.run(use(fail=True))
    names = [json.loads(line)["name"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert names == ["open sandbox", "use", "close sandbox", "open sandbox", "use"]
    assert seen == ["closed", "ValueError"]
