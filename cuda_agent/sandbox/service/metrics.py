"""Counters, gauges and histograms in Prometheus' text format, as much as the service needs.

Not covered: anything across processes; a restart begins at zero, as Prometheus expects of counters.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._help: dict[str, tuple[str, str]] = {}  # name -> kind, help
        self._values: dict[str, dict[_Labels, float]] = defaultdict(dict)
        self._histograms: dict[str, dict[_Labels, list[float]]] = defaultdict(dict)  # counts per bucket, sum, count

    def describe(self, name: str, kind: str, text: str) -> None:
        self._help[name] = (kind, text)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        self._values[name][key] = self._values[name].get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[name][tuple(sorted(labels.items()))] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        row = self._histograms[name].setdefault(tuple(sorted(labels.items())), [0.0] * (len(BUCKETS) + 2))
        bucket = bisect.bisect_left(BUCKETS, value)
        if bucket < len(BUCKETS):
            row[bucket] += 1
        row[-2] += value
        row[-1] += 1

    def text(self) -> str:
        """Everything described, in that order; what was never touched shows zero when it has no labels."""
        lines: list[str] = []
        for name, (kind, help) in self._help.items():
            full = f"{self._prefix}_{name}"
            lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
            if kind == "histogram":
                lines += self._buckets(full, name)
                continue
            for labels, value in sorted(self._values[name].items()):
                lines.append(f"{full}{_braces(labels)} {value:.15g}")
        return "\n".join(lines) + "\n"

    def _buckets(self, full: str, name: str) -> Iterable[str]:
        for labels, row in sorted(self._histograms[name].items()):
            total = 0.0
            for bound, count in zip(BUCKETS, row, strict=False):
                total += count
                yield f"{full}_bucket{_braces((*labels, ('le', f'{bound:g}')))} {total:.15g}"
            yield f"{full}_bucket{_braces((*labels, ('le', '+Inf')))} {row[-1]:.15g}"
            yield f"{full}_sum{_braces(labels)} {row[-2]:.9g}"
            yield f"{full}_count{_braces(labels)} {row[-1]:.15g}"


def _braces(labels: _Labels) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
