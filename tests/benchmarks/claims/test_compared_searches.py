"""The comparison of the search with one conversation and best-of-N: what counts, what is shared, and the figures."""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from cuda_agent.config import Config, PolicyConfig, SandboxConfig
from cuda_agent.policy.chat import Chat, written
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.model import new_policy, train_tokenizer
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.tasks.io import task_from_file
from cuda_agent.tasks.task import Task
from tests.optimize.problem import KERNEL, MODEL

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def search():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
        patch.delitem(sys.modules, "search", raising=False)
        yield importlib.import_module("search")
        sys.modules.pop("search", None)


def course(*speedups, once=None, sampled=100):
    found = [[10 * number, speedup, "ok" if speedup else "wrong"] for number, speedup in enumerate(speedups)]
    return {
        "found": found,
        "once": once,
        "prompt": 9,
        "sampled": sampled,
        "again": 0,
        "ended": {"answer": 2},
        "parents": [],
    }


def play(task, one, best, search, seed=0):
    return {"task": task, "seed": seed, "courses": {"one": one, "best-of-N": best, "search": search}}


def test_the_area_counts_wrong_solutions_as_nothing_and_keeps_the_last_best(search):
    assert search.best_so_far([0.0, 2.0, 1.0], 5) == [0.0, 2.0, 2.0, 2.0, 2.0]
    assert search.best_so_far([3.0, 9.0], 1) == [3.0], "no verdict after the budget counts"
    one = course(0.0, 1.0, 3.0, once=2)
    found = play("a", one, course(), course(2.0))
    areas = {method: search.area(found, method, 4) for method in search.METHODS}
    assert areas == {"one": 7 / 4, "once": 3 / 4, "best-of-N": 0.0, "search": 2.0}


def test_tasks_are_compared_in_pairs_and_seeds_are_averaged_first(search):
    plays = [
        play("a", course(1.0), course(1.0), course(1.0)), play("a", course(1.0), course(1.0), course(3.0), seed=1),
        play("b", course(4.0), course(2.0), course(4.0)), play("c", course(), course(), course()),
    ]  # fmt: skip
    found = search.compared(plays, 2)
    assert found["areas"] == {"one": 5 / 3, "once": 5 / 3, "best-of-N": 1.0, "search": 2.0}
    one, best = found["search"]["one"], found["search"]["best-of-N"]
    assert (one["means"], one["better"], one["equal"], one["tasks"]) == (1.2, 1, 2, 3)
    assert (best["means"], best["better"], best["equal"]) == (2.0, 2, 1)
    assert one["geometric"] == pytest.approx(2**0.5) and one["geometric_tasks"] == 2
    assert best["geometric"] == pytest.approx(2.0) and best["geometric_interval"] == pytest.approx([2.0, 2.0])
    low, high = one["means_interval"]
    assert low == 1.0 and 1.2 < high <= 2.0
    assert found["ceiling"] == (3 + 4 + 0) / 3 and "search 1.17" in search.table(found).split("ceiling")[1]
    assert "| one | 1.667 |" in search.table(found) and "1.20 (1.00 to" in search.table(found)


def test_results_of_several_runs_are_seen_as_one(search, tmp_path, monkeypatch, capsys):
    for name, speedup in (("x", 2.0), ("y", 4.0)):
        plays = [play("a", course(1.0), course(1.0), course(speedup))]
        (tmp_path / name).write_text(json.dumps({"budget": {"verdicts": 2}, "plays": plays}))
    files = [str(tmp_path / name) for name in ("x", "y")]
    monkeypatch.setattr(sys, "argv", ["search.py", "--combine", *files, "--json", str(tmp_path / "both")])
    search.main()
    found = json.loads((tmp_path / "both").read_text())
    assert set(found["tasks"]) == {"0/a", "1/a"}, "equal names of different runs are different tasks"
    assert found["search"]["one"]["means"] == 3.0


def test_an_interrupted_comparison_goes_on_with_the_missing_plays(search, tmp_path, monkeypatch, capsys):
    tasks = [Task(name, MODEL, ("torch.sqrt",), "torch#1", "teacher", "heldout") for name in ("a", "b")]
    manifest = SimpleNamespace(outputs={"tasks": "x", "policy": "y"})
    store = SimpleNamespace(get_folder=lambda digest, folder: folder.mkdir(parents=True))
    monkeypatch.setattr(search, "open_store", lambda uri: store)
    monkeypatch.setattr(search, "read_tasks", lambda folder: tasks)
    monkeypatch.setattr(search.runs, "find_run", lambda store, name: SimpleNamespace(config="c"))
    monkeypatch.setattr(search.runs, "read_config", lambda store, config: Config())
    stages = {"synthesis": manifest, "agentic": manifest}
    monkeypatch.setattr(search.runs, "run_manifests", lambda store, run, graph: stages)
    begun = []

    def play_first(plays, *_):
        begun.append([one.file.stem for one in plays])
        plays[0].file.write_text(json.dumps(play(plays[0].task.name, course(1.0), course(1.0), course(2.0))))

    monkeypatch.setattr(search, "play_all", play_first)
    command = ["search.py", "--work", str(tmp_path / "work"), "--json", str(tmp_path / "json")]
    for more, tasks_shown in (([], ["a"]), (["--finished"], ["a"]), ([], ["a", "b"])):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        search.main()
        assert list(json.loads((tmp_path / "json").read_text())["tasks"]) == tasks_shown
    assert begun == [["a-0", "b-0"], ["b-0"]] and "not played: b-0" in capsys.readouterr().err


