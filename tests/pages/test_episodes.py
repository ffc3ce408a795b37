"""Episodes as a person sees them: what is listed, what a story tells, and a page that stays text whatever was said."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cuda_agent.agent.loop import EpisodeSettings, run_episode
from cuda_agent.cli import main
from cuda_agent.compose import freeze
from cuda_agent.config import Config, SandboxConfig
from cuda_agent.errors import ConfigError
from cuda_agent.pages.episode_story import MOST_TURNS, EpisodeEntry, of_attempt, of_episode, token_texts
from cuda_agent.pages.episodes import LARGEST, SHADES, render
from cuda_agent.pipeline import episodes, runs
from cuda_agent.pipeline.manifest import Manifest, config_entry, manifest_entry
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.episode import Episode, write_episodes
from cuda_agent.policy.model import train_tokenizer
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.storage import open_store
from tests import made_once
from tests.agent.agent_cases import CODE, KERNEL, PLAN, PROFILE, TASK, VERIFY, WRITE_PLAN, call, scripted
from tests.chromium import PROGRAM, Page, browser
from tests.pages.report_inputs import make_inputs
from tests.pages.test_report import Page as Parsed

HOSTILE = (
    "</script></code></pre><script>alert(1)</script><img src=x onerror=alert(2)>\"' onclick=x \x1b[2J\u202egnp\udc80"
)
WRONG = KERNEL.replace("+ 0.5f", "+ 0.6f")
TURNS = [
    "I fuse both.\n" + call("Write", path="kernels/fused.cpp", content=WRONG) + "\n" + WRITE_PLAN,
    VERIFY,
    "<think>The constant.</think>" + call("Edit", path="kernels/fused.cpp", old_string="0.6f", new_string="0.5f"),
    call("Edit", path="kernels/fused.cpp", old_string="nothing", new_string="like this"),
    PROFILE,
    "Done.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CODE, KERNEL, PLAN, *TURNS, "verify: ok wrong build error profile: eager ünïcödé"], 420)


@pytest.fixture(scope="module")
def played(tokenizer, tmp_path_factory) -> Episode:
    """An episode that was really played, in the real sandbox."""
    chat = Chat(tokenizer, "compact")
    settings = EpisodeSettings(
        turns=8, turn_tokens=2000, tool_tokens=60, context=8000, deadline_seconds=120, style="compact"
    )

    async def work() -> Episode:
        cache = made_once.share(tmp_path_factory.mktemp("cache"))
        async with LocalSandbox(SandboxConfig(clock="model"), cache) as sandbox:
            return await run_episode(TASK, scripted(chat, TURNS), chat, sandbox, settings, 7, "heldout/0/relu_add/0")

    return asyncio.run(work())


@pytest.fixture(scope="module")
def kept(played, tokenizer, tmp_path_factory) -> Path:
    """A store with one finished run, two of whose stages have left episodes."""
    folder = tmp_path_factory.mktemp("kept")
    store = open_store(folder / "store")
    text, sha256 = freeze(Config())
    store.put(config_entry(sha256), text.encode())
    store.put("runs/one/run.json", runs.Run.begun("one", Config(), sha256, "ada").to_bytes())
    tokenizer.save_pretrained(folder / "policy")
    policy = store.put_folder(folder / "policy")
    lost = replace(played, id="train/1/lost/0", task="lost", reward=None, verdict=None, best=None, ended="infra")
    wrong = Verdict("wrong", "plan", "quick", "cpu", "model", message="output 0 differs").to_json()
    bad = replace(played, id="train/0/tanh-0001/0", task="tanh-0001", reward=-1.0, verdict=wrong, flags=["loop"])
    for stage, artifact, held in (("collect", "episodes", [bad, lost]), ("evaluate-base", "scores", [played])):
        (folder / stage).mkdir()
        write_episodes(folder / stage / "episodes.jsonl", held)
        made = Manifest(
            stage=stage, run="one", key="k", code="c", environment="e", device=None, config=sha256,
            inputs={"policy": policy}, outputs={artifact: store.put_folder(folder / stage)}, metrics="m", seconds=1.0,
            finished="2026-01-01T00:00:00+00:00",
        )  # fmt: skip
        store.put(manifest_entry("one", stage), made.to_bytes())
    return folder / "store"


def ask(*arguments):
    result = CliRunner().invoke(main.app, ["episodes", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def listed(kept, *more):
    return json.loads(ask("one", "--store", kept, "--json", *more))


def test_a_runs_episodes_are_listed_newest_first(kept, played):
    rows = listed(kept)
    assert [(row["stage"], row["task"], row["status"]) for row in rows] == [
        ("collect", "lost", "lost"), ("collect", "tanh-0001", "wrong"), ("evaluate-base", "relu_add", "ok"),
    ]  # fmt: skip
    best = rows[2]
    assert best["reward"] == played.reward and best["tokens"] == sum(played.mask) and best["turns"] == 6
    assert rows[0]["logprob"] == -1.0, "as the scripted engine says"
    text = ask("one", "--store", kept)
    assert "tanh-0001" in text and "(loop)" in text and text.endswith("3 of 3 episodes\n")


def test_they_are_filtered_and_sorted(kept):
    def tasks(*asked):
        return [row["task"] for row in listed(kept, *asked)]

    assert tasks("--stage", "collect", "--sort", "oldest") == ["tanh-0001", "lost"]
    assert tasks("--task", "tanh") == tasks("--status", "wrong") == ["tanh-0001"]
    assert tasks("--min-reward", "1") == ["relu_add"]
    assert tasks("--sort", "best") == ["relu_add", "tanh-0001", "lost"]
    assert tasks("--sort", "worst") == ["lost", "tanh-0001", "relu_add"]
    assert tasks("--task", "none of them") == []
    assert "1 are not listed" in ask("one", "--store", kept, "--most", "2")


def all_of(kept: Path) -> list[EpisodeEntry]:
    store = open_store(kept)
    return episodes.listed(episodes.of_run(store, runs.read_run(store, "one"), kept.parent / "fetched"))


def test_a_stage_or_a_status_that_does_not_occur_is_answered_with_those_that_do(kept):
    entries = all_of(kept)
    with pytest.raises(ConfigError, match="there are evaluate-base, collect"):
        episodes.chosen(entries, stage="agentic")
    with pytest.raises(ConfigError, match="there are ok, wrong, lost"):
        episodes.chosen(entries, status="cheat")


def test_an_attempt_shows_each_call_with_what_came_of_it():
    calls = [("Write", {"path": "k.cpp", "content": "x"}), ("Bash", {"command": "verify"}), ("Bash", {"command": "ls"})]
    asked = [{"id": str(n), "name": name, "arguments": given} for n, (name, given) in enumerate(calls)]
    said = {"role": "assistant", "content": "I try.", "tool_calls": asked}
    results = [{"role": "tool", "content": text} for text in ("ok", "verify: wrong", "k.cpp")]
    wrong = {"status": "wrong", "message": "check 1", "mode": "quick"}
    tool = [
        {"kind": "diff", "path": "k.cpp", "text": "@@\n+x", "added": 1, "removed": 0},
        {"kind": "result", "error": ""},
        {"kind": "verdict", "command": "verify", "verdict": wrong, "factor": None, "files": {}},
        {"kind": "result", "error": "verify: wrong"},
        {"kind": "result", "error": ""},
    ]
    events = [{"kind": "turn", "turn": 0}, {"kind": "message", "message": said}, *tool]
    events += [{"kind": "message", "message": message} for message in results]
    events += [{"kind": "note", "text": "the server was busy"}]

    def shown(events):
        (turn,) = of_attempt([event | {"attempt": 1} for event in events], 1).turns
        return [(part.kind, part.good) for part in turn.parts]

    assert shown(events) == [
        ("said", None), ("call", None), ("diff", None), ("call", False), ("verdict", False), ("result", False),
        ("call", None), ("result", None), ("note", None),
    ]  # fmt: skip
    older = [event for event in events if event["kind"] != "result"]
    assert [kind for kind, _ in shown(older)][-3:] == ["diff", "verdict", "note"] and ("call", False) in shown(older)


def test_a_story_tells_turns_thoughts_calls_results_and_differences(played, tokenizer):
    story = of_episode(played, tokenizer.backend_tokenizer)
    kinds = [[part.kind for part in turn.parts] for turn in story.turns]
    assert kinds == [
        ["said", "sampled", "call", "diff", "call", "diff"],
        ["sampled", "call", "result"],
        ["thought", "sampled", "call", "diff"],
        ["sampled", "call", "call", "result"],
        ["sampled", "call", "result"],
        ["said", "sampled"],
    ]
    mended = story.turns[2].parts[-1]
    assert mended.title == "kernels/fused.cpp +1 −1"
    assert [line[0] for line in mended.text.splitlines() if "x[i] > 0" in line] == ["-", "+"]
    refused = story.turns[3].parts
    assert "new_string: like this" in refused[2].text
    assert refused[1].title.startswith("Edit") and refused[1].good is refused[3].good is False
    assert "error: old_string not found" in refused[3].text
    assert [role for role, _ in story.opening] == ["system", "user"]
    assert story.files["kernels/fused.cpp"] == KERNEL and story.verdict["status"] == "ok"


def test_tokens_are_the_text_that_was_sampled(played, tokenizer):
    for turn in of_episode(played, tokenizer.backend_tokenizer).turns:
        (sampled,) = [part for part in turn.parts if part.kind == "sampled"]
        assert "".join(text for text, _ in sampled.tokens) == TURNS[turn.number - 1] + "<|im_end|>"
    ids = tokenizer.encode("für 数字 🎉", add_special_tokens=False)
    tokens = token_texts(ids, [-0.5] * len(ids), tokenizer.backend_tokenizer)
    assert "".join(text for text, _ in tokens) == "für 数字 🎉"
    assert sum(logprob for _, logprob in tokens) == pytest.approx(-0.5 * len(ids)), "bytes of a character are one"
    assert token_texts([7], [-0.5], None) == [("⟨7⟩", -0.5)]


def test_a_benchmarks_tokens_are_text_where_its_tokenizer_lies_beside_them(played, tokenizer, tmp_path):
    def sampled() -> str:
        (entry,) = episodes.of_path(tmp_path)
        return "".join(text for part in entry.story().turns[0].parts for text, _ in part.tokens)

    write_episodes(tmp_path / "episodes.jsonl", [played])
    assert sampled().startswith("⟨")
    tokenizer.save_pretrained(tmp_path)
    assert sampled() == TURNS[0] + "<|im_end|>"


def test_a_servers_episode_has_no_tokens_and_keeps_its_thoughts(played):
    zeros = [0] * len(played.ids)
    visit = replace(played, ids=zeros, logprobs=[0.0] * len(zeros), messages=[dict(m) for m in played.messages])
    visit.messages[2]["thought"] = "Let me see."
    story = of_episode(visit)
    assert not any(part.kind == "sampled" for turn in story.turns for part in turn.parts)
    assert story.turns[0].parts[0].text == "Let me see."


def page_of(found: list[EpisodeEntry], **more) -> str:
    return render("run one", found, len(found), "sorted by newest", **more)


def entries_of(folder: Path, held: list[Episode]) -> list[EpisodeEntry]:
    write_episodes(folder / "episodes.jsonl", held)
    return episodes.of_path(folder)


def script_of(page: str) -> str:
    (script,) = re.findall("<script>(.*?)</script>", page, re.S)
    return script


def inert(page: str) -> Parsed:
    """Nothing but the page's own script runs, nothing is loaded, every link leads into the page."""
    parsed = Parsed(page)
    assert parsed.tags.isdisjoint({"img", "iframe", "object", "embed", "link", "form", "base", "svg"})
    assert len(re.findall("<script", page)) == len(re.findall("</script", page)) == 1
    assert "innerHTML" not in page and "eval" not in script_of(page)
    for name, value in parsed.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "srcset", "action", "formaction")
        assert name != "href" or (value.startswith("#") and value[1:] in parsed.ids), value
    assert len(set(parsed.ids)) == len(parsed.ids)
    return parsed


