"""The trace of a run: its spans, from the start of the command to the phases of an evaluation (module ``spans``).

Each process of a run records its spans in a file.  When the process ends, the file is copied to the store:

    runs/<run>/spans/<name>-<id>.jsonl

``session`` does both, and sends the spans to an OTLP address if one is set (module ``otlp``).  ``critical_path`` says
which spans a run waited for."""

import contextlib
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.pipeline.otlp import open_sender
from cuda_agent.spans import add, new_id, recording
from cuda_agent.storage import Store, StoreError

# The attribute ``kind`` of spans that only contain others.  Their own time, outside of their children, is unexplained.
RUN, STAGE, UNFINISHED = "run", "stage", "unfinished"
_UNSEEN = 0.005  # rows of ``lines`` with a smaller share of the time are left out


@dataclass(frozen=True)
class Span:
    """A named interval of time.  ``start`` and ``end`` are nanoseconds since 1970."""

    id: str
    parent: str  # id, or "" if it has none
    name: str
    start: int
    end: int
    attributes: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def session(
    folder: Path,
    store: Store,
    run: str,
    name: str,
    kind: str,
    began: int,
    trouble: Callable[[str], None],
    parent: str = "",
    own: str = "",
) -> Iterator[dict[str, Any]]:
    """Records the spans of the ``with`` block.  At its end, moves all files of spans in ``folder`` to the store, also
    those that other processes wrote, and those that killed processes left.

    Args:
        folder: Folder for files of spans.
        run: Name of the run, which the store has.
        name: Name of the span of the whole block.
        kind: Kind of this span: ``RUN``, ``STAGE``, or "".
        began: Start of this span, in nanoseconds since 1970.
        trouble: Function that is called with a message if spans cannot be sent.
        parent: Id of this span's parent.
        own: Id of this span; empty: a new one.

    Yields:
        The attributes of this span.  The block may add to them."""
    own, trace = own or new_id(), trace_id(store, run)
    attributes: dict[str, Any] = {"kind": kind, "run": run, "trace": trace}
    sender = open_sender(folder, run, trace, trouble)
    try:
        with recording(folder / f"{name}-{own}.jsonl", own):
            try:
                yield attributes
            finally:
                add(name, began, time.time_ns(), id=own, parent=parent, **attributes)
    finally:
        if sender:
            sender.close()
        with contextlib.suppress(StoreError):
            for file in folder.glob("*.jsonl"):
                store.put(f"{_prefix(run)}/{file.name}", file)
                file.unlink()


def trace_id(store: Store, run: str) -> str:
    """Returns the id of the trace of ``run``: 32 hexadecimal digits, the same in all processes of the run."""
    return hashlib.sha256(store.get(f"runs/{run}/run.json")).hexdigest()[:32]


def of_run(store: Store, run: str, folder: Path | None = None) -> list[Span]:
    """Returns the spans of ``run``, from the store and from the files of processes under way in ``folder``."""
    texts = {file.name: file.read_text() for file in (folder.glob("*.jsonl") if folder else ())}
    texts |= {key.rsplit("/", 1)[1]: store.get(key).decode() for key in store.list(_prefix(run))}
    return [span for text in texts.values() for span in parsed(text.splitlines(keepends=True))]


def parsed(lines: Iterable[str]) -> Iterator[Span]:
    """Yields the spans of ``lines``.  Skips a last line that is not complete."""
    yield from (Span(**json.loads(line)) for line in lines if line.endswith("\n"))


def _prefix(run: str) -> str:
    return f"runs/{run}/spans"


# the critical path ----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A row of the critical path: all spans of one name below the spans of another row."""

    name: str
    count: int = 0  # number of these spans on the path
    own: int = 0  # nanoseconds of the path in these spans, outside of their children
    unexplained: int = 0  # the part of ``own`` in spans that only contain others
    rows: dict[str, "Node"] = field(default_factory=dict)  # by name, in the order of time

    @property
    def total(self) -> int:
        """Nanoseconds of the path in these spans and their children."""
        return self.own + sum(row.total for row in self.rows.values())

    @property
    def explained(self) -> float:
        """The share of ``total`` that spans explain."""
        return 1.0 - self._unexplained() / max(self.total, 1)

    def _unexplained(self) -> int:
        return self.unexplained + sum(row._unexplained() for row in self.rows.values())

    def to_json(self) -> dict[str, Any]:
        below = [row.to_json() for row in self.rows.values()]
        return {"name": self.name, "seconds": self.total / 1e9, "count": self.count, "rows": below}


def critical_path(spans: Sequence[Span], name: str) -> Node:
    """Returns the critical path of a run: the spans that the run waited for, one after the other.  Of spans side by
    side, the one that ends last is on the path, up to its start, then the one that ends last before that.  The path
    adds up to the run's time, without the time between two sessions of an interrupted run.

    Args:
        spans: All spans of the run.  If the parent of a span is missing (a process under way, or killed), a span
            ``unfinished`` takes its place.
        name: Name of the row that contains all others."""
    known = {span.id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        children[span.parent].append(span)
    for id in children.keys() - known - {""}:
        start, end = min(span.start for span in children[id]), max(span.end for span in children[id])
        children[""].append(Span(id, "", UNFINISHED, start, end, {"kind": UNFINISHED}))
    for siblings in children.values():
        siblings.sort(key=lambda span: (span.end, span.start), reverse=True)

    def walk(span: Span, since: int, until: int, node: Node) -> None:
        node.count += 1
        for child in children[span.id]:
            start, end = max(child.start, since), min(child.end, until)
            if start < end:
                own(span, until - end, node)
                walk(child, start, end, node.rows.setdefault(child.name, Node(child.name)))
                until = start
        own(span, until - since, node)

    def own(span: Span, nanoseconds: int, node: Node) -> None:
        node.own += nanoseconds
        if span.attributes.get("kind") in (RUN, STAGE, UNFINISHED):
            node.unexplained += nanoseconds

    whole = Node(name)
    if children[""]:
        first, last = min(span.start for span in children[""]), children[""][0].end
        walk(Span("", "", name, first, last), first, last, whole)
    whole.own = whole.count = 0
    return _in_order(whole)


def _in_order(node: Node) -> Node:
    """Sorts rows by time.  They were found from the end to the start."""
    node.rows = {name: _in_order(row) for name, row in reversed(node.rows.items())}
    return node


def lines(path: Node, count: int) -> Iterator[str]:
    """Yields a critical path as lines of text.  ``count`` is the number of the run's spans."""
    yield f"{path.name}: {path.total / 1e9:.1f} s, of which {count} spans explain {path.explained:.1%}"
    yield f"{'seconds':>9} {'share':>6} {'spans':>6}"

    def rows(node: Node, depth: int) -> Iterator[str]:
        for row in node.rows.values():
            if (share := row.total / max(path.total, 1)) >= _UNSEEN:
                yield f"{row.total / 1e9:9.1f} {share:6.1%} {row.count:6}  {'  ' * depth}{row.name}"
                yield from rows(row, depth + 1)
        if node.rows and (share := node.own / max(path.total, 1)) >= _UNSEEN:
            word = "not explained" if node.unexplained else "itself"
            yield f"{node.own / 1e9:9.1f} {share:6.1%}         {'  ' * depth}({word})"

    yield from rows(path, 0)


def to_json(path: Node, trace: str, spans: Sequence[Span]) -> dict[str, Any]:
    facts = {"run": path.name, "trace": trace, "seconds": path.total / 1e9, "explained": path.explained}
    return facts | {"path": path.to_json()["rows"], "spans": [asdict(span) for span in spans]}
