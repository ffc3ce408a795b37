"""Sweeps: which runs overrides amount to, what is refused, and how they go one after the other on one machine."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drill import journal, table

from cuda_agent.compose import compose, section_values
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import gc, local, runs, sweep
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.local import RunOutcome, run_pipeline
from cuda_agent.pipeline.manifest import manifest_entry
from cuda_agent.storage import open_store


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-m", "cuda_agent.cli", "sweep", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    return subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)


# ------------------------------------------------------------------------------------------------------------- the runs


def test_a_sweep_is_the_product_of_its_values_the_last_key_changing_fastest():
    name, points = sweep.points(["experiment=smoke", "critic.lr=1e-5,3e-5", "run.name=s", "seed=range(3)"])
    assert name == "s"
    assert [point.overrides for point in points] == [
        [f"critic.lr={rate}", f"seed={seed}"] for rate in ("1e-05", "3e-05") for seed in range(3)
    ]
    assert [point.name for point in points] == [f"s-{number}" for number in range(1, 7)]
    assert {(point.config.critic.lr, point.config.seed) for point in points} == {
        (rate, seed) for rate in (1e-5, 3e-5) for seed in range(3)
    }
    assert {point.config.run.sweep for point in points} == {"s"}


def test_a_run_of_a_sweep_computes_what_the_same_run_alone_computes():
    _, points = sweep.points(["experiment=smoke", "seed=4,5"])
    alone = compose(["experiment=smoke", "seed=5"])
    assert points[1].config.model_dump(exclude={"run"}) == alone.model_dump(exclude={"run"})


def test_the_ablations_are_one_sweep_whose_runs_share_their_first_stages():
    names = ["none", "no_agent_loop", "no_rft", "no_critic", "raw_reward"]
    _, points = sweep.points(["experiment=smoke", f"ablation={','.join(names)}"])
    assert [point.overrides for point in points] == [[f"ablation={name}"] for name in names]
    warm = next(stage for stage in STAGES if stage.name == "warmup")
    keys = [json.dumps(section_values(point.config, warm.config)) for point in points]
    assert len(set(keys[:4])) == 1 and keys[4] != keys[0], "only the reward changes the warm-up"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=choice(3,1)", ["seed=3", "seed=1"]),
        ("seed=sort(3,1)", ["seed=1", "seed=3"]),
        ("experiment=smoke,demo", ["experiment=smoke", "experiment=demo"]),
        ("synthesis.families=[a,b],[c]", None),
    ],
)
def test_hydras_own_grammar_is_read(text, values):
    if values is None:
        with pytest.raises(ConfigError, match=r"synthesis\.families"):
            sweep.points([text])
        return
    assert [point.overrides for point in sweep.points([text])[1]] == [[value] for value in values]


def test_numbers_in_names_are_of_one_width():
    _, points = sweep.points(["run.name=wide", "seed=range(10)"])
    assert (points[0].name, points[-1].name) == ("wide-01", "wide-10")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["seed=1"], "needs a key with several values"),
        (["seed=range(5,1)"], "seed: these values are none"),
        (["seed=1,1"], "are the same run"),
        (["seed=range(1000000000)"], "over 256: more than 256 runs"),
        (["seed=range(20)", "critic.epochs=range(1,20)"], "20 × 19: more than 256 runs"),
        (["critic.lr=interval(0,1)"], "expected values to choose from"),
        (["critic.lrr=1,2"], "critic.lrr: there is no such key. Did you mean critic.lr"),
        (["seed=1,x"], "seed: expected a whole number, got 'x'"),
        (["seed=1,2", "seed=3,4"], "seed: it is swept twice"),
        (["run.store=a,b"], "run.store: a sweep changes what a run computes"),
        (["experiment=glob(*)"], "cannot be swept over"),
        (["experiment=smoke,nothing"], "experiment=nothing: expected one of"),
        (["critic=1,2"], "critic: expected a key of this section"),
        (["a=b=c,"], "expected `key=value`"),
        (["run.name=../up", "seed=1,2"], "run.name"),
    ],
)
def test_a_mistake_is_one_screen_before_any_run(tmp_path, overrides, said):
    with pytest.raises(ConfigError) as refused:
        sweep.points(overrides)
    assert said in str(refused.value)
    done = command(tmp_path, *overrides, "--on", "local")
    assert done.returncode == 78 and said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_last_value_that_is_wrong_keeps_the_first_from_starting(tmp_path):
    done = command(tmp_path, "experiment=smoke", "critic.lr=1e-4,-1", "--on", "local")
    assert done.returncode == 78 and "critic.lr: expected a number > 0" in done.stderr
    assert not list(tmp_path.iterdir())


def test_dry_run_lists_the_runs_and_needs_no_cluster(tmp_path):
    for where in ([], ["--on", "local"]):
        done = command(tmp_path, "experiment=smoke", "run.name=s", "seed=7,8", "--dry-run", *where)
        assert done.returncode == 0, done.stderr
        assert "s-1" in done.stdout and "seed=8" in done.stdout and "2 runs, all valid; nothing" in done.stdout
    done = command(tmp_path, "run.name=s", "seed=7,8", "--dry-run", "--json")
    runs_of_it = [{"run": "s-1", "overrides": ["seed=7"]}, {"run": "s-2", "overrides": ["seed=8"]}]
    assert json.loads(done.stdout) == {"sweep": "s", "runs": runs_of_it}
    assert not list(tmp_path.iterdir())


def test_a_limit_is_refused_where_runs_go_one_after_the_other_anyway(tmp_path):
    done = command(tmp_path, "seed=1,2", "--on", "local", "--parallel", "2")
    assert done.returncode == 78 and "one after the other" in done.stderr


# ------------------------------------------------------------------------------------------------------ on this machine


def drill_points(tmp_path: Path, mlflow: str = "off") -> list[sweep.Point]:
    """Two runs of the drill's graph, whose second stage has another number of epochs in each."""
    found = []
    for number, epochs in enumerate((4, 5), start=1):
        where = {"store": str(tmp_path / "store"), "mlflow": mlflow, "name": f"s-{number}", "sweep": "s"}
        config = Config.model_validate({"run": where, "critic": {"epochs": epochs}})
        found.append(sweep.Point([f"critic.epochs={epochs}"], config))
    return found


