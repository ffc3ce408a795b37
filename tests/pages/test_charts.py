"""The charts of the pages, drawn as SVG."""

import re
import time
from itertools import pairwise

import pytest

from cuda_agent.pages.charts import apart, interval_chart, line_chart, ticks
from cuda_agent.pages.text import highlight_cpp


@pytest.mark.parametrize("interval", [(0.9, 1.1), (0.5, 1.6), (0.2, 2.0), (0.12, 1.1), (0.05, 3.0), (0.02, 40.0)])
def test_labels_of_a_speed_ups_axis_do_not_touch(interval):
    drawn = interval_chart("x compile", [("base", "base", 1.0, interval)], ratio=True)
    places = [float(x) for x in re.findall(r'class="tick" x="([\d.]+)"', drawn)]
    assert len(places) >= 3 and min(b - a for a, b in pairwise(places)) > 26


def test_labels_of_rows_and_values_have_room():
    rows = [("max-autotune fp32", "", 3.0, (2.9, 3.1))]
    drawn = interval_chart("x", rows, ratio=True)
    first = min(float(x) for x in re.findall(r'<line class="grid[^"]*" x1="([\d.]+)"', drawn))
    assert first > len("max-autotune fp32") * 7.5
    drawn = line_chart("x", [(0, 1.23e-5), (1, 1.31e-5)])
    first = min(float(x) for x in re.findall(r'<line class="grid" x1="([\d.]+)"', drawn))
    assert first - 7 > max(map(len, re.findall(r'text-anchor="end">([^<]+)<', drawn))) * 6


def test_places_are_moved_apart():
    assert apart([5.0, 1.0, 2.0], 3.0) == [7.0, 1.0, 4.0] and apart([1.0, 9.0], 3.0) == [1.0, 9.0]


@pytest.mark.parametrize("values", [(1.0, 0.9999999999999999), (0.0, 3e-13), (5e-324, 5e-324), (1e300, 1e300)])
def test_a_curve_of_nearly_equal_or_tiny_values_is_drawn(values):
    assert "<svg" in line_chart("x", list(enumerate(values)), from_zero=0.0 in values)
    marks = ticks(min(values), max(values))
    assert len(marks) > 1 and marks == sorted(set(marks)) and marks[0] <= min(values) <= max(values) <= marks[-1]


@pytest.mark.parametrize("source", ["x" + "\n" * 250_000, "int x;\n" * 40_000, "int <x> = 1;" + " " * 300])
def test_a_long_source_is_shown_without_marks_and_takes_no_time(source):
    begin = time.process_time()
    shown = highlight_cpp(source)
    assert "<span" not in shown and "<x>" not in shown and time.process_time() - begin < 5
    assert "<span" in highlight_cpp("int x = 1;")