def test_places_share_nothing_unless_there_are_too_few_processors(search):
    assert search.divided([0, 1, 2, 3, 4], 2, 2) == ([[0, 1], [2, 3]], [4])
    assert search.divided([0, 1], 1, 2) == ([[0, 1]], [])


def test_all_methods_play_a_task_within_the_budget_and_share_its_verdicts(search, tmp_path, monkeypatch):
    """A model writes another grid in every conversation, and then a wrong kernel."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "optimize"))
    from chat_server import serve, turn_of

    def script(request):
        grid, turn = 1 + request["seed"] // 100_000 % 7, turn_of(request)
        node = {"kernel": "kernels/fused.cpp", "function": "fused", "grid": grid,
                "args": ["in0", "out0", "in0.numel"]}  # fmt: skip
        files = {"plan.json": json.dumps({"nodes": [node]})}
        files |= {"kernels/fused.cpp": KERNEL} if turn == 0 else {"plan.json": files["plan.json"].replace("in0.n", "n")}
        calls = [{"name": "Write", "arguments": {"path": path, "content": text}} for path, text in files.items()]
        calls.append({"name": "Bash", "arguments": {"command": "profile"}})
        return [{"text": written("", calls) if turn < 2 else "done"}, {"usage": (50, 10)}]

    async def measured(url):
        judged = []
        async with LocalSandbox(config.sandbox, tmp_path / "cache") as sandbox:
            judge = sandbox._evaluate

            async def counted(task, solution, *rest):
                verdict = await judge(task, solution, *rest)
                judged.append(solution.digest)  # not if the method that asked is at its end
                return verdict

            monkeypatch.setattr(sandbox, "_evaluate", counted)
            play = search.Play(task_from_file(tmp_path / "model.py"), 0, tmp_path / "play.json")
            return await search.played(play, sandbox, url, config, options), judged

    (tmp_path / "model.py").write_text(MODEL)
    config = Config(sandbox=SandboxConfig(clock="model", memory_mb=600))
    options = SimpleNamespace(verdicts=5, tokens=100_000, turns=3)
    with serve(script) as server:
        found, judged = asyncio.run(measured(server.url))
    assert len(judged) == len(set(judged)), "a solution is judged once, although several methods find it"
    courses = found["courses"]
    assert {name: len(course["found"]) for name, course in courses.items()} == dict.fromkeys(search.PLAYED, 5)
    assert [status for _, _, status, _ in courses["one"]["found"]][:3] == ["ok", "build_error", "ok"]
    assert courses["one"]["once"] == 2 and courses["one"]["parents"] == courses["best-of-N"]["parents"] == []
    assert courses["search"]["parents"]


def test_the_server_answers_as_the_engine_completes(search, tmp_path):
    from policy_server import NAME, answering

    tokenizer = train_tokenizer(["The quick brown fox.\n"], 400)
    config = PolicyConfig(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocab=400, context=64)
    model, chat = new_policy(config, tokenizer, 0), Chat(tokenizer, "compact")
    messages = [{"role": "user", "content": "quick"}, {"role": "assistant", "content": "fox"}]
    messages.append({"role": "tool", "content": "ok", "tool_call_id": "x"})
    body = {"messages": messages, "max_tokens": 12, "seed": 3, "temperature": 1.0}

    async def work():
        engine = LocalEngine(model, threads=1, batch=4)
        server = await asyncio.start_server(answering(engine, chat), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with server, httpx.AsyncClient() as client:
            names = (await client.get(f"{url}/models")).json()
            answers = await asyncio.gather(*(client.post(f"{url}/chat/completions", json=body) for _ in range(3)))
            long = body | {"messages": [{"role": "user", "content": "fox " * 200}]}
            refused = await client.post(f"{url}/chat/completions", json=long)
        prompt = chat.prompt_ids(messages)
        wanted = await engine.generate(prompt, SamplingParams(12, 3, 1.0, chat.stop_ids))
        await engine.close()
        return names, [answer.json() for answer in answers], refused, prompt, wanted

    names, answers, refused, prompt, wanted = asyncio.run(work())
    assert [model["id"] for model in names["data"]] == [NAME]
    text = tokenizer.decode([token for token in wanted.ids if token not in chat.stop_ids])
    for answer in answers:
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": len(wanted.ids)}
        assert answer["choices"][0]["finish_reason"] == wanted.finish
    assert refused.status_code == 400 and "context length" in refused.text
