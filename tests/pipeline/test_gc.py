"""Retention: what stays with the newest runs, what goes, and in which order."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_agent.errors import EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError
from cuda_agent.pipeline import gc, runs
from cuda_agent.pipeline.manifest import Manifest, cache_entry, config_entry, key_entry, manifest_entry
from cuda_agent.pipeline.runs import Run
from cuda_agent.storage import Store, json_sha256, open_store

MADE = Manifest("warmup", "old", "k", "c", "e", None, "s", {}, {}, "", 1.0, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(gc, "YOUNG", -1.0)
    return open_store(tmp_path / "store")


def folder_of(store: Store, tmp_path: Path, text: str) -> str:
    folder = tmp_path / text
    folder.mkdir()
    (folder / "file").write_text(text)
    return store.put_folder(folder)


def run(
    store: Store,
    tmp_path: Path,
    name: str,
    created: int,
    pipeline: str = "p",
    code: int | None = EXIT_DONE,
    sweep: str = "",
) -> str:
    """A run with one finished stage, a checkpoint of it, and one stage that it began; gives its output's digest."""
    record = Run(name, f"config-{name}", pipeline, f"2026-01-{created:02}T00:00:00+00:00", sweep=sweep)
    store.put(f"runs/{name}/run.json", record.to_bytes())
    if code is not None:
        runs.end_run(store, record, code, "", "", {"warmup": MADE})
    store.put(config_entry(f"config-{name}"), b"{}")
    digest, metrics = folder_of(store, tmp_path, f"out-{name}"), folder_of(store, tmp_path, f"metrics-{name}")
    made = replace(MADE, run=name, key=f"key-{name}", outputs={"policy": digest}, metrics=metrics)
    store.put(manifest_entry(name, "warmup"), made.to_bytes())
    store.put(cache_entry("warmup", f"key-{name}"), made.to_bytes())
    store.put(f"checkpoints/warmup/key-{name}/1/state", b"x")
    store.put(key_entry(name, "rft"), f"begun-{name}".encode())
    store.put(f"checkpoints/rft/begun-{name}/1/state", b"x")
    return digest


def plan(store: Store, keep: int, days: float = -1.0, **more: object) -> gc.Plan:
    """The plan of a collection for which nothing is young."""
    return gc.plan(store, keep, days, **more)  # type: ignore[arg-type]


def test_the_newest_runs_of_each_pipeline_stay_with_all_that_they_name(store: Store, tmp_path: Path) -> None:
    old, new = run(store, tmp_path, "old", 1), run(store, tmp_path, "new", 2)
    other = run(store, tmp_path, "other", 1, pipeline="q")
    what = plan(store, keep=1)
    assert what.runs == ["old"] and what.size == sum(what.keys.values()) > 0
    assert f"cas/{old}" in what.keys
    gone = {config_entry("config-old"), manifest_entry("old", "warmup"), cache_entry("warmup", "key-old")}
    assert gone <= what.keys.keys() and "runs/old/run.json" in what.keys
    assert not [
        key for key in what.keys if "new" in key.replace("key-new", "") or "other" in key.replace("key-other", "")
    ]
    gc.collect(store, what)
    for digest, name in ((new, "new"), (other, "other")):
        assert store.has_folder(digest)
        store.get_folder(digest, tmp_path / f"back-{name}")
        assert (tmp_path / f"back-{name}" / "file").read_text() == f"out-{name}"
    assert not store.has_folder(old)
    assert plan(store, keep=1).keys == {}, "nothing is left to collect"


def test_what_a_kept_result_says_of_its_code_and_software_stays(store: Store, tmp_path: Path) -> None:
    for name in ("old", "new"):
        run(store, tmp_path, name, 1 + (name == "new"))
        facts = {"code": store.put_json({"a.py": name}), "environment": store.put_json({"torch": name})}
        made = replace(Manifest.from_bytes(store.get(manifest_entry(name, "warmup"))), **facts)
        store.put(manifest_entry(name, "warmup"), made.to_bytes())
    lists = {name: {f"cas/{json_sha256(one)}" for one in ({"a.py": name}, {"torch": name})} for name in ("old", "new")}
    what = plan(store, keep=1)
    assert lists["old"] <= what.keys.keys() and not lists["new"] & what.keys.keys()


def test_a_checkpoint_stays_only_where_its_stage_began_and_is_not_done(store: Store, tmp_path: Path) -> None:
    run(store, tmp_path, "new", 2)
    keys = plan(store, keep=1).keys
    assert "checkpoints/warmup/key-new/1/state" in keys
    assert "checkpoints/rft/begun-new/1/state" not in keys