def execute(point: sweep.Point) -> RunOutcome:
    return run_pipeline(point.config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05)


def test_the_runs_share_what_is_the_same_and_stand_below_one_parent(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    outcomes = [outcome for _, outcome in sweep.run_here(drill_points(tmp_path, uri), execute)]
    assert [outcome.code for outcome in outcomes] == [0, 0]
    one, two = (outcome.manifests for outcome in outcomes)
    assert one["make"] == two["make"] and one["train"].outputs != two["train"].outputs
    store = open_store(tmp_path / "store")
    assert [(run.name, run.sweep) for run in runs.list_runs(store)] == [("s-1", "s"), ("s-2", "s")]
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("cuda-agent")
    found = client.search_runs([experiment.experiment_id], "tags.`cuda_agent.stage` = ''")
    (parent,) = [run for run in found if run.data.tags["cuda_agent.run"] == ""]
    below = {run.data.tags["cuda_agent.run"]: run.data.tags for run in found if run is not parent}
    assert set(below) == {"s-1", "s-2"} and parent.data.tags["mlflow.runName"] == "s"
    assert {tags["mlflow.parentRunId"] for tags in below.values()} == {parent.info.run_id}
    stages = client.search_runs([experiment.experiment_id], "tags.`cuda_agent.stage` = 'train'")
    assert {run.data.tags["mlflow.parentRunId"] for run in stages} == {
        run.info.run_id for run in found if run is not parent
    }


def test_a_sweep_ends_with_a_table_of_its_runs(tmp_path, monkeypatch, capsys):
    from cuda_agent.cli import cluster

    def scoring(config: Config, **options: Any) -> RunOutcome:
        """The drill's graph; then scores as an evaluation leaves them."""
        outcome = execute(sweep.Point([], config))
        made = replace(outcome.manifests["make"], stage="evaluate-base", scores={"passed": config.critic.epochs / 10})
        open_store(tmp_path / "store").put(manifest_entry(outcome.run, made.stage), made.to_bytes())
        return outcome

    monkeypatch.setattr(local, "run_pipeline", scoring)
    assert cluster._sweep_here("s", drill_points(tmp_path), as_json=False) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert said[0][:4] == ["sweep", "s", "policy", "pass"]
    assert [row[:4] for row in said[1:]] == [
        ["s-1", "critic.epochs=4", "base", "40.0%"],
        ["s-2", "critic.epochs=5", "base", "50.0%"],
    ]
    assert cluster._sweep_here("s", drill_points(tmp_path), as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["run"], row["code"], row["scores"]) for row in rows] == [
        ("s-1", 0, {"passed": 0.4}), ("s-2", 0, {"passed": 0.5}),
    ]  # fmt: skip


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path):
    points = drill_points(tmp_path)
    asked = []

    def stopped(point: sweep.Point) -> RunOutcome:
        asked.append(point.name)
        return execute(point) if point.name == "s-1" else RunOutcome(point.name, 75, message="Stopped.")

    assert [outcome.code for _, outcome in sweep.run_here([*points, points[1]], stopped)] == [0, 75]
    assert [
        outcome.code
        for _, outcome in sweep.run_here(points, lambda point: (asked.append(point.name), execute(point))[1])
    ] == [0, 0]
    assert asked == ["s-1", "s-2", "s-2"]