def test_the_page_shows_all_of_it(kept, played):
    page = page_of(all_of(kept))
    text = inert(page).text
    for part in ("33.3 % correct", "tanh-0001", "I fuse both.", "The constant.", "kernels/fused.cpp +1 −1", "loop",
                 "verify: wrong", "error: old_string not found", "as sampled, -1.00 nats each", "95 % or more",
                 "the sandbox failed", f"reward {played.reward:g}", "output 0 differs", "checks pa"):  # fmt: skip
        assert part in text.replace("\u202f", " "), part
    assert page.count('<article class="episode"') == 3
    shade = next(i for i, (lowest, _) in enumerate(SHADES) if lowest <= -1.0)
    assert f'<i class="k{shade}" title="-1.00">' in page


def test_whatever_a_model_wrote_stays_text(played, tmp_path):
    poisoned = replace(
        played, id=HOSTILE, task=HOSTILE, ended=HOSTILE, flags=[HOSTILE],
        files={HOSTILE: HOSTILE, "kernels/x.cpp": HOSTILE},
        verdict=Verdict("crash", "plan", "quick", HOSTILE, "real", message=HOSTILE).to_json(),
        messages=[
            {"role": HOSTILE, "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE + "</think>" + HOSTILE, "thought": HOSTILE, "tool_calls": [
                {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE, "b": [HOSTILE]}},
                {"name": "Write", "arguments": {"path": HOSTILE, "content": HOSTILE}},
                {"name": "MultiEdit", "arguments": {"path": "x", "edits": HOSTILE}},
                {"name": "Edit", "arguments": None},
            ]},
            {"role": "tool", "content": HOSTILE}, {"role": "tool", "content": "ok"},
            {"role": "tool", "content": "error: " + HOSTILE}, {"role": HOSTILE, "content": None},
        ],
    )  # fmt: skip
    page = page_of(entries_of(tmp_path, [poisoned]))
    text = inert(page).text
    assert "<script>alert(1)</script>" in text, "it can be read"
    assert "\u202e" not in page and "⟨U+202E⟩gnp" in text and "\x1b" not in page and "␛[2J" in text
    page.encode()  # half a surrogate pair could not be written
    listing, lines = ask(tmp_path), ask(tmp_path, "--json")
    for bad in ("\x1b", "\u202e", "\udc80"):
        assert bad not in listing and bad not in lines
    assert listing.count("\n") == 3 and json.loads(lines)[0]["task"] == HOSTILE