def test_what_is_young_stays_whatever_it_is(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(store, tmp_path, "old", 1)
    monkeypatch.setattr(gc, "YOUNG", 3600.0)
    assert plan(store, keep=0).keys == {}


def test_an_output_that_a_kept_run_shares_with_an_old_one_stays(store: Store, tmp_path: Path) -> None:
    shared = run(store, tmp_path, "old", 1)
    run(store, tmp_path, "new", 2)
    made = replace(MADE, stage="rft", run="new", key="k2", inputs={"policy": shared})
    store.put(manifest_entry("new", "rft"), made.to_bytes())
    what = plan(store, keep=1)
    assert what.runs == ["old"] and f"cas/{shared}" not in what.keys
    gc.collect(store, what)
    store.get_folder(shared, tmp_path / "back")


def test_what_points_goes_before_what_it_points_to(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, tmp_path, "old", 1)
    what = plan(store, keep=0)
    removed: list[list[str]] = []
    monkeypatch.setattr(store, "delete_all", lambda keys: removed.append(list(keys)))
    gc.collect(store, what)
    assert sorted(key for keys in removed for key in keys) == sorted(what.keys)
    assert [{key.split("/")[0] for key in keys} for keys in removed] == [
        {"cache"}, {"runs"}, set(), {"checkpoints"}, {"configs"}, {"cas"}
    ]  # fmt: skip


def test_empty_runs_take_no_place_from_finished_ones(store: Store, tmp_path: Path) -> None:
    """Ten runs that were cancelled at once came after the result."""
    for number, code in enumerate((EXIT_DONE, EXIT_GATE, *([EXIT_RETRY, None] * 5)), start=1):
        run(store, tmp_path, f"r{number}", number, code=code)
    assert sorted(plan(store, keep=2).runs) == sorted(f"r{number}" for number in range(3, 13))
    assert plan(store, keep=1).runs[0] == "r1"


def test_a_sweep_stays_or_goes_whole(store: Store, tmp_path: Path) -> None:
    for number in range(1, 6):
        run(store, tmp_path, f"s-{number}", number, code=EXIT_DONE if number == 2 else 1, sweep="s")
    run(store, tmp_path, "t-1", 6, sweep="t")
    run(store, tmp_path, "alone", 7)
    assert plan(store, keep=3).runs == []
    what = plan(store, keep=2)
    assert what.runs == [f"s-{number}" for number in range(1, 6)] and what.sweeps == ["s"]
    assert plan(store, keep=2, live={"s-4"}).runs == []
    runs.pin(store, "s-5", True)
    assert plan(store, keep=2).runs == [] and plan(store, keep=2).pinned == ["s-5"]


def test_a_pinned_run_stays_until_its_pin_is_removed(store: Store, tmp_path: Path) -> None:
    old = run(store, tmp_path, "old", 1)
    run(store, tmp_path, "new", 2)
    runs.pin(store, "old", True)
    gc.collect(store, plan(store, keep=1))
    assert store.has_folder(old) and runs.read_run(store, "old").status == "done"
    runs.pin(store, "old", False)
    assert plan(store, keep=1).runs == ["old"]
    with pytest.raises(ConfigError, match="run nobody: there is no such run"):
        runs.pin(store, "nobody", True)


def aged(store: Store, name: str, days: float) -> None:
    """Makes all files of a run and its checkpoints so old."""
    then = time.time() - days * 86400
    folders = [Path(store.uri) / "runs" / name, Path(store.uri) / "checkpoints" / "rft" / f"begun-{name}"]
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        os.utime(file, (then, then))


def test_a_run_stays_for_some_days_after_its_last_sign(store: Store, tmp_path: Path) -> None:
    for name, days in (("stopped", 3.0), ("older", 8.0), ("writes-checkpoints", 8.0)):
        run(store, tmp_path, name, 1, code=EXIT_RETRY)
        aged(store, name, days)
    store.put("checkpoints/rft/begun-writes-checkpoints/1/state", b"x")
    what = plan(store, keep=1, days=7)
    assert what.runs == ["older"] and "checkpoints/rft/begun-stopped/1/state" not in what.keys


def test_a_live_run_stays_and_one_that_may_live_elsewhere_is_not_still_before_a_day(
    store: Store, tmp_path: Path
) -> None:
    for name, days in (("live", 30.0), ("ended", 0.1), ("elsewhere", 0.1), ("quiet", 2.0)):
        run(store, tmp_path, name, 1, code=None)
        aged(store, name, days)
    what = plan(store, keep=1, days=5, live={"live"}, known=lambda name: name == "ended")
    assert what.runs == [] and sorted(what.still) == ["ended", "quiet"]


def test_a_collection_writes_the_index_of_what_it_keeps(store: Store, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        run(store, tmp_path, f"r{number}", number)
    gc.collect(store, plan(store, keep=2))
    assert [one.name for one in runs.list_runs(store)] == ["r2", "r3"]
    store.delete("runs/r3/end.json")
    store.delete("runs/r3/run.json")
    assert [one.name for one in runs.list_runs(store)] == ["r2", "r3"], "taken from the index"