def test_a_run_that_fails_does_not_end_the_sweep(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    journal.misbehave(cache, "make", "config")
    outcomes = [outcome for _, outcome in sweep.run_here(drill_points(tmp_path), execute)]
    assert [(outcome.code, outcome.stage) for outcome in outcomes] == [(78, "make"), (0, "")]


def test_a_name_that_is_taken_is_refused_before_the_first_run(tmp_path):
    one, two = drill_points(tmp_path)
    execute(two)
    changed = two.config.model_copy(update={"seed": 3})
    with pytest.raises(ConfigError, match="there is a run s-2 of another configuration"):
        next(sweep.run_here([one, sweep.Point([], changed)], execute))
    assert [run.name for run in runs.list_runs(open_store(tmp_path / "store"))] == ["s-2"]


# --------------------------------------------------------------------------------------------------------- their parent


def test_runs_that_begin_at_once_agree_on_one_parent(tmp_path):
    store = open_store(tmp_path)
    made, agreed = [], []
    together = threading.Barrier(8)

    def begin(number: int) -> None:
        def make() -> str:
            together.wait(30)  # all have looked, and none has found anything
            made.append(str(number))
            return str(number)

        agreed.append(runs.agree(store, "sweeps/s/mlflow", make))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 8 and len(agreed) == 8 and len(set(agreed)) == 1
    assert runs.agree(store, "sweeps/s/mlflow", lambda: pytest.fail("it is decided")) == agreed[0]


def test_a_parent_that_was_not_first_is_removed(tmp_path):
    from mlflow import MlflowClient

    from cuda_agent.tracking import Mirror, Sweep

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e")
    first = client.create_run(experiment).info.run_id
    mirror = Mirror(uri, "e", "r", None, pytest.fail, Sweep("s", lambda make: (make(), first)[1]))
    assert mirror.close(60)
    found = client.search_runs([experiment])
    (run,) = [item for item in found if item.info.run_id != first]
    assert len(found) == 2 and run.data.tags["mlflow.parentRunId"] == first


def test_gc_keeps_the_parents_of_sweeps_that_have_a_run_left(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    for name in ("kept", "gone"):
        store.put(f"sweeps/{name}/mlflow", b"id")
    config = Config.model_validate({"run": {"name": "a", "sweep": "kept"}})
    store.put("configs/c.json", b"{}")
    runs.create_run(store, config, "c")
    monkeypatch.setattr(gc, "YOUNG", -1.0)
    assert set(gc.plan(store).keys) == {"sweeps/gone/mlflow"}
