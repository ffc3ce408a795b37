"""The charts of the pages, drawn as SVG."""

import re
from itertools import pairwise

import pytest

from cuda_agent.pages.charts import interval_chart


@pytest.mark.parametrize("interval", [(0.9, 1.1), (0.5, 1.6), (0.2, 2.0), (0.12, 1.1), (0.05, 3.0), (0.02, 40.0)])
def test_labels_of_a_speed_ups_axis_do_not_touch(interval):
    drawn = interval_chart("x compile", [("base", "base", 1.0, interval)], ratio=True)
    places = [float(x) for x in re.findall(r'class="tick" x="([\d.]+)"', drawn)]
    assert len(places) >= 3 and min(b - a for a, b in pairwise(places)) > 26
