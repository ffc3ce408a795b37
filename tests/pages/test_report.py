"""The report: its page says what its data say, runs nothing, loads nothing, and survives hostile and empty data."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cuda_agent.config import Config
from cuda_agent.context import StageContext
from cuda_agent.pages.charts import clock_time, duration, line_chart, number, ticks
from cuda_agent.pages.report import CURVES, render
from cuda_agent.pages.text import highlight_cpp
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.episode import read_episodes, write_episodes
from cuda_agent.rl.scores import read_scores
from cuda_agent.stages import report
from tests.pages.report_inputs import POLICIES, make_inputs

HOSTILE = "</code></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 191 }}{% raw %}"
HIDDEN = "\x1b[2J\u202egnp\udc80"
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Checks nesting while it reads; keeps elements, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def make_report(folder: Path, inputs: dict[str, Path]) -> tuple[dict, str]:
    (folder / "report").mkdir()
    unused = None
    context = StageContext(
        name="report",
        config=Config(),
        inputs=inputs,
        outputs={"report": folder / "report"},
        work=folder,
        tracker=unused,
        checkpoints=unused,
        should_stop=lambda: False,
        cache=folder,
    )
    report.run(context)
    data = json.loads((folder / "report" / "report.json").read_text())
    return data, (folder / "report" / "index.html").read_text()


def safe(text: str) -> Page:
    """Nothing on the page runs or loads anything."""
    page = Page(text)
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "embed", "link", "form", "base"})
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "srcset", "xlink:href", "action")
        assert name != "href" or value.startswith("#"), value
    assert not re.search(r"url\(|@import|https?://|javascript:", text)
    assert len(set(page.ids)) == len(page.ids)
    assert all(value[1:] in page.ids for name, value in page.attributes if name == "href")
    return page


def test_the_page_says_what_the_scores_say(tmp_path):
    inputs = make_inputs(tmp_path)
    data, text = make_report(tmp_path, inputs)
    page = safe(text)
    for policy in POLICIES:
        scores = read_scores(inputs[f"scores-{policy}"] / "scores.json")
        for table in (scores.final, scores.best):
            for row in table.families:
                assert f"{100 * row.passed:.1f}\u202f%".replace("\u202f", " ") in page.text
                if row.speedup_compile:
                    assert f"{row.speedup_compile:.2f}×" in page.text
    assert "The teacher’s family" in page.text and "The full operator catalogue" in page.text
    assert "Clock: real" in page.text and "95 % interval" in page.text
    best = data["kernels"][0]
    assert f"{best['verdict']['speedup_compile']:.2f}×" in page.text
    assert "Example CPU, 2 cores, g++ 12" in page.text
    assert "explained variance 0.12 is below 0.2" in page.text
    assert "4 min 20 s" in page.text, "time of bootstrap"
    assert "Weak critic" in page.text
    assert len({kernel["task"] for kernel in data["kernels"]}) == len(data["kernels"]) <= report.KERNELS
    speeds = [kernel["verdict"]["speedup_compile"] for kernel in data["kernels"]]
    assert speeds == sorted(speeds, reverse=True)


def test_the_times_of_a_kernel_come_with_the_intervals_of_its_speed_ups(tmp_path):
    data, _ = make_report(tmp_path, make_inputs(tmp_path))
    data["kernels"][0]["verdict"] |= {"interval": [1.234, 2.345], "compile_interval": None}
    text = safe(render(data)).text
    assert ", 1.23–2.35)" in text and text.count(", 1.23–2.35)") == 1


def test_each_paired_difference_says_over_how_many_tasks_it_is(tmp_path):
    data, text = make_report(tmp_path, make_inputs(tmp_path))
    rows = re.findall("<small>against base</small>.*?</tr>", text, re.DOTALL)
    for row, change in zip(rows, data["changes"], strict=True):
        shown = [int(count) for count in re.findall("<small>([0-9]+) tasks?</small>", row)]
        assert shown == [difference["tasks"] for difference in change["differences"]]
        assert shown[0] > shown[-1], "not every task was solved by both"


def test_strict_final_answers_beside_quick_best_states_are_called_so(tmp_path):
    data, text = make_report(tmp_path, make_inputs(tmp_path))
    assert "strict mode" not in text
    for policy in data["policies"]:
        policy["mode"] = "strict"
    text = render(data)
    assert "Final answer, strict mode" in text and "Best of the trajectory, quick mode" in text


def test_the_gap_has_a_column_only_where_a_best_design_is_known(tmp_path):
    inputs = make_inputs(tmp_path)
    data, text = make_report(tmp_path, inputs)
    assert "Gap to best" not in text and 'colspan="6" scope="rowgroup"' in text
    for policy in data["policies"]:
        for table in (policy["final"], policy["best"]):
            for row in (table["overall"], *table["families"]):
                row["gap"], row["intervals"]["gap"] = 1.23, (1.17, 1.34)
    text = render(data)
    page = safe(text)
    assert "Gap to best" in page.text and 'colspan="7" scope="rowgroup"' in text
    assert page.text.count("1.17–1.34") >= 2 * len(POLICIES) and "1.23×" in page.text


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    pages = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        pages.append(make_report(folder, make_inputs(folder, clock="model")))
    assert pages[0] == pages[1]


def test_under_the_model_clock_the_page_says_so_and_keeps_no_time_and_no_place(tmp_path):
    data, text = make_report(tmp_path, make_inputs(tmp_path, clock="model"))
    assert "Model clock." in text and "Clock: model" in text
    assert "versions" not in data
    assert data["stages"] and not any({"seconds", "device", "notes"} & stage.keys() for stage in data["stages"])
    assert "second" not in json.dumps([stage["metrics"] for stage in data["stages"]])


def test_hostile_text_stays_text(tmp_path):
    inputs = make_inputs(tmp_path)
    for policy in POLICIES:
        path = inputs[f"scores-{policy}"] / "episodes.jsonl"
        episodes = list(read_episodes(path))
        for episode in episodes:
            episode.files = {HOSTILE: HOSTILE, "kernels/x.cpp": HOSTILE}
            call = {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}
            episode.messages = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [call]}]
        write_episodes(path, episodes)
    (inputs["stages"] / "warmup" / "notes.jsonl").write_text(json.dumps({"text": HOSTILE}) + "\n")
    card = json.loads((inputs["tasks"] / "card.json").read_text())
    card["ops"][HOSTILE] = 3
    card["short"] = {HOSTILE: 2}
    (inputs["tasks"] / "card.json").write_text(json.dumps(card))
    data, text = make_report(tmp_path, inputs)
    assert "<script>" not in text and HOSTILE in safe(text).text and "1337" not in text

    def poison(value):
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE + HIDDEN + value if isinstance(value, str) and value not in keep else value

    keep = {"real", *(metric for change in data["changes"] for d in change["differences"] for metric in [d["metric"]])}
    text = render(poison(data))
    assert "␛[2J⟨U+202E⟩gnp" in safe(text).text


def test_the_headline_says_what_can_be_told_from_chance():
    def said(tasks, passed, faster, change=0.25):
        rows = [
            {
                "group": "teacher",
                "metric": name,
                "tasks": tasks,
                "before": 0.5,
                "after": 0.75,
                "change": change,
                "interval": i,
            }
            for name, i in (("passed", passed), ("faster_compile", faster))
        ]
        changes = [{"before": "base", "after": "<rft>", "differences": rows}]
        (lede,) = re.findall('<p class="lede">(.*?)</p>', render({"families": ["teacher"], "changes": changes}))
        return re.sub("<[^>]+>", "", lede).replace("\u202f", " ")

    text = said(24, (-0.1, 0.6), (0.125, 0.375))
    assert "+25.0 points, 95 % interval −10.0 to +60.0, which these tasks cannot tell from none. Its" in text
    assert (
        "On 24 tasks" in text
        and "&lt;rft&gt;" in text
        and "base’s on 50.0 %: +25.0 points, 95 % interval +12.5 to +37.5. Intervals" in text
    )
    assert said(2, None, None).count("too few tasks for an interval") == 2
    assert said(24, None, (0.1, 0.2)).count("+25.0 points, the same on every task") == 1
    assert said(24, None, (0.1, 0.2), 0.0).count("the two agree on every task") == 1


def test_without_a_correct_kernel_the_page_is_honest(tmp_path):
    _, text = make_report(tmp_path, make_inputs(tmp_path, solve=False))
    page = safe(text)
    assert "No correct kernel yet" in page.text and "0.0 %" in page.text


def test_one_scored_policy_is_not_called_none(tmp_path):
    data, _ = make_report(tmp_path, make_inputs(tmp_path))
    page = safe(render(data | {"policies": data["policies"][:1], "changes": []}))
    assert "One policy has been scored. A comparison needs two." in page.text
    assert "No policy has been scored" not in page.text


def test_every_curve_that_a_stage_lists_has_a_title():
    assert {curve for stage in STAGES for curve in stage.curves} <= {key for key, *_ in CURVES}


def test_empty_data_render(tmp_path):
    page = safe(render({}))
    for said in (
        "No policy",
        "No episode has been scored yet",
        "No correct kernel yet",
        "No data card",
        "Clock: unknown",
    ):
        assert said in page.text


def test_missing_card_configuration_and_metrics_are_no_error(tmp_path):
    inputs = make_inputs(tmp_path)
    (inputs["tasks"] / "card.json").unlink()
    shutil.rmtree(inputs["stages"])
    inputs["stages"].mkdir()
    (inputs["stages"] / "warmup").mkdir()
    _, text = make_report(tmp_path, inputs)
    assert "No data card" in safe(text).text


def test_kernels_are_correct_ones_with_files(tmp_path):
    inputs = make_inputs(tmp_path)
    episodes = list(read_episodes(inputs["scores-rft"] / "episodes.jsonl"))
    tasks = report.read_tasks(inputs["tasks"])
    found = report.fastest_kernels((("rft", e) for e in episodes), tasks)
    assert found and all(kernel["verdict"]["status"] == "ok" for kernel in found)
    assert report.fastest_kernels((("rft", replace(e, files={})) for e in episodes), tasks) == []


def test_highlighting_only_adds_spans():
    source = '#include <a>\n/* <b> */ const char* s = "<c>"; // </pre>\nfloat x = 0x1F < 2.5e-3f ? \'"\' : 1; "unended'
    marked = highlight_cpp(source)
    assert re.sub(r"</?span[^>]*>", "", marked) == __import__("html").escape(source)
    assert set(re.findall(r"<(/?\w+)", marked)) == {"span", "/span"}


def test_numbers_for_people():
    assert [number(v) for v in (None, float("nan"), 0, 12.5, -0.25, 1234567, 2e-9)] == [
        "–",
        "–",
        "0",
        "12.5",
        "−0.25",
        "1\u202f234\u202f567",
        "2.00e-9",
    ]
    assert [clock_time(v) for v in (None, 0.25, 59, 200, 7500)] == ["–", "0.25 s", "59 s", "3 min 20 s", "2 h 5 min"]
    assert [duration(v) for v in (2, 1.5e-3, 12.34e-6, 5e-9)] == ["2 s", "1.5 ms", "12.3 µs", "5 ns"]


@pytest.mark.parametrize("low, high", [(0, 1), (-0.3, 0.7), (5, 5), (0, 0), (1e-9, 2e-9), (-1, 1e6)])
def test_ticks_cover_the_range(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 8


@pytest.mark.parametrize("points", [[(1, 0.5)], [(0, 0.0), (1, 0.0)], [(i, i**2) for i in range(200)]])
def test_any_curve_draws(points):
    assert "nan" not in line_chart("t", points)


@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_draws_the_page(tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium")
    make_report(tmp_path, make_inputs(tmp_path))
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-quic"
    subprocess.run(
        [
            browser,
            *["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
            *quiet.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},2000",
            f"--screenshot={tmp_path / 'page.png'}",
            (tmp_path / "report" / "index.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    from PIL import Image

    image = Image.open(tmp_path / "page.png").convert("L")
    assert image.size == (width, 2000)
    assert len(set(image.getdata())) > 50, "a page with text and charts, not a blank one"
