"""What a person sees of a search: the terminal's view, plain lines, JSON lines, and the page."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from rich.console import Console

from cuda_agent.agent.progress import Find, factor
from cuda_agent.optimize.screen import View, drawing, json_lines, live, plain, sparkline
from cuda_agent.pages.optimize import render
from cuda_agent.sandbox.wire import Probe, Ran, Solution, Tensor, Verdict
from tests.waiting import wait_for

FILES = {"plan.json": "{}", "kernels/fused.cpp": "// <b>\nvoid fused() {}\n"}
PROBE = Probe(
    deterministic=True, eager_seconds=9e-4, compile_seconds=5e-4, inputs=[Tensor((64, 64), "float32")],
    outputs=[Tensor((64, 64), "float32")], parameter_count=4096,
)  # fmt: skip


def verdict(seconds=3e-4, mode="quick", **more):
    return Verdict("ok", "plan", mode, "cpu", "real", seconds=seconds, eager_seconds=9e-4, compile_seconds=5e-4,
                   checks=5, samples=[seconds * f for f in (0.9, 0.95, 1, 1.02, 1.1, 1.2)], **more)  # fmt: skip


STRICT = verdict(
    mode="strict", bytes=33_000_000, flops=2_000_000_000, peak_bytes_per_second=2.0e11, peak_flops=1.2e13,
    interval=[2.9, 3.1], ran=[Ran("fused", "own", 1, 1.0)], advice=["<i>advice</i>"],
    strict={
        "kinds": {"normal": 1e-7, "large": 1e-6}, "skipped": ["sparse"], "error": 1e-6, "eager_error": 2e-6,
        "repeatable": True, "precision": "fp32", "failed": {"max_autotune_fp32": "no <b>"},
        "intervals": {"eager_fp32": [2.9, 3.1], "compile_fp32": [1.6, 1.7]},
        "baselines": {"eager_fp32": 9e-4, "compile_fp32": 5e-4},
    },
)  # fmt: skip


def event(kind, attempt=1, at=1.0, **facts):
    return {"kind": kind, "attempt": attempt, "at": at, **facts}


def judged(found, at, ratio):
    return event("verdict", at=at, command="profile", verdict=found.to_json(), files=FILES, factor=ratio)


ORDER = {"model": "some-model", "terms": {"target": 1.05, "turns": 60}}
WRONG = Verdict("wrong", "plan", "quick", "cpu", "real", message="check 1: <b>off</b>")
CALL = {"id": "c0", "name": "Bash", "arguments": {"command": "profile <now>"}}
EVENTS = [
    event("begin", 0, task="relu", order=ORDER, device="cpu", resumed=False),
    event("baselines", 0, probe=PROBE.to_json()),
    event("turn", turn=0, last=False),
    event("thought", text="Let me think.\nIt is bound by memory."),
    event("text", text="I fuse both passes."),
    event("message", message={"role": "assistant", "content": "I fuse <both> passes.", "tool_calls": [CALL]}),
    event("diff", path="kernels/fused.cpp", text="@@ -0,0 +1 @@\n+int <x>;\n-int y;", added=1, removed=1),
    event("tool", name="Bash", arguments={"command": "verify"}),
    judged(WRONG, 4.0, None),
    event("spent", prompt=1200, sampled=300, estimated=True, cost=0.02, seconds=5.0),
    event("files", changed=FILES, gone=[]),
    event("turn", turn=1, last=False, at=6.0),
    event("wait", text="HTTP 429: slow down; again in 3 s", at=6.5),
    judged(verdict(6e-4), 7.0, 0.83),
    event("turn", turn=2, last=False, at=8.0),
    judged(verdict(), 9.0, 1.67),
    event("text", text="Now the rest.", at=9.5),
    event("ended", why="answer", summary="It is <fast>.", at=10.0),
]


def drawn(events, width=100, height=40):
    view = View()
    for one in events:
        view.take(one)
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(drawing(view, width, height))
    return console.file.getvalue()


def test_the_terminal_shows_who_does_what_and_how_far_it_is():
    shown = drawn(EVENTS[:-1])
    for part in ("relu", "some-model", "1.67×, target 1.05×", "3 judged", "about 1,500 tokens", "0.02", "turn 3/60",
                 "Now the rest.", "kernels/fused.cpp +1 −1", "+int <x>;", "429"):  # fmt: skip
        assert part in shown, shown
    assert "the model said that it is done" in drawn(EVENTS, height=0)


@pytest.mark.parametrize("over", ["baselines", "verdict", "outcome"])
def test_what_goes_on_beside_the_attempts_is_shown_while_it_lasts(over):
    passing = [event("note", 0, text="measuring now", passing=True)]
    assert "measuring now" in drawn([EVENTS[0], *passing])
    facts = {"baselines": EVENTS[1], "verdict": judged(WRONG, 4.0, None), "outcome": event("outcome", 0, why="target")}
    after = drawn([EVENTS[0], *passing, facts[over], *EVENTS[2:]])
    assert "measuring now" not in after


def test_clocks_go_on_while_nothing_happens(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr("rich.console.Console", partial(Console, file=written, force_terminal=True, width=100))

    def seconds():
        return {float(found) for found in re.findall(r"timing eager: (\d\.\d) s", written.getvalue())}

    with live() as watch:
        watch(EVENTS[0])
        watch(event("note", 0, text="timing eager", passing=True))
        wait_for("three times on the clock", 60, lambda: len(seconds()) > 2)
    assert "timing eager" in written.getvalue()[-400:]


@pytest.mark.parametrize("width, height", [(20, 6), (60, 12), (200, 60)])
def test_it_fits_on_any_terminal(width, height):
    many = [{**one, "attempt": number} for number in (1, 2, 3) for one in EVENTS]
    lines = drawn(many, width, max(height, 0)).splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) <= max(height, 8)


def test_plain_lines_tell_the_same():
    lines = []
    watch = plain(lines.append)
    for one in EVENTS:
        watch(one)
    text = "\n".join(lines)
    for part in ("baselines: eager 900 µs, torch.compile 500 µs", "[1] turn 1: Bash verify", "wrong check 1",
                 "profile: ok, 1.67×  ← the best so far", "[1] the model said that it is done"):  # fmt: skip
        assert part in text, text


def test_plain_lines_tell_what_failed_and_what_was_cut():
    lines = []
    watch = plain(lines.append, 60)
    read = event("tool", name="Read", arguments={"path": "../../etc/passwd"})
    for one in [
        event("turn", turn=2), read, event("result", error="\x1b[1mthe path leads out of the work folder"),
        event("tool", name="FormatDisk", arguments=None), event("result", error="there is no tool"),
        read, event("result", error=""), read, event("ended", why="stopped", summary=""),
        event("tool", name="Bash", arguments={"command": "verify"}), judged(WRONG, 4.0, None),
        event("result", error="no"),
        event("turn", turn=3), event("void", text="the answer was cut after 2,000 tokens"),
    ]:  # fmt: skip
        watch(one)
    first, second, *rest = lines
    assert first.startswith("[1] turn 3: Read ../../etc/passwd → error: ") and first.endswith("…") and len(first) == 60
    assert first.isprintable() and second == "[1] turn 3: FormatDisk → error: there is no tool"
    assert rest[:2] == ["[1] turn 3: Read ../../etc/passwd"] * 2 and rest[2].startswith("[1] stopped")
    assert rest[3:5] == ["[1] turn 3: Bash verify", "[1]   profile: wrong check 1: <b>off</b>"], "a verdict says enough"
    assert rest[5:] == ["[1] turn 4: the answer was cut after 2,000 tokens"]


def test_json_lines_are_json():
    lines = []
    watch = json_lines(lines.append)
    for one in EVENTS:
        watch(one)
    assert [json.loads(line)["kind"] for line in lines] == [
        e["kind"] for e in EVENTS if e["kind"] not in ("text", "thought")
    ]


def test_a_sparkline_spans_its_values_and_one():
    assert sparkline([0.5, 1.0, 1.5]) == "▁▅█" or sparkline([0.5, 1.0, 1.5]) == "▁▄█"
    assert sparkline([2.0]) == "█" and sparkline([]) == "" and len(sparkline([1.0] * 99)) == 40


def page(best=Find(Solution("plan", FILES), verdict(), 1, 2, STRICT)):  # noqa: B008
    return render("relu", "class Model: <b>", EVENTS, best, PROBE, "answer", 1.05, "some-model at http://host/v1")


def test_the_page_says_how_fast_against_what_and_how_sure():
    text = page()
    for part in ("relu: 1.67× as fast as torch.compile", "95 % 2.90 to 3.10", "eager fp32", "compile fp32", "Roofline",
                 "110 GB/s", "55%", "max-autotune was not timed", "Attempt 1", "ModelNew", ": sparse"):  # fmt: skip
        assert part in text, part
    assert "<b>off" not in text and "<both>" not in text and "<i>advice" not in text and "int <x>" not in text
    assert "<script" not in text and "http://host/v1" in text and text.count("<section") == text.count("</section>")


@pytest.mark.parametrize(
    "eager, compiled, said",
    [
        (9e-4, 2.4e-3, "3.00× as fast as eager PyTorch"),
        (2.4e-3, 9e-4, "3.00× as fast as torch.compile"),
        (9e-4, None, "3.00× as fast as eager PyTorch"),
        (1.5e-4, 9e-4, "0.50× the speed of eager PyTorch"),
    ],
)
def test_the_headline_speaks_of_the_faster_baseline(eager, compiled, said):
    found = replace(STRICT, eager_seconds=eager, compile_seconds=compiled)
    text = page(Find(Solution("plan", FILES), verdict(), 1, 2, found))
    assert f"<h1>relu: {said}</h1>" in text and f"{factor(found):.2f}×" in said


def test_a_page_without_a_solution_still_tells_the_story():
    text = page(None)
    assert "no correct solution" in text and "Attempt 1" in text and "--resume" in text


def test_a_page_of_a_quick_verdict_says_so():
    assert "Not strict" in page(Find(Solution("plan", FILES), verdict(), 1, 2))


@pytest.mark.parametrize("found", [STRICT, verdict(interval=[2.9, 3.1], compile_interval=[1.6, 1.7])])
def test_every_baseline_that_is_drawn_has_its_interval(found):
    text = page(Find(Solution("plan", FILES), found, 1, 2))
    for said in ("(3.00×, 2.90–3.10)", "(1.67×, 1.60–1.70)"):
        assert said in text
    assert text.count('class="whisker') == 2


def test_labels_of_the_page_do_not_lie_on_each_other():
    near = replace(STRICT, seconds=4.99e-4, eager_seconds=5.01e-4, compile_seconds=5e-4)
    chart = (
        page(Find(Solution("plan", FILES), verdict(), 1, 2, near)).split('aria-label="Roofline')[1].split("</svg>")[0]
    )
    labels = re.findall(r'class="row-label" x="[\d.]+" y="([\d.]+)"', chart)
    heights = sorted(map(float, labels))
    assert len(heights) == 3 and min(b - a for a, b in pairwise(heights)) >= 15


def test_the_page_shows_what_models_and_tools_wrote_as_text():
    hostile = "</code><script>alert(1)</script>\"'&{{ 7 * 191 }}\x1b[2J\u202egnp"

    def poison(value):
        if isinstance(value, dict):
            return {key: item if key in ("kind", "mode", "name", "role", "why") else poison(item)
                    for key, item in value.items()}  # fmt: skip
        if isinstance(value, list):
            return [poison(item) for item in value]
        return hostile if isinstance(value, str) else value

    strict = replace(STRICT, advice=[hostile], strict=STRICT.strict | {"failed": {"compile_tf32": hostile}})
    found = Find(Solution("plan", {hostile: hostile, "kernels/x.cpp": hostile}), verdict(), 1, 2, strict)
    text = render(hostile, hostile, poison(EVENTS), found, PROBE, "answer", 1.05, hostile)
    assert "<script" not in text and "1337" not in text and "\x1b" not in text and "\u202e" not in text
    assert text.count("&lt;script&gt;alert(1)") > 12 and "␛[2J⟨U+202E⟩gnp" in text


@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_draws_the_page(tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium")
    (tmp_path / "report.html").write_text(page())
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-quic"
    how = f"--headless --no-sandbox --disable-gpu --hide-scrollbars {quiet} --user-data-dir={tmp_path / 'profile'}"
    shot = [f"--window-size={width},4000", f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "report.html").as_uri()]
    subprocess.run([browser, *how.split(), *shot], check=True, capture_output=True, timeout=120)
    from PIL import Image

    image = Image.open(tmp_path / "page.png").convert("L")
    assert image.size == (width, 4000) and len(set(image.getdata())) > 50