def test_the_pages_policy_allows_its_own_script_alone(played, tmp_path):
    import base64
    import hashlib

    page = page_of(entries_of(tmp_path, [played]))
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    digest = base64.b64encode(hashlib.sha256(script_of(page).encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )


def test_a_page_of_hundreds_stays_bounded_and_says_so(played, tmp_path):
    page = page_of(entries_of(tmp_path, [replace(played, id=str(n)) for n in range(500)]))
    assert page.count('<article class="episode"') == 200 and len(page) < LARGEST
    assert "500 episodes were asked for" in page and "first 200 of them" in page
    long = [{"role": "assistant", "content": "x" * 5000}, {"role": "user", "content": "y" * 5000}] * MOST_TURNS * 2
    page = page_of(entries_of(tmp_path, [replace(played, messages=long)] * 100))
    assert len(page) < LARGEST + (1 << 20) and "Not all." in page and "earlier turns left out" in page


def test_a_text_of_any_length_and_a_file_of_any_size_are_cut(played, tmp_path):
    write = {"name": "Write", "arguments": {"path": "a.cpp", "content": "int x;\n" * 300_000}}
    messages = [{"role": "assistant", "content": "z" * 3_000_000, "tool_calls": [write, write]}]
    messages += [{"role": "tool", "content": "ok"}, {"role": "tool", "content": "q" * 3_000_000}]
    huge = replace(played, messages=messages, files={"kernels/a.cpp": "int x;\n" * 300_000})
    assert len(page_of(entries_of(tmp_path, [huge]))) < 400_000


def test_without_an_episode_the_page_says_so():
    assert "No episode." in inert(page_of([])).text


def test_scores_of_a_benchmark_are_a_folder_of_episodes(tmp_path):
    inputs = make_inputs(tmp_path)
    rows = json.loads(ask(inputs["scores-rft"], "--json", "--sort", "best"))
    assert len(rows) == 30 and rows[0]["speedup"] == max(row["speedup"] or 0 for row in rows if row["reward"] == 3)
    with pytest.raises(ConfigError, match=r"expected transcript.jsonl"):
        episodes.of_path(tmp_path / "tasks")


def transcript(folder: Path) -> Path:
    """Of two attempts at one task, the second without success."""
    folder.mkdir()
    good = Verdict("ok", "plan", "quick", "cpu", "real", seconds=1e-4, eager_seconds=3e-4, compile_seconds=2e-4)
    call = {"id": "c", "name": "Bash", "arguments": {"command": "profile <now>"}}
    said = {"role": "assistant", "content": "I fuse <both>.", "tool_calls": [call]}
    events = [
        {"kind": "begin", "attempt": 0, "task": "relu"},
        {"kind": "message", "attempt": 1, "message": {"role": "user", "content": "Optimise it."}},
        {"kind": "turn", "attempt": 1, "turn": 0, "last": False},
        {"kind": "message", "attempt": 1, "message": said, "thought": "Memory bound."},
        {"kind": "diff", "attempt": 1, "path": "k.cpp", "text": "@@ -0,0 +1 @@\n+int x;", "added": 1, "removed": 0},
        {"kind": "verdict", "attempt": 1, "command": "profile", "verdict": good.to_json(), "files": {"k.cpp": "int x;"},
         "factor": 2.0},
        {"kind": "message", "attempt": 1, "message": {"role": "tool", "content": "profile: 3.0x eager"}},
        {"kind": "ended", "attempt": 1, "why": "target", "summary": ""},
        {"kind": "turn", "attempt": 2, "turn": 0, "last": False},
        {"kind": "note", "attempt": 2, "text": "the work folder was lost"},
        {"kind": "ended", "attempt": 2, "why": "turns", "summary": ""},
        {"kind": "spent", "attempt": 2, "prompt": 10, "sampled": 20, "estimated": False, "cost": 0, "seconds": 1},
    ]  # fmt: skip
    text = "".join(json.dumps({"at": 0.0} | event) + "\n" for event in events)
    (folder / "transcript.jsonl").write_text(text)
    return folder


def test_a_folder_of_optimize_shows_its_attempts(tmp_path):
    folder = transcript(tmp_path / "relu-optimized")
    rows = json.loads(ask(folder, "--json", "--sort", "oldest"))
    assert [(r["id"], r["status"], r["speedup"], r["ended"]) for r in rows] == [
        ("attempt 1", "ok", 2.0, "target"), ("attempt 2", "no_answer", None, "turns"),
    ]  # fmt: skip
    assert ask(folder, "--output", tmp_path / "a" / "page.html").strip() == str(tmp_path / "a" / "page.html")
    text = inert((tmp_path / "a" / "page.html").read_text()).text
    for part in ("Memory bound.", "I fuse <both>.", "profile <now>", "+int x;", "correct, 2.00×", "Optimise it.",
                 "the work folder was lost", "reward 3"):  # fmt: skip
        assert part in text, part


def test_an_attempt_without_a_correct_solution_shows_the_files_of_the_verdict_in_its_row(tmp_path):
    def failed(status, text):
        said = Verdict(status, "plan", "quick", "cpu", "real", message="no").to_json()
        return {"kind": "verdict", "attempt": 1, "verdict": said, "files": {"k.cpp": text}, "factor": None}

    events = [failed("build_error", "int first;"), failed("wrong", "int last;")]
    (entry,) = episodes.attempts(events)
    story = entry.story()
    assert entry.row.status == story.verdict["status"] == "build_error" and story.files == {"k.cpp": "int first;"}


def refused(*arguments) -> str:
    result = CliRunner().invoke(main.app, ["episodes", *map(str, arguments)])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path):
    folder = transcript(tmp_path / "relu-optimized")
    for page in (Path("/proc/x.html"), tmp_path):
        assert re.fullmatch(f"{page}: cannot be written: [^\n]+", refused(folder, "--output", page))


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b'{"kind": "turn"}\n'])
def test_a_transcript_of_anything_else_is_said_in_one_line(tmp_path, content):
    (tmp_path / "transcript.jsonl").write_bytes(content)
    assert re.fullmatch(r".*transcript.jsonl: no attempts \([^\n]+\)", refused(tmp_path))


