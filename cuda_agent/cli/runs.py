"""The commands that read runs on this machine or a cluster: list runs, fetch reports and logs, compare two runs.

``--on local`` selects the store, the folder or S3 prefix that holds runs.  ``--on CONTEXT`` selects a cluster: a
context of the kubeconfig (``.``: the current one).  Without ``--on`` a command looks for the run in the store first,
then on the cluster of the current context.  With ``--store`` it looks in that store only."""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cuda_agent.cli.options import (
    STORE,
    AsJson,
    Namespace,
    RunName,
    StoreOption,
    Where,
    command,
    command_group,
    print_json,
    show,
)
from cuda_agent.cli.places import cluster_of, current, find, open_existing
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.errors import ConfigError

if TYPE_CHECKING:
    from cuda_agent.pipeline.compare import Facts
    from cuda_agent.pipeline.runs import Run
    from cuda_agent.storage import Store

commands = command_group()
EVERY = 0.5  # seconds between two reads of a log


@command(commands, "cuda-agent runs --store s3://kernels/main", "cuda-agent runs --on my-cluster", name="runs")
def list_all(
    store: StoreOption = STORE, on: Where = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """List the runs of a store or a cluster, oldest first.

    Each line has the user who started the run, and its last scores: the policy that was scored, its pass rate, the
    shares of tasks on which it is faster than eager and than torch.compile, and its speed-ups; on a cluster, the 20
    newest runs have them. After the runs, print a line for each sweep, with the number of its runs in each state, and
    a line for each search (`optimize --on`) of a cluster.
    Without --on, list the runs of the store, or those of the current cluster if there is no store."""
    from cuda_agent.optimize.score_text import HEAD, cells
    from cuda_agent.storage import StoreUnavailable

    place = None if on in (None, "local") else cluster_of(on, namespace)
    if on is None:
        try:
            open_existing(store)
        except StoreUnavailable:
            if (place := current(store, namespace)) is None:
                raise
    rows = _cluster_rows(place) if place else _local_rows(store)
    if as_json:
        print_json(rows)
        return
    if not rows and place:
        print(f"no runs in namespace {place.namespace} of {place.name}; start one: cuda-agent submit experiment=smoke")
    elif not rows:
        print(f"no runs in {open_existing(store).uri}; start one with: cuda-agent run experiment=demo")
    key, kind = ("workflow", "profile") if place else ("name", "pipeline")
    columns = (key, kind, "policy", "submitter")
    first, second, third, fourth = (max(8, *(len(row[of]) for row in rows), 0) for of in columns)
    if rows:
        heads = f"{'state':12} {'' if place else 'stages '}{'begun':16} {'by':{fourth}} {'config':8} {'policy':{third}}"
        print(f"{'run':{first}} {kind:{second}} {heads} {HEAD}")
    for row in rows:
        message = row["message"]
        if not place:
            message = f"{row['stage']}: {message.splitlines()[0]}" if message and row["code"] else ""
        done = "" if place else f"{len(row['stages'])}/{row['of']}".rjust(6) + " "
        facts = f"{row['status']:12} {done}{row['created'][:16]} {row['submitter']:{fourth}} {row['config'][:8]}"
        scores = f"{row['policy']:{third}} {cells(row['scores'])}"
        print(f"{row[key]:{first}} {row[kind]:{second}} {facts} {scores}  {message[:70]}".rstrip())
    for line in _sweep_lines(rows):
        print(line)
    if place:
        from cuda_agent.cluster import searches

        for search, state in searches.states(place).items():
            print(f"search {search}: {state.lower()}")


def _local_rows(store: str) -> list[dict[str, Any]]:
    from cuda_agent.pipeline import compare, runs
    from cuda_agent.pipeline.graph import GRAPHS

    opened, home = open_existing(store), runs.local_home(store)
    records = runs.list_runs(opened)
    rows = []
    for record, (done, policy, scores) in zip(records, compare.standings(opened, records), strict=True):
        running = record.code != 0 and runs.is_running(home, opened, record)
        state = {"status": "running" if running else record.status, "stages": done, "of": len(GRAPHS[record.graph])}
        rows.append(vars(record) | state | {"policy": policy, "scores": scores})
    return rows


def _cluster_rows(place: Cluster) -> list[dict[str, Any]]:
    from cuda_agent.cluster import results, templates
    from cuda_agent.cluster import submit as cluster

    scored: dict[str, tuple[str, dict[str, float]]] = {}
    with contextlib.suppress(ConfigError, ClusterError), results.mlflow(place) as server:  # without it, no scores
        scored = results.scores(server)
    rows = []
    for item in cluster.workflows(place):
        about = item["metadata"]
        policy, scores = scored.get(cluster.run_of(item), ("", {}))
        rows.append({
            "name": cluster.run_of(item),
            "workflow": about["name"],
            "profile": about["labels"].get(templates.PROFILE_LABEL, ""),
            "sweep": about["labels"].get(cluster.SWEEP_LABEL, ""),
            "config": about.get("annotations", {}).get(cluster.CONFIG_ANNOTATION, ""),
            "status": cluster.phase(item).lower(),
            "created": about["creationTimestamp"],
            "submitter": cluster.submitter_of(item),
            "message": item["status"]["message"],
            "policy": policy,
            "scores": scores,
        })  # fmt: skip
    if not rows:
        templates.require_namespace(place)
    return rows


def _sweep_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields one line for each sweep in ``rows``, with the number of its runs in each state.  If a run has several
    attempts, only the newest one counts."""
    newest = {row["name"]: row for row in rows}
    for sweep in dict.fromkeys(row["sweep"] for row in newest.values() if row["sweep"]):
        found = Counter(row["status"] for row in newest.values() if row["sweep"] == sweep)
        counts = ", ".join(f"{number} {status}" for status, number in found.most_common())
        yield f"sweep {sweep}: {found.total()} runs ({counts})"


@command(
    commands,
    "cuda-agent report last",
    "cuda-agent report my-sweep",
    "cuda-agent report first --on my-cluster --json",
)
def report(
    run: Annotated[
        str, Argument(metavar="RUN|SWEEP", help="name of a run, the beginning of its name, or `last`; or of a sweep")
    ],
    store: StoreOption = STORE,
    on: Where = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the report of a run, and print the path of its HTML page.

    With --json, print the data of the report instead. Of a sweep, print a table: the settings that differ between its
    runs, and the last scores of each run."""
    from cuda_agent.cluster import results
    from cuda_agent.optimize.score_text import sweep_lines
    from cuda_agent.pipeline import compare, runs
    from cuda_agent.pipeline.local import fetch_report
    from cuda_agent.pipeline.manifest import read_manifest

    if of_sweep := _of_sweep(run, store, on, namespace):
        rows = compare.sweep_rows(of_sweep)
        show(as_json, {"sweep": run, "runs": rows}, sweep_lines(run, rows))
        return
    where, name = find(run, store, on, namespace)
    if not isinstance(where, tuple):
        with results.mlflow(where) as server:
            folder = results.download(server, name, runs.user_home() / "reports" / name)
    else:
        opened, record = where
        manifest = read_manifest(opened, record.name, "report")
        if manifest is None:
            raise ConfigError(f"Run {record.name} has no report yet ({record.status}).")
        folder = fetch_report(opened, runs.local_home(store), record.name, manifest)
    print((folder / "report.json").read_text() if as_json else folder / "index.html")


def _of_sweep(name: str, store: str, on: str | None, namespace: str | None) -> "list[Facts]":
    """Returns the runs of the sweep ``name``, from the place that ``on`` selects (see ``find``).  Returns an empty list
    if there is no such sweep, or a run has this name."""
    from cuda_agent.cluster import results
    from cuda_agent.pipeline import compare, runs
    from cuda_agent.storage import StoreUnavailable

    if on in (None, "local"):
        with contextlib.suppress(StoreUnavailable):
            opened = open_existing(store)
            known = runs.matching([record.name for record in runs.list_runs(opened)], name)
            if known != [name] and (found := compare.of_sweep(opened, name)):
                return found
            if known:
                return []
        place = current(store, namespace) if on is None and name != "last" else None
    else:
        place = cluster_of(on, namespace)
    if place is None:
        return []
    with contextlib.suppress(ConfigError, ClusterError), results.mlflow(place) as server:  # ``find`` tells errors
        return results.sweep(server, name)
    return []


@command(commands, "cuda-agent diff 20260801-101500-1f2e last", "cuda-agent diff sweep-1-1 sweep-1-2 --on .")
def diff(
    one: RunName,
    other: RunName,
    store: StoreOption = STORE,
    on: Where = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two runs.

    First show the scores of the last policy, and of other policies whose scores differ. Then compare configuration,
    code, environment, inputs and outputs. Without --on, look for each run in the store first, then on the current
    cluster, so that a local run can be compared with one on a cluster."""
    from cuda_agent.optimize.score_text import diff_lines
    from cuda_agent.pipeline import compare

    found = compare.diff(_facts(one, store, on, namespace), _facts(other, store, on, namespace))
    if as_json:
        print_json(found)
        return
    print("\n".join([" -> ".join(found["runs"]), *diff_lines(found["runs"], found["scores"])]))
    for key, (before, after) in found["config"].items():
        print(f"  {key}: {before} -> {after}")
    for stage, change in found["stages"].items():
        if "only in" in change:
            print(f"  {stage}: only in {change['only in']}")
        else:
            same = ", ".join(change["same outputs"]) or "none"
            print(f"  {stage}: other {', '.join(change['differs in'])}; same outputs: {same}")
    if not found["config"] and not found["stages"]:
        print("  nothing differs")


def _facts(run: str, store: str, on: str | None, namespace: str | None) -> "Facts":
    from cuda_agent.cluster import results
    from cuda_agent.pipeline import compare
    from cuda_agent.pipeline.graph import ROWS

    where, name = find(run, store, on, namespace)
    if isinstance(where, tuple):
        return compare.facts(*where, ROWS)
    with results.mlflow(where) as server:
        return results.facts(server, name)


@command(commands, "cuda-agent trace last", "cuda-agent trace first --on my-cluster --send")
def trace(
    run: RunName,
    send: Annotated[
        bool, Option("--send", help="send all spans to the collector at OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP)")
    ] = False,
    store: StoreOption = STORE,
    on: Where = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run spent its time on.

    Print the critical path: the spans that the run waited for, from its start through stages, steps and the turns of
    episodes to an evaluation. With --json, also print all spans."""
    from cuda_agent.cluster import results
    from cuda_agent.pipeline import otlp, runs
    from cuda_agent.pipeline import trace as traces

    where, name = find(run, store, on, namespace)
    if isinstance(where, tuple):
        id = traces.trace_id(where[0], name)
        spans = traces.of_run(where[0], name, runs.spans_folder(runs.local_home(store), name))
    else:
        id, spans = results.trace(where, name)
    if not spans:
        raise ConfigError(f"Run {name} has no spans.")
    if send:
        count = otlp.send_all(name, id, [asdict(span) for span in spans])
        print(f"sent {count} spans of trace {id} to {otlp.address()}", file=sys.stderr)
    path = traces.critical_path(spans, name)
    show(as_json, traces.to_json(path, id, spans), traces.lines(path, len(spans)))


@command(commands, "cuda-agent logs last agentic -f", "cuda-agent logs first --stage synthesis --on my-cluster")
def logs(
    run: RunName,
    stage: Annotated[str, Argument(help="a stage; on a cluster also prepare or finish [default: all]")] = "",
    named: Annotated[str, Option("--stage", metavar="STAGE", help="the stage, as an option")] = "",
    follow: Annotated[
        bool, Option("--follow", "-f", help="print new lines until the stage ends; needs a stage")
    ] = False,
    store: StoreOption = STORE,
    on: Where = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Print the log of a stage, or the logs of all stages.

    A log can be read while its stage runs and after its end. With --json, print one JSON object per line."""
    from cuda_agent.pipeline.graph import ROWS

    names = ["prepare", *(row.name for row in ROWS), "finish"]
    if stage and named and stage != named:
        raise ConfigError(f"logs: expected one stage, got {stage} and {named}.")
    stage = stage or named
    if stage and stage not in names:
        raise ConfigError(f"{stage}: there is no such stage. There are {', '.join(names)}.")
    if follow and not stage:
        raise ConfigError("logs --follow: name one stage.")
    where, name = find(run, store, on, namespace)
    if isinstance(where, tuple):
        lines = _local_logs(*where, store, stage, follow)
    else:
        lines = _cluster_logs(where, name, stage, follow)
    for said_by, line in lines:
        if as_json:
            print(json.dumps({"stage": said_by, "line": line}), flush=follow)
        else:
            print(line if stage else f"{said_by}: {line}", flush=follow)


def _local_logs(opened: "Store", record: "Run", store: str, stage: str, follow: bool) -> Iterator[tuple[str, str]]:
    """Yields (stage, line) from the log of ``stage``, or from all logs if ``stage`` is empty.  Reads a log from its
    file on this machine if the file exists, else from the store."""
    from cuda_agent.pipeline import runs
    from cuda_agent.pipeline.graph import ROWS
    from cuda_agent.pipeline.manifest import read_manifest

    home = runs.local_home(store)
    names = [stage] if stage else [row.name for row in ROWS]
    files = {name: home / "work" / record.name / name / "log.txt" for name in names}
    keys = {name: f"runs/{record.name}/{name}/log.txt" for name in names}
    found = [name for name in names if files[name].exists() or opened.exists(keys[name])]
    if not found:
        manifest = read_manifest(opened, record.name, stage) if stage else None
        why = "it has not run"
        if manifest is not None and manifest.run != record.name:
            why = f"it was served from the cache; run {manifest.run} made it and has its log"
        raise ConfigError(f"Run {record.name} has no log{f' of {stage}' if stage else ''}: {why}.")
    for name in found:
        if files[name].exists():
            lines = _tail(files[name], follow, lambda: runs.is_running(home, opened, record))
        else:
            lines = iter(opened.get(keys[name]).decode(errors="replace").splitlines())
        yield from ((name, line) for line in lines)


def _tail(file: Path, follow: bool, running: Callable[[], bool]) -> Iterator[str]:
    """Yields the lines of a file.  With ``follow``, waits for more until the file is gone or ``running()`` is False."""
    with open(file, errors="replace") as text:
        rest = ""
        while True:
            last = not follow or not running() or not file.exists()
            *lines, rest = (rest + text.read()).split("\n")
            yield from lines
            if last:
                yield from filter(None, [rest])
                return
            time.sleep(EVERY)


def _cluster_logs(place: Cluster, name: str, stage: str, follow: bool) -> Iterator[tuple[str, str]]:
    """Yields (stage, line) from the log of ``stage``, or from all logs if ``stage`` is empty.  If a stage has no pod,
    reads its log from MLflow."""
    from cuda_agent.cluster import results
    from cuda_agent.cluster import submit as cluster

    pods = cluster.pods_of(place, name)
    for said_by in [stage] if stage else list(pods):
        if said_by in pods:
            if follow:
                place.await_container(pods[said_by])
            try:
                yield from ((said_by, line) for line in place.logs(pods[said_by], follow=follow))
            except ClusterError as error:
                if error.status != 400:  # the container waits, for its image or for room
                    raise
    if stage in pods:
        return
    try:
        with results.mlflow(place) as server:
            names = [stage] if stage else results.logged(server, name)
            if not names and not pods:
                raise ConfigError(f"Run {name} has no log.")
            for said_by in names:
                if said_by not in pods:
                    yield from ((said_by, line) for line in results.log(server, name, said_by))
    except (ConfigError, ClusterError):  # the release has no MLflow, it does not answer, or it does not know the run
        if stage or not pods:
            raise
