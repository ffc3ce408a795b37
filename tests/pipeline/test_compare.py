"""Two runs that differ, the runs of a sweep, and the reason why a stage is not in the cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.compose import compose, freeze
from cuda_agent.config import Config, RunConfig
from cuda_agent.pipeline import compare
from cuda_agent.pipeline.closure import code_digests, code_version, environment_versions
from cuda_agent.pipeline.graph import GRAPHS, ROWS, Stage
from cuda_agent.pipeline.manifest import Identity, Manifest, config_entry, identify, manifest_entry
from cuda_agent.pipeline.runs import Run, create_run, end_run
from cuda_agent.storage import Store, json_sha256, open_store

MADE = Manifest("critic", "a", "k", "c", "e", None, "f", {"policy": "p"}, {"critic": "v"}, "m", 1.0, "2026-01-01")


def left_by(run: str, *overrides: str, code: str = "c", key: str = "k") -> compare.Facts:
    made = replace(MADE, run=run, key=key, code=code)
    return compare.Facts(run, compose(["experiment=smoke", *overrides]), {"critic": made})


def scored(run: str, *overrides: str, **passed: float) -> compare.Facts:
    """A run whose evaluations gave these pass rates, by policy; as on a cluster, in any order."""
    manifests = {
        f"evaluate-{policy}": replace(MADE, stage=f"evaluate-{policy}", run=run, scores={"passed": value})
        for policy, value in reversed(passed.items())
    }
    return compare.Facts(run, compose(list(overrides)), manifests)


@pytest.mark.parametrize(
    ("overrides", "code", "differs"),
    [
        (["critic.lr=7e-5"], "other", {"code": ["c", "other"], "configuration": True}),
        (["critic.lr=7e-5"], "c", {"configuration": True}),
        (["seed=7"], "other", {"code": ["c", "other"], "configuration": True}),
        (["rft.lr=7e-5"], "other", {"code": ["c", "other"]}),
        (["sandbox.servers=[http://a:1]", "training.checkpointing=on"], "other", {"code": ["c", "other"]}),
    ],
)
def test_a_stage_that_differs_names_its_configuration_beside_other_reasons(
    overrides: list[str], code: str, differs: dict[str, Any]
) -> None:
    found = compare.diff(left_by("a"), left_by("b", *overrides, code=code, key="l"))
    assert found["stages"]["critic"]["differs in"] == differs
    assert found["config"].keys() >= {text.split("=")[0] for text in overrides}


def test_equal_keys_are_no_difference() -> None:
    assert compare.diff(left_by("a"), left_by("b"))["stages"] == {}


def test_two_runs_are_compared_by_the_scores_of_each_policy() -> None:
    found = compare.diff(scored("a", base=0.1, agentic=0.5), scored("b", base=0.1, rft=0.3))
    assert found["scores"] == {
        "base": [{"passed": 0.1}, {"passed": 0.1}],
        "agentic": [{"passed": 0.5}, None],
        "rft": [None, {"passed": 0.3}],
    }


def test_scores_whose_times_are_not_measured_say_so() -> None:
    assert list(scored("a", "experiment=smoke", base=0.1).scores) == ["base, model clock"]


def test_the_stages_and_last_scores_of_an_unfinished_run_are_read_from_its_manifests() -> None:
    store = open_store("memory://")
    run = Run.begun("a", compose(["experiment=smoke", "graph=no_rft"]), "s", "ada")
    assert compare.standings(store, [run]) == [([], "", {})]
    for policy, passed in (("base", 0.1), ("agentic", 0.5), ("rft", 0.9)):
        made = replace(MADE, stage=f"evaluate-{policy}", scores={"passed": passed})
        store.put(manifest_entry("a", made.stage), made.to_bytes())
    assert [stage.name for stage in GRAPHS["no_rft"] if stage.about][-1] == "evaluate-agentic"
    done = replace(run, name="b", code=0, stages=["report"], policy="rft", scores={"passed": 0.7})
    assert compare.standings(store, [done, run]) == [
        (["report"], "rft", {"passed": 0.7}),
        (["evaluate-base", "evaluate-agentic"], "agentic, model clock", {"passed": 0.5}),
    ]


def test_a_row_of_a_sweep_has_the_settings_that_differ_and_the_last_scores() -> None:
    runs_of_it = [scored("s-1", "seed=1", "critic.lr=1e-5", base=0.1, agentic=0.5), scored("s-2", "seed=2")]
    assert compare.sweep_rows(runs_of_it) == [
        {
            "run": "s-1",
            "settings": {"seed": 1, "critic.lr": 1e-5},
            "policy": "agentic",
            "scores": {"passed": 0.5},
        },
        {"run": "s-2", "settings": {"seed": 2, "critic.lr": Config().critic.lr}, "policy": "", "scores": {}},
    ]


# ------------------------------------------------------------------------------------------------ missing in the cache

STAGE = next(row for row in ROWS if row.name == "critic")


@pytest.fixture
def store() -> Store:
    return open_store("memory://")


def finished(store: Store, config: Config, run: str = "a", stage: Stage = STAGE, **changes: Any) -> Manifest:
    """Stores the result of ``stage`` in ``run``, made by this code and software."""
    text, sha256 = freeze(config)
    store.create(config_entry(sha256), text.encode())
    now = identify(stage, config, {"policy": "p", "episodes": "e"})
    store.put_json(code_digests(stage.module))
    store.put_json(environment_versions())
    same = {name: getattr(now, name) for name in ("key", "code", "environment", "inputs", "device")}
    made = replace(MADE, run=run, config=sha256, **(same | changes))
    store.put(manifest_entry(run, stage.name), made.to_bytes())
    return made


def asked(config: Config, **inputs: str) -> Identity:
    return identify(STAGE, config, {"policy": "p", "episodes": "e"} | inputs)


def test_a_stage_that_was_never_done_has_no_reason(store: Store) -> None:
    assert compare.newest_results(store) == {}
    assert compare.why_missed(store, None, STAGE, asked(Config())) == ""
    assert compare.why_missed(store, "gone", STAGE, asked(Config())) == ""


@pytest.mark.parametrize(
    ("config", "inputs", "said"),
    [
        (Config.model_validate({"critic": {"epochs": 7}}), {}, f"critic.epochs {Config().critic.epochs} -> 7"),
        (Config.model_validate({"rft": {"epochs": 7}}), {}, None),
        (Config(), {"policy": "q"}, "input (policy)"),
        (Config(), {"policy": "q", "episodes": "f"}, "input (episodes, policy)"),
        (Config(seed=3), {"policy": "q"}, "input (policy); seed 0 -> 3"),
    ],
)
def test_the_part_of_the_key_that_changed_is_named(
    store: Store, config: Config, inputs: dict[str, str], said: str | None
) -> None:
    before = finished(store, Config())
    now = asked(config, **inputs)
    assert (now.key == before.key) == (said is None)
    if said is not None:
        assert compare.why_missed(store, "a", STAGE, now) == f"changed since run a: {said}"


def test_many_changed_keys_are_counted(store: Store) -> None:
    finished(store, Config())
    changes = {"critic": {"epochs": 7, "lr": 7e-5, "tokens_per_step": 7777}, "policy": {"layers": 7}, "seed": 7}
    found = compare.why_missed(store, "a", STAGE, asked(Config.model_validate(changes)))
    assert found.startswith("changed since run a: critic.epochs ") and found.endswith("; 2 more keys")


def test_a_changed_file_of_a_task_set_is_a_reason(store: Store, tmp_path: Path) -> None:
    stage = next(row for row in ROWS if row.name == "synthesis")
    config = Config.model_validate({"synthesis": {"tasks": str(tmp_path / "set")}})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "level1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "a.py").write_text("x = 1")
    finished(store, config, stage=stage)
    (tmp_path / "elsewhere" / "a.py").write_text("x = 2")
    now = identify(stage, config, {"policy": "p", "episodes": "e"})
    assert compare.why_missed(store, "a", stage, now) == "changed since run a: files of a task set"
    other = Config.model_validate({"synthesis": {"tasks": str(tmp_path / "set"), "train": 3}})
    found = compare.why_missed(store, "a", stage, identify(stage, other, {"policy": "p", "episodes": "e"}))
    assert found == f"changed since run a: synthesis.train {Config().synthesis.train} -> 3"


def test_changed_files_and_packages_are_named_where_they_are_known(store: Store) -> None:
    files = code_digests(STAGE.module)
    code = store.put_json(files | {"cuda_agent/training/critic.py": "other", "cuda_agent/gone.py": "x"})
    software = store.put_json(environment_versions() | {"torch": "1.0"})
    finished(store, Config(), key="k", code=code, environment=software)
    now = asked(Config())
    assert compare.why_missed(store, "a", STAGE, now) == (
        "changed since run a: code (cuda_agent/gone.py, cuda_agent/training/critic.py); environment (torch)"
    )
    finished(store, Config(), key="k", code="of an earlier version", environment="sha256:image", device="a GPU")
    said = "changed since run a: code; environment; device a GPU -> None"
    assert compare.why_missed(store, "a", STAGE, now) == said


def test_a_file_of_which_nothing_is_known_is_no_reason_to_fail(store: Store) -> None:
    made = finished(store, Config(), key="k", code="c")
    store.delete(config_entry(made.config))
    found = compare.why_missed(store, "a", STAGE, asked(Config()))
    assert found == "changed since run a: perhaps the configuration, which is unknown; code"


def test_a_result_of_the_same_key_that_is_not_shared_says_why(store: Store) -> None:
    finished(store, Config(), lost=3)
    assert compare.why_missed(store, "a", STAGE, asked(Config())) == "the result of run a lost episodes to faults"
    finished(store, Config())
    assert compare.why_missed(store, "a", STAGE, asked(Config())) == "the result of run a is no longer complete"


def test_the_earlier_result_of_a_stage_is_that_of_the_newest_run_that_finished_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stages in (("c", ["critic", "rft"]), ("a", ["critic"]), ("b", [])):
        run = create_run(store, Config(run=RunConfig(name=name)), "s")
        done = {stage: replace(MADE, stage=stage) for stage in stages}
        for made in done.values():
            store.put(manifest_entry(name, made.stage), made.to_bytes())
        if name == "c":
            end_run(store, run, 0, "", "", done)
    assert compare.newest_results(store) == {"critic": "a", "rft": "c"}
    monkeypatch.setattr(compare, "_RECENT", 2)
    assert compare.newest_results(store) == {"critic": "a"}, "of old runs it is not looked for"


def test_the_hash_in_a_key_is_that_of_the_stored_list(store: Store) -> None:
    assert store.put_json(code_digests(STAGE.module)) == code_version(STAGE.module)
    assert json_sha256({"b": 1, "a": [2]}) == store.put_json({"a": [2], "b": 1})