def test_a_folder_without_a_result_is_blamed_and_not_the_store(tmp_path, monkeypatch):
    (tmp_path / "e").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert refused("../e") == episodes.no_result(Path("../e"))
    assert refused("../nothing") == "../nothing: there is no such folder or file"
    (tmp_path / "here" / "e").mkdir()
    folder, store = refused("e").splitlines()  # may also be the beginning of a run's name
    assert folder == episodes.no_result(Path("e")) and store.startswith("There is no store at ")


def test_a_search_that_began_no_attempt_says_so(tmp_path):
    (tmp_path / "transcript.jsonl").write_text('{"kind": "begin", "attempt": 0, "task": "relu"}\n')
    assert ask(tmp_path).strip() == "no attempts: the search has begun none"


# In a browser ---------------------------------------------------------------------------------------------------------


def in_browser(test):
    return pytest.mark.browser(pytest.mark.skipif(PROGRAM is None, reason="no Chromium")(test))


@pytest.fixture
def opened(kept, tmp_path):
    file = tmp_path / "page.html"
    ask("one", "--store", kept, "--output", file)
    with browser(1200, 1000) as page:
        page.open(file.as_uri())
        page.shows("3 of 3")
        yield page


def shown(page: Page) -> list[str]:
    script = "[...document.querySelectorAll('.episode:not([hidden]) .task')].map(e => e.textContent)"
    return page.ask(script)


