"""The commands for clusters: render manifests; submit runs and sweeps; follow, cancel and resume a run; open MLflow."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cuda_agent.cli.options import (
    AsJson,
    Namespace,
    Overrides,
    Release,
    RunName,
    command,
    command_group,
    print_json,
)
from cuda_agent.cli.places import cluster_of
from cuda_agent.cluster.api import AWAY, Cluster, ClusterError
from cuda_agent.errors import EXIT_RETRY, ConfigError

if TYPE_CHECKING:
    from cuda_agent.cluster.submit import Submission
    from cuda_agent.pipeline.local import StageView
    from cuda_agent.pipeline.sweep import Point

commands = command_group()
On = Annotated[
    str | None, Option("--on", metavar="CONTEXT", help="context of your kubeconfig [default: the current one]")
]
Watching = Annotated[bool, Option("--watch", help="follow the run until it ends")]
Profile = Annotated[str, Option(help="profile of the chart, which sets the resources of the run's pods")]
Whole = Annotated[bool, Option("--sweep", help="RUN is the name of a sweep, and all its runs are meant")]
EVERY = 1.0  # seconds between two queries of a run


@command(
    commands,
    "cuda-agent submit experiment=demo --profile cpu --watch",
    "cuda-agent submit experiment=smoke run.name=first --dry-run",
)
def submit(
    overrides: Overrides = None,
    profile: Profile = "cpu",
    release: Release = None,
    on: On = None,
    namespace: Namespace = None,
    watching: Watching = False,
    dry_run: Annotated[bool, Option("--dry-run", help="print the Kubernetes objects, and send nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the workflow, with all its stages, on a cluster.

    The Helm chart of cuda-agent must be installed there. This machine needs a kubeconfig, but no GPU."""
    from cuda_agent.cluster import submit as cluster
    from cuda_agent.cluster.templates import template_name
    from cuda_agent.compose import compose

    config = compose(overrides or [])
    if dry_run:
        what = cluster.submission(config, profile, template_name(release or "cuda-agent", profile))
        objects = [what.workflow, what.config_map]
        if as_json:
            print_json(objects)
        else:
            import yaml

            print("---\n".join(yaml.safe_dump(item, sort_keys=False, width=120) for item in objects), end="")
        return
    place = cluster_of(on, namespace)
    template = cluster.template_for(place, profile, release, [config])
    what = cluster.submission(config, profile, template)
    cluster.submit(place, what)
    if not as_json:
        _say_room(place, profile, template)
    _submitted(place, what, watching, as_json)


