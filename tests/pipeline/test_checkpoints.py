"""Checkpoints: whole or absent, two kept, a damaged one falls back to the one before."""

import json

import pytest

from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.storage import StoreFull, open_store
from cuda_agent.tracking import FileTracker, read_metrics, read_notes


@pytest.fixture
def make(tmp_path):
    """A new attempt at the same stage: fresh scratch, the same store."""
    count = 0

    def attempt():
        nonlocal count
        count += 1
        scratch = tmp_path / f"attempt-{count}"
        scratch.mkdir()
        tracker = FileTracker(scratch / "said")
        return StageCheckpoints(open_store(tmp_path / "store"), "train", "key", scratch, tracker), tracker, scratch

    return attempt


def writer(value):
    def write(folder):
        (folder / "deep").mkdir()
        (folder / "deep" / "state.json").write_text(json.dumps(value))
        (folder / "weights.bin").write_bytes(b"w" * 1000)

    return write


class Reader:
    value = None

    def __call__(self, folder):
        assert sorted(path.name for path in folder.iterdir()) == ["deep", "weights.bin"]
        self.value = json.loads((folder / "deep" / "state.json").read_text())


def entries(tmp_path):
    return [key for key in open_store(tmp_path / "store").list("checkpoints") if key.count("/") == 3]


def test_the_newest_comes_back_with_what_it_knew(make):
    checkpoints, tracker, _ = make()
    for step in range(4):
        tracker.log(step, {"loss": step})
        checkpoints.save(step, writer(step))
    tracker.log(4, {"loss": 4})
    again, tracker, scratch = make()
    tracker.log(0, {"loss": 99})
    read = Reader()
    assert again.load(read) == 3 and read.value == 3
    assert list(read_metrics(scratch / "said" / "metrics.jsonl").items()) == [(s, {"loss": s}) for s in range(4)]
    assert again.resumed == [3]


def test_two_are_kept(make, tmp_path):
    checkpoints, _, _ = make()
    for step in range(5):
        checkpoints.save(step, writer(step))
    assert [key.split("/")[-1].split("-")[0] for key in entries(tmp_path)] == ["00000003", "00000004"]
    files = [key for key in open_store(tmp_path / "store").list("checkpoints") if key.endswith("weights.bin")]
    assert len(files) == 2


def test_none_is_none(make):
    assert make()[0].load(Reader()) is None


@pytest.mark.parametrize("damage", ["bytes", "missing", "index", "truncated"])
def test_a_damaged_one_is_noted_and_the_one_before_is_used(make, tmp_path, damage):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    checkpoints.save(2, writer("two"))
    store = open_store(tmp_path / "store")
    newest = entries(tmp_path)[-1]
    weights = newest.removesuffix(".json") + "/weights.bin"
    match damage:
        case "bytes":
            store.put(weights, b"W" * 1000)
        case "missing":
            store.delete(weights)
        case "index":
            store.put(newest, b"{not json")
        case "truncated":
            store.put(weights, b"w" * 10)
    again, _, scratch = make()
    read = Reader()
    assert again.load(read) == 1 and read.value == "one"
    (note,) = read_notes(scratch / "said" / "notes.jsonl")
    assert "damaged" in note and "00000002" in note
    assert len(entries(tmp_path)) == 1


def test_when_all_are_damaged_the_stage_starts_from_nothing(make, tmp_path):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    open_store(tmp_path / "store").put(entries(tmp_path)[0], b"")
    assert make()[0].load(Reader()) is None


def test_a_save_that_never_finished_is_invisible_and_swept(make, tmp_path):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    open_store(tmp_path / "store").put("checkpoints/train/key/00000002-dead/weights.bin", b"half")
    again, _, _ = make()
    assert again.load(Reader()) == 1
    again.save(2, writer("two"))
    assert not [key for key in open_store(tmp_path / "store").list("checkpoints") if "dead" in key]


def test_a_store_that_fills_up_during_a_save_leaves_the_one_before(make, monkeypatch):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    broken, _, _ = make()

    def full(key, path):
        raise StoreFull("full")

    monkeypatch.setattr(broken._store, "put", full)
    with pytest.raises(StoreFull):
        broken.save(2, writer("two"))
    assert make()[0].load(Reader()) == 1


def test_errors_of_reading_belong_to_the_stage(make):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))

    def read(folder):
        raise KeyError("no optimizer")

    with pytest.raises(KeyError):
        make()[0].load(read)


def test_the_same_step_saved_again_counts_once(make, tmp_path):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    checkpoints.save(2, writer("two"))
    checkpoints.save(2, writer("two again"))
    read = Reader()
    assert make()[0].load(read) == 2 and read.value == "two again"


def test_clearing_removes_everything(make, tmp_path):
    checkpoints, _, _ = make()
    checkpoints.save(1, writer("one"))
    checkpoints.clear()
    assert open_store(tmp_path / "store").list("checkpoints") == []