def put(page: Page, name: str, value: str) -> None:
    page.ask(f"document.getElementById('{name}').value = {json.dumps(value)}")
    page.ask(f"document.getElementById('{name}').dispatchEvent(new Event('input'))")


@in_browser
def test_it_searches_filters_and_sorts(opened):
    assert shown(opened) == ["lost", "tanh-0001", "relu_add"]
    put(opened, "search", "OUTPUT 0 differs")
    assert shown(opened) == ["tanh-0001"] and "1 of 3" in opened.text()
    put(opened, "search", "")
    put(opened, "status", "ok")
    assert shown(opened) == ["relu_add"]
    put(opened, "status", "")
    put(opened, "least", "-1")
    assert shown(opened) == ["tanh-0001", "relu_add"]
    put(opened, "least", "")
    put(opened, "sort", "reward")
    assert shown(opened) == ["relu_add", "tanh-0001", "lost"]


@in_browser
def test_a_link_opens_its_episode(opened):
    assert "I fuse both." not in opened.text()
    opened.ask("location.hash = '#episode-3'")
    opened.shows("I fuse both.", "kernels/fused.cpp +1 −1")
    assert opened.ask("document.querySelectorAll('.episode > details[open]').length") == 1


@in_browser
def test_it_can_be_read_without_javascript(kept, tmp_path):
    file = tmp_path / "page.html"
    ask("one", "--store", kept, "--output", file)
    with browser(1200, 1000) as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.open(file.as_uri() + "#episode-3")
        page.shows("relu_add", "tanh-0001", "I fuse both.")
        assert "Search" not in page.text(), "what needs the script is not there"


@in_browser
def test_hostile_text_runs_nothing_and_asks_for_nothing(played, tmp_path):
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    messages = [{"role": "assistant", "content": attack, "tool_calls": []}]
    (tmp_path / "held").mkdir()
    found = entries_of(tmp_path / "held", [replace(played, task=attack, messages=messages)])
    (tmp_path / "page.html").write_text(page_of(found))
    with browser(1200, 1000) as page:
        page.open((tmp_path / "page.html").as_uri())
        page.shows("1 of 1")
        assert page.ask("document.title") == "run one: episodes"
        assert page.ask("document.images.length") == 0 and page.ask("document.scripts.length") == 1
        assert page.ask("performance.getEntriesByType('resource').length") == 0
        page.ask("const s = document.createElement('script'); s.textContent = 'document.title = 1'; "
                 "document.body.append(s)")  # fmt: skip
        assert page.ask("document.title") == "run one: episodes", "the policy refuses what is put in later"