@command(
    commands,
    "cuda-agent sweep experiment=demo critic.lr=1e-5,3e-5 'seed=range(3)' --parallel 2",
    "cuda-agent sweep experiment=smoke 'seed=range(3)' --on local --dry-run",
)
def sweep(
    overrides: Annotated[
        list[str], Argument(metavar="OVERRIDE", help="as in `submit`; a key may have several values, as in seed=1,2")
    ],
    profile: Profile = "cpu",
    release: Release = None,
    on: Annotated[
        str | None,
        Option(
            "--on",
            metavar="local|CONTEXT",
            help="where to run: local (this machine), or a context of your kubeconfig [default: the current context]",
        ),
    ] = None,
    namespace: Namespace = None,
    parallel: Annotated[
        int | None, Option(min=1, help="limit of runs at the same time; the others wait; only on a cluster")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list the runs, and start none")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run for every combination of the given values.

    Values are written in Hydra's grammar: a=1,2  a=range(3)  a=choice(x,y). All runs are validated before the first
    one starts. On a cluster, the command submits the runs and ends. On this machine (--on local), it executes them
    one after the other, and ends with a table of their scores, which `report SWEEP` prints again. To continue a
    stopped sweep on this machine, repeat the command with run.name=NAME, the sweep's name."""
    from cuda_agent.pipeline import sweep as sweeps

    if on == "local" and parallel is not None:
        raise ConfigError("sweep --parallel: on this machine the runs go one after the other.")
    name, points = sweeps.points(overrides)
    place = None
    if on == "local":
        from cuda_agent.pipeline.schedule import require_base

        for point in points:
            require_base(point.config.policy.base)
        if not dry_run:
            sys.exit(_sweep_here(name, points, as_json))
    else:
        from cuda_agent.cluster import submit as cluster

        configs, template = [point.config for point in points], ""
        if not dry_run:
            place = cluster_of(on, namespace)
            template = cluster.template_for(place, profile, release, configs)
        submissions = cluster.sweep_submissions(configs, profile, template, parallel)
        if place:
            cluster.submit(place, *submissions)
    if as_json:
        rows = [{"run": point.name, "overrides": point.overrides} for point in points]
        where = {"namespace": place.namespace, "cluster": place.name} if place else {}
        print_json({"sweep": name, "runs": rows} | where)
        return
    for point in points:
        print(f"{point.name:36} {' '.join(point.overrides)}")
    if place is None:
        print(f"sweep {name}: {len(points)} runs, all valid; nothing was started")
    else:
        print(f"sweep {name}: {len(points)} runs in namespace {place.namespace} of {place.name}")
        _say_room(place, profile, template)
        print(f"follow one with: cuda-agent watch {points[0].name} --namespace {place.namespace}")
        print(f"stop all with: cuda-agent cancel {name} --sweep --namespace {place.namespace}")


def _sweep_here(name: str, points: "list[Point]", as_json: bool) -> int:
    """Executes ``points``, the runs of the sweep ``name``, one by one on this machine.  Prints their outcomes, and at
    the end a table of their scores.  Returns the first nonzero exit code of a run, or 0 if there is none."""
    from cuda_agent.optimize.score_text import sweep_lines
    from cuda_agent.pipeline import compare, screen, sweep
    from cuda_agent.pipeline.local import RunOutcome, run_pipeline
    from cuda_agent.storage import open_store

    def execute(point: "Point") -> RunOutcome:
        if not as_json:
            print(f"{point.name}: {' '.join(point.overrides)}", flush=True)
        with screen.watching(as_json) as show:
            return run_pipeline(point.config, watch=show)

    rows: list[dict[str, Any]] = []
    for point, outcome in sweep.run_here(points, execute):
        ended = {"code": outcome.code, "stage": outcome.stage, "message": outcome.message}
        rows.append({"run": point.name, "overrides": point.overrides} | ended)
        if not as_json:
            where = f" in {outcome.stage}" if outcome.stage else ""
            how = f"exit code {outcome.code}{where}: {outcome.message.splitlines()[0]}" if outcome.code else "done"
            print(f"run {point.name}: {how}", flush=True)
    if any(not row["code"] for row in rows):
        table = compare.sweep_rows(compare.of_sweep(open_store(points[0].config.run.store), name))
        scored = {row["run"]: row for row in table}
        rows = [row | scored[row["run"]] if row["run"] in scored else row for row in rows]
        if not as_json:
            print("\n".join(["", *sweep_lines(name, table)]))
    if as_json:
        print_json({"sweep": name, "runs": rows})
    if len(rows) < len(points):
        print(f"Stopped. The same command with run.name={name} goes on from here.", file=sys.stderr)
    return next((row["code"] for row in rows if row["code"]), 0)


@command(commands, "cuda-agent watch last")
def watch(run: RunName, on: On = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Follow a run on a cluster until it ends.

    Show the stages, their progress, and every ten seconds why pods do not start. Ctrl-C ends this command, and the run
    continues. With --json, print a line each time something has changed. The exit code is that of the run. It is 78
    if pods cannot start for two minutes and only a person can help."""
    sys.exit(_follow(cluster_of(on, namespace), run, as_json))


@command(commands, "cuda-agent cancel last", "cuda-agent cancel last --now", "cuda-agent cancel grid --sweep")
def cancel(
    run: RunName,
    now: Annotated[bool, Option("--now", help="stop at once, without waiting for checkpoints")] = False,
    whole: Whole = False,
    on: On = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run, or all runs of a sweep, on a cluster.

    Unless --now is given, the running stages first write a checkpoint. `resume` continues from the last
    checkpoint. RUN may also be a search of `optimize --on`, with its whole name; `optimize --resume FOLDER` continues
    it."""
    from cuda_agent.cluster import searches
    from cuda_agent.cluster import submit as cluster

    place = cluster_of(on, namespace)
    if whole:
        live = [last for last in cluster.newest_of(place, run) if cluster.phase(last) not in cluster.ENDED]
        for last in live:
            _cancel(place, last, now)
        _all_of(run, [cluster.run_of(last) for last in live], "stopping", as_json)
        return
    if search := searches.newest(place, run):
        cluster.cancel(place, search, now)
        print(json.dumps({"search": run, "now": now}) if as_json else f"search {run} is stopping")
        return
    last = cluster.find(place, run)
    name, running = cluster.run_of(last), _cancel(place, last, now)
    if as_json:
        print(json.dumps({"run": name, "stopping": running, "now": now}))
        return
    print(f"run {name} is stopping")
    if not running:
        print("nothing is lost: no stage was running")
    elif now:
        print(f"lost: what {', '.join(running)} did since the last checkpoint")
    else:
        print(f"nothing is lost if {', '.join(running)} can write a checkpoint before the grace period ends")
    print(f"go on with: cuda-agent resume {name}")


def _cancel(place: Cluster, last: dict[str, Any], now: bool) -> list[str]:
    """Stops a run, of which ``last`` is the newest Workflow.  Returns the names of its running stages."""
    from cuda_agent.cluster import results
    from cuda_agent.cluster import submit as cluster

    running = cluster.cancel(place, last, now)
    if now:
        try:
            results.end(place, cluster.run_of(last), last["metadata"]["annotations"][cluster.CONFIG_ANNOTATION])
        except (ClusterError, ConfigError) as error:
            print(f"MLflow shows the run as running until `gc`: {error}", file=sys.stderr)
    return running


@command(commands, "cuda-agent resume last", "cuda-agent resume grid --sweep")
def resume(
    run: RunName,
    whole: Whole = False,
    on: On = None,
    namespace: Namespace = None,
    watching: Watching = False,
    as_json: AsJson = False,
) -> None:
    """Continue a cancelled or failed run, or all such runs of a sweep, on a cluster.

    Finished stages keep their results and do not run again."""
    from cuda_agent.cluster import submit as cluster

    if whole and watching:
        raise ConfigError("resume --watch: follows one run, so it does not go with --sweep.")
    place = cluster_of(on, namespace)
    if whole:
        failed = [last for last in cluster.newest_of(place, run) if cluster.phase(last) in cluster.ENDED[1:]]
        _all_of(run, [cluster.resume(place, last).run for last in failed], "submitted again", as_json)
        return
    _submitted(place, cluster.resume(place, cluster.find(place, run)), watching, as_json)


@command(commands, "cuda-agent mlflow")
def mlflow(
    on: On = None,
    namespace: Namespace = None,
    port: Annotated[int, Option(help="port on this machine; 0: any free port")] = 0,
    as_json: AsJson = False,
) -> None:
    """Forward a port of this machine to the MLflow of a cluster. Print the local address, and run until Ctrl-C."""
    from cuda_agent.cluster import forward, results

    place = cluster_of(on, namespace)
    with forward.forwarded(place, forward.pod_of(place, "mlflow"), results.MLFLOW_PORT, port) as local:
        address = f"http://127.0.0.1:{local}"
        print(json.dumps({"address": address}) if as_json else address, flush=True)
        while True:
            time.sleep(3600)


@command(commands, "cuda-agent render", "cuda-agent render --check")
def render(
    root: Annotated[Path, Argument(help="folder of the repository")] = Path("."),
    check: Annotated[bool, Option("--check", help="write nothing; exit with 1 if anything would change")] = False,
    as_json: AsJson = False,
) -> None:
    """Render the generated files of workflows/ and charts/cuda-agent.

    Make Argo's manifests and the Helm chart's files from the graph of stages and the schema of the chart's values.
    Write them to the repository, and print the names of those that changed."""
    from cuda_agent.deploy import chart

    changed = chart.drift(root) if check else chart.write(root)
    print(json.dumps(changed, indent=1) if as_json else "".join(f"{name}\n" for name in changed), end="")
    if check and changed:
        print("not up to date: cuda-agent render", file=sys.stderr)
        sys.exit(1)


def _say_room(place: Cluster, profile: str, template: str) -> None:
    """Prints what a run of the profile requests of the cluster, and how many such runs fit; nothing if the cluster does
    not tell, because the runs are submitted already."""
    from cuda_agent.cluster import room

    with contextlib.suppress(ClusterError):
        print(f"profile {profile}: {room.sentence(room.of_profile(place, template))}", flush=True)


def _submitted(place: Cluster, what: "Submission", watching: bool, as_json: bool) -> None:
    run, workflow = what.run, what.workflow["metadata"]["name"]
    if as_json:
        print(json.dumps({"run": run, "workflow": workflow, "namespace": place.namespace, "cluster": place.name}))
    else:
        print(f"run {run} is Workflow {workflow} in namespace {place.namespace} of {place.name}")
        print(f"follow it with: cuda-agent watch {run} --namespace {place.namespace}")
    if watching:
        sys.exit(_follow(place, run, as_json))


def _all_of(sweep: str, runs: list[str], what: str, as_json: bool) -> None:
    if as_json:
        print_json({"sweep": sweep, "runs": runs})
    else:
        print("".join(f"{run}\n" for run in runs) + f"sweep {sweep}: {len(runs)} runs {what}")


def _follow(place: Cluster, run: str, as_json: bool) -> int:
    """Shows a run on a cluster until it ends, or until only a person can help it.  Returns its exit code."""
    from cuda_agent.cluster import submit as cluster
    from cuda_agent.cluster.waiting import HOPELESS_SECONDS, TELL_SECONDS
    from cuda_agent.pipeline import screen

    workflow = cluster.find(place, run)
    name, attempt = cluster.run_of(workflow), workflow["metadata"]["name"]
    heard, looked, stuck_since = time.monotonic(), -TELL_SECONDS, 0.0
    delays: dict[str, tuple[str, bool]] = {}
    with contextlib.nullcontext(_json_lines()) if as_json else screen.watching() as show:
        while True:
            try:
                workflow = place.get("Workflow", attempt)
                heard = time.monotonic()
                shown = cluster.views(workflow)
                if look := heard - looked >= TELL_SECONDS:
                    delays, looked = cluster.delays(place, workflow, shown), heard
                late = [
                    view
                    for view in shown
                    if view.name in delays and (view.state == "waiting" or view.name == "prepare")
                ]
                for view in late:
                    view.waits = delays[view.name][0]
                # The servers that a running `prepare` waits for end it themselves, if they cannot start.
                stuck = [view for view in late if view.state == "waiting" and delays[view.name][1]]
                if look:
                    stuck_since = (stuck_since or heard) if stuck else 0.0
                show(name, shown)
                if cluster.phase(workflow) in cluster.ENDED:
                    break
                if stuck and heard - stuck_since >= HOPELESS_SECONDS:
                    why = f"{stuck[0].name} cannot start: {stuck[0].waits}"
                    raise ConfigError(f"run {name}: {why}\nMend this, or stop the run with: cuda-agent cancel {name}")
            except ClusterError as error:  # the run itself continues while the API server restarts
                if error.exit_code != EXIT_RETRY or time.monotonic() - heard > AWAY:
                    raise
            time.sleep(EVERY)
    now, stopped = cluster.phase(workflow), bool(workflow["spec"].get("shutdown"))
    message = workflow.get("status", {}).get("message", "")
    if as_json:
        print(json.dumps({"run": name, "status": now.lower(), "stopped": stopped, "message": message}), flush=True)
    else:
        print(f"run {name}: {now.lower()}" + (" (stopped)" if stopped and now != "Succeeded" else ""))
        print(message, end="\n" if message else "")
    return cluster.exit_code(workflow)


def _json_lines() -> "Callable[[str, list[StageView]], None]":
    shown: list[Any] = []

    def show(run: str, views: "list[StageView]") -> None:
        facts = ("state", "done", "total", "notes", "waits")
        now = [{"stage": view.name} | {fact: getattr(view, fact) for fact in facts} for view in views]
        if now != shown:
            shown[:] = now
            print(json.dumps({"run": run, "stages": now}), flush=True)

    return show
