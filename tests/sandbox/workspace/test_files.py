"""The file tools on a folder, hostile content included; no process is started."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.sandbox.workspace.files import FILE_BYTES, FILES, Folder, ToolRefused, disk_use


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    made = Folder(str(tmp_path / "work"), {"model.py": "task\n", "SKILL.md": "rules\n", "extra.md": None})
    made.fill({"model.py": "task\n", "SKILL.md": "rules\n", "notes.txt": "one\ntwo\nthree\n"})
    return made


def refusal(action, *arguments, **named):
    with pytest.raises(ToolRefused) as refused:
        action(*arguments, **named)
    return str(refused.value)


def test_write_then_read(folder):
    assert folder.write("kernels/a.cpp", "x\n") == "ok"
    assert folder.read("kernels/a.cpp") == "x\n"
    assert folder.read("~/kernels/a.cpp") == folder.read(folder.root + "/kernels/a.cpp") == "x\n"
    assert folder.read("notes.txt", offset=2, limit=1) == "two\n"


def test_a_file_that_exists_must_have_been_read_before_it_is_changed(folder):
    assert refusal(folder.write, "notes.txt", "x") == "read notes.txt first"
    assert refusal(folder.edit, "notes.txt", "one", "1") == "read notes.txt first"
    folder.read("notes.txt")
    assert folder.edit("notes.txt", "one", "1") == "ok"
    assert folder.write("notes.txt", "new") == "ok"


def test_a_file_that_changed_since_must_be_read_again(folder):
    folder.read("notes.txt")
    with open(folder.root + "/notes.txt", "a") as file:
        file.write("four\n")
    assert refusal(folder.write, "notes.txt", "x") == "notes.txt has changed: read it again"
    folder.read("notes.txt")
    assert folder.edit("notes.txt", "four", "4") == "ok"


def test_an_edit_needs_text_that_occurs_once(folder):
    folder.write("a", "x x y")
    assert refusal(folder.edit, "a", "z", "1") == "old_string not found in a"
    assert refusal(folder.edit, "a", "", "1") == "old_string not found in a"
    assert refusal(folder.edit, "a", "x", "1") == "old_string occurs 2 times in a"
    assert refusal(folder.edit, "a", "y", "y") == "old_string and new_string are the same"
    assert refusal(folder.edit, "b", "y", "z") == "b does not exist"
    assert folder.edit("a", "x", "z", replace_all=True) == "ok"
    assert folder.read("a") == "z z y"


def test_several_edits_are_made_in_order_or_not_at_all(folder):
    folder.write("a", "1 2 3")
    good = {"old_string": "1", "new_string": "one"}
    assert refusal(folder.multi_edit, "a", [good, {"old_string": "9", "new_string": ""}]).startswith("edit 2: ")
    assert folder.read("a") == "1 2 3"
    folder.multi_edit("a", [good, {"old_string": "one 2", "new_string": "12"}])
    assert folder.read("a") == "12 3"
    assert refusal(folder.multi_edit, "a", [good | {"new_string": "x" * (FILE_BYTES + 1), "old_string": "12"}])
    assert folder.read("a") == "12 3"
    assert sorted(os.listdir(folder.root)) == ["SKILL.md", "a", "model.py", "notes.txt"]


@pytest.mark.parametrize("path", ["model.py", "./kernels/../model.py", "SKILL.md", "extra.md", "alias"])
def test_protected_files_are_refused_by_every_name(folder, path):
    os.symlink("model.py", folder.root + "/alias")
    assert refusal(folder.write, path, "x").endswith("is protected")
    assert refusal(folder.edit, path, "task", "x").endswith("is protected")


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "link/x", "a/../../x", "", "x\0y", "x\ny", "x" * 2000, "~root"]
)
def test_paths_out_of_the_folder_are_refused(folder, path):
    os.symlink("/tmp", folder.root + "/link")
    refusal(folder.read, path)
    if path != "~root":  # a file of this name is as good as any
        refusal(folder.write, path, "x")


def test_what_is_no_text_file_is_refused(folder):
    os.mkfifo(folder.root + "/fifo")
    os.symlink("/dev/zero", folder.root + "/zero")
    with open(folder.root + "/binary", "wb") as file:
        file.write(b"\xff\xfe\0")
    with open(folder.root + "/huge", "wb") as file:
        file.truncate(1 << 40)
    for path in ("fifo", "zero", "binary", "huge", "."):
        refusal(folder.read, path)
    assert refusal(folder.write, "a", "\ud800") == "the content is not text"
    assert refusal(folder.write, "a", "x" * (FILE_BYTES + 1)).endswith("bytes")
    assert refusal(folder.write, "notes.txt/a", "x")
    assert set(folder.collect()) == {"model.py", "SKILL.md", "notes.txt"}


def test_the_folder_is_handed_over_within_limits_shallow_files_first(folder):
    os.makedirs(folder.root + "/" + "d/" * 30)
    for n in range(FILES + 50):
        with open(f"{folder.root}/d/{n}", "w") as file:
            file.write("x")
    folder.write("plan.json", "{}")
    files = folder.collect()
    assert len(files) == FILES and {"plan.json", "notes.txt", "model.py"} <= set(files)
    assert folder.collect() == files
    assert disk_use(folder.root, 10_000) < 50_000 < disk_use(folder.root, 1 << 30)


def test_protected_files_come_back_whatever_was_put_in_their_place(folder):
    for spoil in (
        lambda path: open(path, "w").close(),
        os.unlink,
        lambda path: (os.unlink(path), os.symlink("/etc/passwd", path)),
        lambda path: (os.unlink(path), os.makedirs(path + "/deep/er")),
        lambda path: (os.unlink(path), os.mkfifo(path)),
    ):
        spoil(folder.root + "/model.py")
        assert folder.collect()["model.py"] == "task\n"
        assert folder.restore() == ["model.py"]
        assert folder.read("model.py") == "task\n" and folder.restore() == []
    with open(folder.root + "/extra.md", "w") as file:
        file.write("x")
    assert folder.restore() == ["extra.md"] and not os.path.exists(folder.root + "/extra.md")


def test_glob_matches_by_parts(folder):
    for path in ("kernels/a.cpp", "kernels/b.h", "kernels/deep/c.cpp", "d.cpp"):
        folder.write(path, "x")
    assert folder.glob("*.cpp") == "d.cpp"
    assert folder.glob("kernels/*.cpp") == folder.glob("*.cpp", "kernels").replace("\n", "") == "kernels/a.cpp"
    assert folder.glob("**/*.cpp").split() == ["d.cpp", "kernels/a.cpp", "kernels/deep/c.cpp"]
    assert folder.glob("kernels/**").split() == ["kernels/a.cpp", "kernels/b.h", "kernels/deep/c.cpp"]
    assert folder.glob("nothing") == "(no matches)"
    refusal(folder.glob, "../*", "..")
    refusal(folder.glob, "*/" * 100)


def test_a_pattern_cannot_take_for_ever(folder):
    folder.write("a" * 200, "x")
    assert folder.glob("*a" * 60 + "b") == "(no matches)"
    assert folder.glob("**/" * 11 + "*").count("\n") == 3


NAMES = st.sampled_from(["a", "b.cpp", "kernels/a", "model.py", "../up", "d"])
TEXTS = st.text(alphabet="ab\n", max_size=8)
STEP = st.one_of(
    st.tuples(st.just("write"), NAMES, TEXTS),
    st.tuples(st.just("read"), NAMES),
    st.tuples(st.just("edit"), NAMES, TEXTS, TEXTS),
)


@given(st.lists(STEP, max_size=12))
def test_whatever_the_tools_do_they_agree_with_a_dictionary(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("work")
    folder = Folder(str(root), {"model.py": "task"})
    folder.fill({"model.py": "task"})
    expected = {"model.py": "task"}
    for step, name, *rest in steps:
        try:
            getattr(folder, step)(name, *rest)
        except ToolRefused:
            continue
        assert name != "../up"
        if step == "write":
            expected[name] = rest[0]
        elif step == "edit":
            assert expected[name].count(rest[0]) == 1 and rest[0] != rest[1]
            expected[name] = expected[name].replace(*rest)
    assert folder.collect() == expected
