"""A search in several processes over one store, in the real sandbox, with a scripted server and real HTTP."""

import asyncio
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import call, serve, turn_of
from optimizing import DONE, KERNEL, MODEL, PROFILE, SANDBOX, TERMS, WRITE, Run, plan

from cuda_agent.agent.progress import Event, factor, read_events
from cuda_agent.cluster.pod import PodEnvironment
from cuda_agent.errors import ConfigError, TryAgain
from cuda_agent.optimize import fan_out, search_pods
from cuda_agent.optimize.folder import OptimizeError, SearchOrder
from cuda_agent.optimize.shared_archive import Archive, SharedArchive, merged
from cuda_agent.storage import open_store

ROOT = Path(__file__).parents[2]
KEY = "sk-the-key-of-the-models-server"


def script(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Each attempt writes another solution, which depends on its number alone; a later one begins with a change."""
    number, turn = request.get("seed", 0) // 100_000, turn_of(request)
    write = {
        "calls": [
            call("Write", path="kernels/fused.cpp", content=f"// of attempt {number}\n{KERNEL}"),
            call("Write", path="plan.json", content=plan(2 * number)),
        ]
    }
    change = {"calls": [call("Read", path="kernels/fused.cpp"), call("Read", path="plan.json"), *write["calls"]]}
    steps = [[write if number <= 2 else change], [PROFILE], DONE][min(turn, 2)]
    return [*steps, {"usage": (1000, 50)}]


class FanOut:
    """A search over a store in a folder, of which each step is a process, as each is a pod on a cluster."""

    def __init__(self, folder: Path, cache: Path, url: str, name: str = "s", **changes: Any) -> None:
        terms = {name: value for name, value in changes.items() if name in TERMS.__dataclass_fields__}
        rest = {name: value for name, value in changes.items() if name not in terms}
        self.order = SearchOrder(url, "scripted", terms=dataclasses.replace(TERMS, **terms), **rest)
        self.name, self.cache, self.url = name, cache, url
        self.here = PodEnvironment(
            str(folder / "store"), "off", folder / "order.json", folder / "plan", folder / "work", folder / "message"
        )
        self.archive = SharedArchive(open_store(self.here.store), name)

    def prepare(self, code: str = MODEL, changed: str = "") -> dict[str, str]:
        text = fan_out.packed(self.order, SANDBOX.model_dump(mode="json"), "model", code)
        self.here.config.write_text(text + changed)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return search_pods.prepare(self.here, self.name, sha256, "w", None, [])

    def start(self, what: str, player: int = 0) -> subprocess.Popen[str]:
        here = ", ".join(f"Path({str(path)!r})" for path in (self.here.config, self.here.plan, self.here.work))
        code = (
            "import sys; from pathlib import Path; from cuda_agent.cluster.pod import PodEnvironment\n"
            "from cuda_agent.errors import UserError; from cuda_agent.optimize.search_pods import search\n"
            f"here = PodEnvironment({self.here.store!r}, 'off', {here})\n"
            "try:\n"
            f"    search(here, {self.name!r}, {what!r}, {player})\n"
            "except UserError as error:\n"
            "    print(error, file=sys.stderr); sys.exit(error.exit_code)"
        )
        variables = {"CUDA_AGENT_HOME": str(self.cache.parent), "PYTHONPATH": str(ROOT)}
        variables |= {fan_out.SERVER_VARIABLE: self.url, fan_out.KEY_VARIABLE: KEY}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", code], env=os.environ | variables, **pipes)

    def step(self, what: str) -> str:
        return said(self.start(what))

    def published(self, number: int) -> list[Event]:
        return self.archive.read().transcripts.get(number, [])

    @property
    def result(self) -> dict[str, bytes]:
        prefix = self.archive.key("result")
        keys = self.archive.store.list(prefix)
        return {key.removeprefix(f"{prefix}/"): self.archive.store.get(key) for key in keys}


def said(process: subprocess.Popen[str]) -> str:
    """Waits until a step has ended well, and returns its output."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    return out


def written(archive: Archive) -> dict[int, set[str]]:
    """Returns attempt -> digests of the correct solutions that it found."""
    found: dict[int, set[str]] = {}
    for digest, find in archive.findings.by_digest.items():
        found.setdefault(find.attempt, set()).add(digest)
    return found


def parents(archive):
    """The numbers of the attempts that started from a solution."""
    return {number for number, state in archive.states.items() if state.parent}


def test_two_players_in_processes_find_what_one_process_finds(run: Run, tmp_path: Path, cache: Path) -> None:
    alone = run(script, attempts=4, target=1000.0)
    events = read_events(run.folder / "out" / "transcript.jsonl")
    here = Archive.of({0: events})
    with serve(script) as served:
        there = FanOut(tmp_path, cache, served.url, attempts=4, target=1000.0)
        assert json.loads(there.prepare()["players"]) == [0, 1]
        there.step("begin")
        assert all("answer" in said(process) for process in [there.start("player", one) for one in (0, 1)])
        there.step("end")
    archive = there.archive.read()
    assert written(archive) == written(here) and set(written(archive)) == {1, 2, 3, 4}
    assert parents(archive) == parents(here) == {3, 4}
    assert json.loads(there.result["transcript.jsonl"].decode().splitlines()[0])["kind"] == "begin"
    assert {name.split("/")[0] for name in there.result} == {
        "model.py", "model_new.py", "report.html", "solution", "transcript.jsonl", "verdict.json",
    }  # fmt: skip
    found = json.loads(there.result["verdict.json"])
    assert found["mode"] == "strict" and alone.best is not None and alone.best.strict is not None
    assert there.result["solution/plan.json"].decode() == alone.best.solution.files["plan.json"]
    outcome = json.loads(there.result["transcript.jsonl"].decode().splitlines()[-1])
    assert outcome["kind"] == "outcome" and outcome["factor"] == factor(alone.best.strict)
    assert {name: outcome["spent"][name] for name in ("prompt", "sampled")} == {
        name: alone.spent[name] for name in ("prompt", "sampled")
    }
    assert f"Bearer {KEY}" in {headers.get("Authorization") for headers in served.headers}
    store = there.archive.store
    assert not [key for key in store.list("") if KEY.encode() in store.get(key)], "the key is in no object"


def test_a_killed_player_goes_on_from_its_last_whole_turn(tmp_path: Path, cache: Path) -> None:
    killed, asked = threading.Event(), list[tuple[int, int]]()

    def held(request: dict[str, Any]) -> list[dict[str, Any]]:
        number, turn = request.get("seed", 0) // 100_000, turn_of(request)
        asked.append((number, turn))
        if (number, turn) == (4, 1) and not killed.is_set():
            killed.wait(120)
        return script(request)

    with serve(held) as served:
        there = FanOut(tmp_path, cache, served.url, attempts=4, target=1000.0)
        there.prepare()
        there.step("begin")
        player = there.start("player", 1)
        deadline = time.monotonic() + 120
        while (4, 1) not in asked:
            assert player.poll() is None and time.monotonic() < deadline, player.communicate()
            time.sleep(0.05)
        player.kill()
        player.communicate()
        killed.set()
        before = there.archive.read()
        assert before.ended(2) == "answer" and before.ended(4) == "" and before.states[4].turn == 1
        said(there.start("player", 1))
        said(there.start("player", 0))
        there.step("end")
    assert asked.count((2, 0)) == 1, "an attempt that is done is not played again"
    assert asked.count((4, 0)) == 1 and asked.count((4, 1)) == 2, "only the turn under way is lost"
    assert set(written(there.archive.read())) == {1, 2, 3, 4}
    assert json.loads(there.result["verdict.json"])["mode"] == "strict"


def test_a_player_ends_when_another_one_reaches_the_target(tmp_path: Path, cache: Path) -> None:
    def one_of_two(request: dict[str, Any]) -> list[dict[str, Any]]:
        if request.get("seed", 0) // 100_000 == 2:
            return [[WRITE], [PROFILE]][min(turn_of(request), 1)]
        return [{"calls": [call("Bash", command=f"echo {turn_of(request)}")]}]

    with serve(one_of_two) as served:
        there = FanOut(tmp_path, cache, served.url, attempts=4, turns=100_000)
        there.prepare()
        there.step("begin")
        players = [there.start("player", one) for one in (0, 1)]
        assert [said(process).splitlines()[-1] for process in players] == ["target", "target"]
        archive = there.archive.read()
        assert (archive.ended(1), archive.ended(2)) == ("stopped", "target")
        there.step("end")
        assert json.loads(there.result["transcript.jsonl"].decode().splitlines()[-1])["why"] == "target"
        turns = served.turns()
        said(there.start("player", 0))
        assert served.turns() == turns, "a player that begins later plays nothing"


def test_a_resumed_search_whose_limit_is_used_up_ends_with_what_it_has_found(tmp_path: Path, cache: Path) -> None:
    with serve(script) as served:
        there = FanOut(tmp_path, cache, served.url, attempts=3, target=1000.0)
        there.prepare()
        there.step("begin")
        said(there.start("player", 0))
        turns = served.turns()
        there.order = dataclasses.replace(there.order, minutes=1e-4)
        there.prepare()
        there.step("begin")
        assert said(there.start("player", 1)).splitlines()[-1] == "minutes"
        there.step("end")
    assert served.turns() == turns and there.archive.read().ended(1) == "answer"
    assert json.loads(there.result["verdict.json"])["mode"] == "strict"
    assert json.loads(there.result["transcript.jsonl"].decode().splitlines()[-1])["why"] == "minutes"


def test_each_player_has_an_equal_part_of_tokens_and_money_and_all_of_the_time() -> None:
    def spent(number: int, prompt: int, seconds: float) -> list[Event]:
        used = {"prompt": prompt, "sampled": 10, "cost": prompt / 100, "seconds": seconds, "estimated": False}
        return [{"kind": "spent", "attempt": number, "at": seconds, **used}]

    order = SearchOrder("http://a/v1", "m", attempts=4, tokens=3000, minutes=2.0, money=50.0, price_in=1e4)
    archive = Archive.of({0: [], 1: spent(1, 600, 30.0), 2: spent(2, 100, 20.0), 3: spent(3, 200, 10.0)})
    budget = archive.budget(order, 3, 2, {})
    assert (budget.tokens, budget.seconds, budget.money) == (1500 - 610, 90.0, 25.0 - 6.0)
    assert (budget.prompt, budget.sampled) == (200, 10) and 10.0 <= budget.elapsed < 11.0
    assert budget.lacks(680, 0) == "" and budget.lacks(681, 0) == "tokens"
    assert archive.budget(order, 4, 2, {}).tokens == 1500 - 110 and archive.budget(order, 4, 2, {}).prompt == 0
    assert archive.budget(SearchOrder("http://a/v1", "m", minutes=None), 1, 1, {}).left is None
    total = [event for event in merged(archive.transcripts) if event["kind"] == "spent"][-1]
    assert (total["prompt"], total["sampled"], total["seconds"]) == (900, 30, 30.0)


@pytest.mark.parametrize(("attempts", "count"), [(1, 1), (3, 2), (8, 4)])
def test_a_resumed_search_divides_what_is_left_however_many_players_it_has(attempts: int, count: int) -> None:
    def archive(*prompts: int) -> Archive:
        used = {"sampled": 0, "estimated": False, "seconds": 1.0, "kind": "spent", "at": 1.0}
        facts = [
            {"attempt": number, "prompt": prompt, "cost": prompt / 100} for number, prompt in enumerate(prompts, 1)
        ]
        return Archive.of({one["attempt"]: [used | one] for one in facts})

    order = SearchOrder("http://a/v1", "m", attempts=attempts, tokens=1200, money=12.0, price_in=1e4)
    first = archive(1000)
    left = [first.budget(order, number, count, first.used()) for number in range(1, count + 1)]
    assert sum(budget.money - budget.prompt / 100 for budget in left) == pytest.approx(2.0)
    assert sum(budget.tokens - budget.prompt for budget in left) == pytest.approx(200, abs=count)
    later = archive(1000, *[200 // count] * (count - 1))
    rest = [later.budget(order, count + number, count, first.used()).tokens for number in (1, 2)]
    assert rest == pytest.approx([200 / count, 200 if count == 1 else 0], abs=1), "of the players 0 and 1"


def test_the_seconds_of_a_resumed_search_leave_out_the_pause(tmp_path: Path, cache: Path) -> None:
    with serve(script) as served:
        there = FanOut(tmp_path, cache, served.url, attempts=1, target=1000.0)
        there.prepare()
        there.step("begin")
        key = there.archive.key("facts.json")
        facts = json.loads(there.archive.store.get(key))
        there.archive.store.put(key, json.dumps(facts | {"began": facts["began"] - 1e6}).encode())  # stopped for days
        there.step("begin")
    assert time.time() - there.archive.facts()["began"] < 1000


def test_what_cannot_work_is_refused_before_a_player_begins(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fan_out.SERVER_VARIABLE, "http://127.0.0.1:9/v1")
    there = FanOut(tmp_path, cache, "http://elsewhere/v1", attempts=8, tokens=20_000)
    with pytest.raises(ConfigError, match="changed on its way"):
        there.prepare(changed=" ")
    there.prepare()
    with pytest.raises(ConfigError, match="for another problem"):
        there.prepare(MODEL + "\n")
    step = fan_out.step_of(there.archive, SANDBOX, cache, tmp_path, lambda event: None)
    assert (step.order.base_url, step.order.key_env) == ("http://127.0.0.1:9/v1", fan_out.KEY_VARIABLE)
    there.archive.store.put(there.archive.key("facts.json"), json.dumps({"began": time.time() - 60}).encode())
    assert 60 <= step.clock() < 65
    there.archive.store.delete(there.archive.key("facts.json"))
    assert 60 <= step.clock() < 65, "every event asks the clock, so it reads the store once"
    with pytest.raises(OptimizeError, match="with 4 players"):
        asyncio.run(fan_out.begin(step))
    there.here.config.unlink()
    with pytest.raises(TryAgain):
        search_pods.prepare(there.here, "s", "", "w", None, [])
    with pytest.raises(ConfigError, match="no search other"):
        search_pods.search(there.here, "other", "begin", 0)
    with pytest.raises(OptimizeError, match="larger than 900 kB"):
        fan_out.packed(there.order, {}, "model", "#" * (1 << 20))
