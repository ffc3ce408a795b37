"""Runs and collections keep out of each other's way, whoever begins first."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.errors import TryAgain
from cuda_agent.pipeline import locks
from cuda_agent.pipeline.locks import collecting, using
from cuda_agent.pipeline.manifest import Manifest, commit, serve_from_cache
from cuda_agent.storage import Store, open_store
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def test_one_collector_at_a_time_and_its_lock_goes_after_an_error_too(store: Store) -> None:
    with collecting(store) as busy:
        assert busy == ""
        with collecting(store) as second:
            assert second == "Another collection is under way."
        assert store.list("locks"), "a refused collector leaves the lock"
        with pytest.raises(TryAgain, match="gc"), using(store, patience=-1.0):
            raise AssertionError
    with pytest.raises(KeyError), collecting(store):
        raise KeyError
    with using(store):
        assert len(store.list("locks")) == 1
    assert store.list("locks") == []


def test_a_collection_waits_for_runs_and_runs_for_a_collection(store: Store) -> None:
    order: list[str] = []

    def collect() -> None:
        with collecting(store) as busy:
            order.append(f"collects{busy}")
            time.sleep(0.3)
            order.append("has collected")

    def use() -> None:
        with using(store):
            order.append("uses")

    with using(store):
        collector = threading.Thread(target=collect)
        collector.start()
        wait_for("the collector's lock", 30, lambda: any("/gc-" in key for key in store.list("locks")))
        user = threading.Thread(target=use)
        user.start()
        time.sleep(0.2)
        assert order == []
    collector.join()
    user.join()
    assert order == ["collects", "has collected", "uses"]


def test_a_run_that_stores_for_long_keeps_a_collection_from_removing(store: Store) -> None:
    with using(store), collecting(store, patience=-1.0) as busy:
        assert "storing results" in busy


def test_locks_of_killed_processes_are_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("locks/gc-a", b"")
    store.put("locks/use-b", b"")
    with collecting(store) as busy:
        assert busy == "Another collection is under way."
    monkeypatch.setattr(locks, "COLLECTION_SECONDS", -1)
    monkeypatch.setattr(locks, "USE_SECONDS", -1)
    with collecting(store) as busy:
        assert busy == ""
    assert store.list("locks") == []


def test_of_two_collectors_that_begin_together_at_most_one_collects(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins between the first one's lock and its look at the others."""
    sizes, second, found = store.sizes, contextlib.ExitStack(), []

    def listed(prefix: str) -> Any:
        monkeypatch.setattr(store, "sizes", sizes)
        found.append(second.enter_context(collecting(store)))
        return sizes(prefix)

    monkeypatch.setattr(store, "sizes", listed)
    with collecting(store) as busy, second:
        assert [busy, *found].count("") <= 1
    assert store.list("locks") == []


def test_a_result_that_a_collection_has_hit_is_stored_again(store: Store, tmp_path: Path) -> None:
    """The file was in the store before, so the stage did not upload it; then a collection removed it."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").write_text("weights")
    digest = store.put_folder(folder)
    made = Manifest("rft", "r", "k", "c", "e", None, "s", {}, {"policy": digest}, digest, 1.0, "2026-01-01")
    for key in store.list("cas"):
        store.delete(key)
    commit(store, "r", made, {digest: folder})
    assert store.has_folder(digest) and store.list("locks") == []


def test_a_result_is_taken_while_no_collection_can_remove_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(
        "cuda_agent.pipeline.manifest.find_result", lambda *_: held.append(len(store.list("locks"))) or None
    )
    identity: Any = None
    assert serve_from_cache(store, "r", identity) is None and held == [1]
