"""`optimize --on` against an API server and a real MLflow, while a thread does what Argo and the pods would do."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.cli import searches as commands
from cuda_agent.cluster import searches
from cuda_agent.cluster.api import Cluster
from cuda_agent.cluster.submit import CONFIG_ANNOTATION, STOPPED_LABEL
from cuda_agent.errors import ConfigError, UserError
from cuda_agent.mlflow_api import Rest
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.storage import open_store
from tests.cluster.fake_api import FakeApi
from tests.mlflow_server import serving

MODEL = Path(__file__).parents[2] / "examples" / "model.py"
FAST = Verdict("ok", "plan", "strict", "cpu", "model", seconds=1.0, eager_seconds=3.0)
Answer = Callable[[str, dict[str, Any]], None]  # takes the name of a Workflow, and its order


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


class There:
    """A cluster with a release.  ``play`` starts a thread that answers each new Workflow, until ``close``."""

    def __init__(self, api: FakeApi, mlflow: str) -> None:
        self.api, self.mlflow, self._over, self._threads = api, mlflow, threading.Event(), list[threading.Thread]()
        about = {"cuda-agent.io/version": "0.1.0", "cuda-agent.io/mlflow": mlflow}
        for job, label, gpus in (("cpu", "profile", "0"), ("gpu", "profile", "1"), ("search-cpu", "search", "0")):
            metadata = {"annotations": about | {"cuda-agent.io/gpus": gpus}}
            api.add("WorkflowTemplate", f"kernels-{job}-0-1-0", {f"cuda-agent.io/{label}": job}, metadata=metadata)

    def play(self, answer: Answer) -> None:
        def work() -> None:
            seen: set[str] = set()
            while not self._over.wait(0.02):
                for (kind, name), item in [*self.api.objects.items()]:
                    if kind == "workflows" and name not in seen and ("configmaps", name) in self.api.objects:
                        seen.add(name)
                        text = self.api.objects["configmaps", name]["data"]["config.json"]
                        answer(item["metadata"]["name"], json.loads(text))

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def set(self, name: str, phase: str, message: str = "", exit_code: str = "0") -> None:
        node = {"type": "Pod", "displayName": "begin(0)", "phase": phase, "message": message, "startedAt": "2026"}
        node |= {"outputs": {"exitCode": exit_code}}
        self.api.objects["workflows", name]["status"] = {"phase": phase, "nodes": {"begin": node}}

    def result(self, search: str, folder: Path, verdict: Verdict | None, spent: int = 100) -> None:
        """Leaves a result in MLflow, as the last pod of a search does."""
        folder.mkdir(exist_ok=True)
        used = {"prompt": spent, "sampled": 0, "estimated": False, "cost": 0.0, "seconds": 1.0}
        told = {"kind": "outcome", "attempt": 0, "at": 1.0, "why": "target" if verdict else "server", "target": 1.05}
        told |= {"until": None, "reached": bool(verdict), "spent": used, "message": "refused: 401"}
        (folder / "transcript.jsonl").write_text(json.dumps(told) + "\n")
        (folder / "report.html").write_text("<p>")
        if verdict:
            (folder / "solution").mkdir(exist_ok=True)
            (folder / "solution" / "plan.json").write_text(f"{spent}")
            (folder / "verdict.json").write_text(json.dumps(verdict.to_json()))
            (folder / "model_new.py").write_text("class ModelNew: ...")
        searches.leave(self.mlflow, search, folder)


@pytest.fixture
def there(tmp_path: Path, mlflow: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    with FakeApi() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        monkeypatch.setattr(commands, "EVERY", 0.02)
        made = There(api, mlflow)
        yield made
        made.close()


def optimize(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main.app, ["optimize", *words])
    if isinstance(done.exception, UserError):  # the command line prints it
        return done.exception.exit_code, f"{done.output}{done.exception}"
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.output


def test_a_search_is_submitted_followed_and_fetched(there: There, tmp_path: Path) -> None:
    orders: list[dict[str, Any]] = []

    def answer(name: str, order: dict[str, Any]) -> None:
        orders.append(order)
        there.set(name, "Running")
        there.result(name, tmp_path / "left", FAST)
        there.set(name, "Succeeded")

    there.play(answer)
    out = tmp_path / "out"
    code, said = optimize(
        str(MODEL), "--on", ".", "--model", "m", "--attempts", "6", "--output", str(out), "sandbox.clock=model"
    )
    assert code == 0, said
    assert "3.00" in said and f"{out}/model_new.py" in said
    assert {path.name for path in out.iterdir()} == {
        "cluster.json", "model.py", "model_new.py", "report.html", "run.json", "solution", "transcript.jsonl",
        "verdict.json",
    }  # fmt: skip
    (order,) = orders
    assert order["code"] == MODEL.read_text() and order["order"]["attempts"] == 6
    assert (order["order"]["base_url"], order["order"]["key_env"], order["order"]["lessons"]) == ("", "", "")
    assert order["sandbox"]["clock"] == "model" and order["sandbox"]["device"] == "cpu", "the profile has no GPU"
    (workflow,) = [item for (kind, _), item in there.api.objects.items() if kind == "workflows"]
    given = {item["name"]: item["value"] for item in workflow["spec"]["arguments"]["parameters"]}
    assert given == {
        "run": workflow["metadata"]["name"],
        "config": workflow["metadata"]["annotations"][CONFIG_ANNOTATION],
    }
    assert workflow["spec"]["workflowTemplateRef"] == {"name": "kernels-search-cpu-0-1-0"}


def test_a_failed_search_says_why_and_goes_on_when_it_is_resumed(there: There, tmp_path: Path) -> None:
    names: list[tuple[str, float]] = []

    def answer(name: str, order: dict[str, Any]) -> None:
        names.append((name, order["order"]["minutes"]))
        if len(names) == 1:
            there.set(name, "Failed", "the problem does not run: NameError", "78")
            return
        there.result(names[0][0], tmp_path / "left", FAST, spent=len(names))
        there.set(name, "Succeeded")

    there.play(answer)
    out = tmp_path / "out"
    code, said = optimize(str(MODEL), "--on", "fake", "--model", "m", "--output", str(out))
    assert code == 78 and "the problem does not run: NameError" in said and f"--resume {out}" in said
    code, said = optimize("--resume", str(out))
    assert code == 0 and (out / "solution" / "plan.json").read_text() == "2", said
    assert optimize("--resume", str(out))[0] == 0 and len(names) == 2, "it has ended well: its result is fetched"
    assert optimize("--resume", str(out), "--minutes", "90")[0] == 0
    first = names[0][0]
    assert names == [(first, 60.0), (f"{first}-r2", 60.0), (f"{first}-r3", 90.0)]
    assert json.loads((out / "run.json").read_text())["order"]["minutes"] == 90.0
    assert (out / "solution" / "plan.json").read_text() == "3"


def test_a_search_that_is_stopped_is_resumed_and_one_under_way_keeps_its_options(there: There, tmp_path: Path) -> None:
    begun = threading.Event()

    def answer(name: str, order: dict[str, Any]) -> None:
        there.set(name, "Running")
        begun.set()

    there.play(answer)
    out, found = tmp_path / "out", list[tuple[int, str]]()
    words = [str(MODEL), "--on", "fake", "--model", "m", "--output", str(out)]
    following = threading.Thread(target=lambda: found.append(optimize(*words)))
    following.start()
    assert begun.wait(30)
    while not (out / commands.FILE).exists():
        time.sleep(0.02)
    code, said = optimize("--resume", str(out), "--minutes", "90")
    assert code == 78 and "stop it first: cuda-agent cancel" in said
    (search,) = {name for kind, name in there.api.objects if kind == "workflows"}
    done = CliRunner().invoke(main.app, ["cancel", search], catch_exceptions=False)
    assert done.exit_code == 0 and f"search {search} is stopping" in done.output
    workflow = there.api.objects["workflows", search]
    assert workflow["spec"]["shutdown"] == "Stop"
    workflow["status"]["phase"] = "Failed"
    following.join(30)
    assert found[0][0] == 75 and "The search was stopped" in found[0][1]
    again = CliRunner().invoke(main.app, ["cancel", search])
    assert isinstance(again.exception, ConfigError) and f"{search} has ended (Failed)" in str(again.exception)


def test_a_search_without_a_solution_leaves_none_of_an_older_one(there: There, tmp_path: Path) -> None:
    found: list[Verdict | None] = [FAST, None]

    def answer(name: str, order: dict[str, Any]) -> None:
        search = there.api.objects["workflows", name]["metadata"]["labels"][searches.SEARCH_LABEL]
        there.result(search, tmp_path / name, found.pop(0))
        there.set(name, "Succeeded")

    there.play(answer)
    out = tmp_path / "out"
    assert optimize(str(MODEL), "--on", "fake", "--model", "m", "--output", str(out))[0] == 0
    code, said = optimize("--resume", str(out), "--minutes", "61")
    assert code == 75 and "refused: 401" in said
    assert not (out / "solution").exists() and not (out / "verdict.json").exists()


def test_a_result_that_the_cluster_has_no_more_stays_in_the_folder(there: There, tmp_path: Path) -> None:
    def answer(name: str, order: dict[str, Any]) -> None:
        there.result(name, tmp_path / "left", FAST)
        there.set(name, "Succeeded")

    there.play(answer)
    out = tmp_path / "out"
    assert optimize(str(MODEL), "--on", "fake", "--model", "m", "--output", str(out))[0] == 0
    files = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (search,) = {name for kind, name in there.api.objects if kind == "workflows"}
    del there.api.objects["workflows", search]
    api = Rest(there.mlflow)
    for row in api.find(api.experiments(), searches.TAG, search):
        api.delete(row.run_id)
    code, said = optimize("--resume", str(out))
    assert code == 78 and f"has no result of {search}. {out} keeps what it holds." in said
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    assert [path.name for path in tmp_path.glob(".out-*")] == []


@pytest.mark.parametrize(
    "words, said",
    [
        (("--on", "fake", "--base-url", "http://a/v1"), "the release names the model's server"),
        (("--on", "fake", "--key-env", "AWS_SECRET_ACCESS_KEY"), "the release names the model's server"),
        (("--on", "fake", "--whole"), "--whole works on this machine alone"),
        (("--profile", "cpu", "--base-url", "http://a/v1"), "go with --on"),
        (("--on", "fake", "--device", "cuda"), "have no GPUs"),
        (("--on", "fake", "--profile", "huge"), "no profile huge"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_no_folder(
    there: There, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "out"
    code, told = optimize(str(MODEL), "--model", "m", "--output", str(out), *words)
    assert code == 78 and said in told
    assert not out.exists() and not [kind for kind, _ in there.api.objects if kind == "workflows"]


def test_a_release_without_a_server_for_searches_and_a_refusal_leave_no_folder(there: There, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [str(MODEL), "--on", "fake", "--model", "m", "--output", str(out)]
    there.api.refuse = lambda method, path: 403 if method == "POST" and "workflows" in path else 0
    code, said = optimize(*words)
    assert code == 78 and "refused to create" in said and not out.exists()
    del there.api.objects["workflowtemplates", "kernels-search-cpu-0-1-0"]
    code, said = optimize(*words)
    assert code == 78 and "search.server of the chart" in said and not out.exists()


def test_the_steps_of_a_search_are_told_by_the_pods_of_its_workflow() -> None:
    def node(name: str, phase: str, began: str, message: str = "") -> dict[str, Any]:
        return {"type": "Pod", "displayName": name, "phase": phase, "startedAt": began, "message": message}

    nodes = [
        node("begin(0)", "Failed", "1", "exit code 137"),
        node("begin(1)", "Succeeded", "2"),
        node("player(0:0)(0)", "Running", "3"),
        node("player(1:1)(0)", "Pending", "4"),
        {"type": "DAG", "displayName": "s", "phase": "Running"},
    ]
    found = searches.steps({"status": {"nodes": {str(number): one for number, one in enumerate(nodes)}}})
    assert found == {"begin": "done (try 2)", "player(0:0)": "running", "player(1:1)": "waits"}


def test_runs_lists_searches_with_the_state_of_their_newest_workflow(there: There) -> None:
    for name, phase, created in (
        ("s", "Failed", "1"),
        ("s-r2", "Running", "3"),
        ("t", "Succeeded", "2"),
        ("u", "", "4"),
        ("v", "Succeeded", "5"),
    ):
        made = f"2026-11-0{created}T00:00:00Z"
        labels = {searches.SEARCH_LABEL: name.removesuffix("-r2")} | ({STOPPED_LABEL: "yes"} if name == "v" else {})
        there.api.add("Workflow", name, labels, status={"phase": phase}, metadata={"creationTimestamp": made})
    done = CliRunner().invoke(main.app, ["runs", "--on", "."])
    assert [line for line in done.output.splitlines() if line.startswith("search ")] == [
        "search s: running", "search t: succeeded", "search u: pending", "search v: failed",
    ]  # fmt: skip


def test_gc_removes_old_searches_that_are_not_under_way_from_the_store_and_from_mlflow(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, place = open_store(tmp_path / "store"), Cluster.of_kubeconfig()
    for name, phase in (("old", "Succeeded"), ("lives", "Running"), ("gone", ""), ("young", "Succeeded")):
        store.put(f"searches/{name}/attempts/1.jsonl", b"1")
        store.put(f"searches/{name}/order.json", b"{}")
        if phase:
            there.api.add("Workflow", name, {searches.SEARCH_LABEL: name}, status={"phase": phase})
        there.result(name, tmp_path / name, FAST)
    eight_days = time.time() - 8 * 86400
    for path in (tmp_path / "store" / "searches").rglob("*"):
        if path.is_file() and path != tmp_path / "store" / "searches" / "young" / "order.json":
            os.utime(path, (eight_days, eight_days))
    assert searches.collect(place, store, there.mlflow, 7.0, True) == ["gone", "old"]
    assert searches.collect(place, store, "http://127.0.0.1:9", 7.0, False) == [], "MLflow is away"
    assert store.folders("searches") == ["gone", "lives", "old", "young"]
    assert searches.collect(place, store, there.mlflow, 7.0, False) == ["gone", "old"]
    assert {key.split("/")[1] for key in store.list("searches")} == {"lives", "young"}
    assert [searches.fetch(place, name, tmp_path / "f") for name in ("old", "lives")] == [False, True]
    assert searches.collect(place, store, there.mlflow, 0.0, True) == [], "an hour is the least"
