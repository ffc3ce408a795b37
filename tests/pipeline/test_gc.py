"""Retention: what stays with the newest runs, what goes, in which order, and who may collect."""

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.pipeline import gc
from cuda_agent.pipeline.manifest import Manifest, cache_entry, config_entry, key_entry, manifest_entry
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


def run(store: Store, tmp_path: Path, name: str, created: int, pipeline: str = "p") -> str:
    """A run with one finished stage, a checkpoint of it, and one stage that it began; gives its output's digest."""
    facts = {
        "name": name,
        "config": f"config-{name}",
        "pipeline": pipeline,
        "created": f"2026-01-{created:02}",
        "sweep": "",
    }
    store.put(f"runs/{name}/run.json", json.dumps(facts).encode())
    store.put(config_entry(f"config-{name}"), b"{}")
    digest, metrics = folder_of(store, tmp_path, f"out-{name}"), folder_of(store, tmp_path, f"metrics-{name}")
    made = replace(MADE, run=name, key=f"key-{name}", outputs={"policy": digest}, metrics=metrics)
    store.put(manifest_entry(name, "warmup"), made.to_bytes())
    store.put(cache_entry("warmup", f"key-{name}"), made.to_bytes())
    store.put(f"checkpoints/warmup/key-{name}/1/state", b"x")
    store.put(key_entry(name, "rft"), f"begun-{name}".encode())
    store.put(f"checkpoints/rft/begun-{name}/1/state", b"x")
    return digest


def test_the_newest_runs_of_each_pipeline_stay_with_all_that_they_name(store: Store, tmp_path: Path) -> None:
    old, new = run(store, tmp_path, "old", 1), run(store, tmp_path, "new", 2)
    other = run(store, tmp_path, "other", 1, pipeline="q")
    what = gc.plan(store, keep=1)
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
    assert gc.plan(store, keep=1).keys == {}, "nothing is left to collect"


def test_what_a_kept_result_says_of_its_code_and_software_stays(store: Store, tmp_path: Path) -> None:
    for name in ("old", "new"):
        run(store, tmp_path, name, 1 + (name == "new"))
        facts = {"code": store.put_json({"a.py": name}), "environment": store.put_json({"torch": name})}
        made = replace(Manifest.from_bytes(store.get(manifest_entry(name, "warmup"))), **facts)
        store.put(manifest_entry(name, "warmup"), made.to_bytes())
    lists = {name: {f"cas/{json_sha256(one)}" for one in ({"a.py": name}, {"torch": name})} for name in ("old", "new")}
    what = gc.plan(store, keep=1)
    assert lists["old"] <= what.keys.keys() and not lists["new"] & what.keys.keys()


def test_a_checkpoint_stays_only_where_its_stage_began_and_is_not_done(store: Store, tmp_path: Path) -> None:
    run(store, tmp_path, "new", 2)
    keys = gc.plan(store, keep=1).keys
    assert "checkpoints/warmup/key-new/1/state" in keys
    assert "checkpoints/rft/begun-new/1/state" not in keys


def test_what_is_young_stays_whatever_it_is(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(store, tmp_path, "old", 1)
    monkeypatch.setattr(gc, "YOUNG", 3600.0)
    assert gc.plan(store, keep=0).keys == {}


def test_an_output_that_a_kept_run_shares_with_an_old_one_stays(store: Store, tmp_path: Path) -> None:
    shared = run(store, tmp_path, "old", 1)
    run(store, tmp_path, "new", 2)
    made = replace(MADE, stage="rft", run="new", key="k2", inputs={"policy": shared})
    store.put(manifest_entry("new", "rft"), made.to_bytes())
    what = gc.plan(store, keep=1)
    assert what.runs == ["old"] and f"cas/{shared}" not in what.keys
    gc.collect(store, what)
    store.get_folder(shared, tmp_path / "back")


def test_what_points_goes_before_what_it_points_to(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, tmp_path, "old", 1)
    what = gc.plan(store, keep=0)
    removed: list[str] = []
    monkeypatch.setattr(store, "delete", removed.append)
    gc.collect(store, what)
    first = [key.split("/")[0] for key in removed]
    assert first == sorted(first, key=["cache", "runs", "sweeps", "checkpoints", "configs", "cas"].index)
    assert {"cache", "runs", "cas"} <= set(first) and sorted(removed) == sorted(what.keys)


def test_one_collector_at_a_time_and_its_lock_goes_after_an_error_too(store: Store) -> None:
    with gc.alone(store) as mine:
        assert mine and gc.is_collecting(store)
        with gc.alone(store) as second:
            assert not second
        assert gc.is_collecting(store), "a refused collector leaves the lock"
        assert not gc.await_end(store, patience=0)
    with pytest.raises(KeyError), gc.alone(store):
        raise KeyError
    assert not gc.is_collecting(store) and gc.await_end(store, patience=0)


def test_the_lock_of_one_that_was_ended_is_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("locks/gc", b"")
    with gc.alone(store) as mine:
        assert not mine
    monkeypatch.setattr(gc, "LOCK_SECONDS", -1)
    with gc.alone(store) as mine:
        assert mine


def test_of_two_that_find_the_same_stale_lock_one_collects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins between the first one's look at the locks and what it does then."""
    store.put("locks/gc", b"")
    monkeypatch.setattr(gc, "LOCK_SECONDS", 1)
    time.sleep(1.1)
    sizes, holds, second = store.sizes, [], contextlib.ExitStack()

    def listed(prefix: str) -> Any:
        found = sizes(prefix)
        monkeypatch.setattr(store, "sizes", sizes)
        holds.append(second.enter_context(gc.alone(store)))
        return found

    monkeypatch.setattr(store, "sizes", listed)
    with gc.alone(store) as mine, second:
        assert [*holds, mine].count(True) == 1
    assert not list(store.sizes("locks"))
