"""The commands of the cluster: render its manifests, submit a run, follow it, stop it, go on with it.

As in ``cli``, whatever a command needs is imported inside of it.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cuda_agent.pipeline.cluster_api import Cluster

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDE", help="Hydra overrides, as in experiment=demo critic.lr=1e-4"),
]
RunName = Annotated[str, typer.Argument(help="a run, the beginning of its name, or `last`")]
On = Annotated[
    str | None, typer.Option("--on", metavar="CONTEXT", help="context of your kubeconfig; else the current one")
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="namespace; else that of the context")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for a program")]
EVERY = 1.0  # seconds between two looks at a run


def add_to(app: typer.Typer) -> None:
    """Puts the commands into the one command line."""
    examples: dict[Callable[..., None], tuple[str, ...]] = {
        submit: (
            "cuda-agent submit experiment=demo --profile cpu --watch",
            "cuda-agent submit experiment=smoke run.name=first --dry-run",
        ),
        watch: ("cuda-agent watch last",),
        logs: ("cuda-agent logs last agentic -f",),
        cancel: ("cuda-agent cancel last", "cuda-agent cancel last --now"),
        resume: ("cuda-agent resume last",),
        mlflow: ("cuda-agent mlflow",),
        render: ("cuda-agent render", "cuda-agent render --check"),
    }
    for command, lines in examples.items():
        title = "Examples" if len(lines) > 1 else "Example"
        app.command(epilog="\b\n" + "\n  ".join([f"{title}:", *lines]))(command)


def submit(
    overrides: Overrides = None,
    profile: Annotated[str, typer.Option(help="what the run's pods get: a profile of the chart")] = "cpu",
    release: Annotated[str, typer.Option(help="full name of the chart's release")] = "cuda-agent",
    on: On = None,
    namespace: Namespace = None,
    watching: Annotated[bool, typer.Option("--watch", help="follow it until it ends")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the objects and send nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the whole workflow on a cluster. Needs a kubeconfig and nothing else."""
    from cuda_agent.config import compose
    from cuda_agent.pipeline import cluster

    what = cluster.submission(compose(overrides or []), profile, release)
    if dry_run:
        _print_objects([what.workflow, what.config_map], as_json)
        return
    place = _cluster(on, namespace)
    cluster.submit(place, what)
    _submitted(place, what.run, what.workflow["metadata"]["name"], watching, as_json)


def watch(run: RunName, on: On = None, namespace: Namespace = None) -> None:
    """Follow a run: its stages, how far they are, what they wait for. Ctrl-C stops watching, not the run."""
    place = _cluster(on, namespace)
    sys.exit(_follow(place, run))


def logs(
    run: RunName,
    stage: Annotated[str, typer.Argument(help="a stage, prepare or finish; without it, all pods that are there")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the stage's pod ends")] = False,
    on: On = None,
    namespace: Namespace = None,
) -> None:
    """Print what the pods of a run have written."""
    from cuda_agent.config import ConfigError
    from cuda_agent.pipeline import cluster

    if follow and not stage:
        raise ConfigError("logs --follow: name one stage.")
    for line in cluster.logs(_cluster(on, namespace), run, stage, follow):
        print(line, flush=follow)


def cancel(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="do not wait for checkpoints")] = False,
    on: On = None,
    namespace: Namespace = None,
) -> None:
    """Stop a run. Its stages write a checkpoint, and `resume` goes on from there."""
    from cuda_agent.pipeline import cluster

    name, running = cluster.cancel(_cluster(on, namespace), run, now)
    print(f"run {name} is stopping")
    if not running:
        print("nothing is lost: no stage was running")
    elif now:
        print(f"lost: what {', '.join(running)} did since the last checkpoint")
    else:
        print(f"nothing is lost if {', '.join(running)} can write a checkpoint before the grace period ends")
    print(f"go on with: cuda-agent resume {name}")


def resume(
    run: RunName,
    on: On = None,
    namespace: Namespace = None,
    watching: Annotated[bool, typer.Option("--watch", help="follow it until it ends")] = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was cancelled or has failed: what is done is served from the store."""
    from cuda_agent.pipeline import cluster

    place = _cluster(on, namespace)
    what = cluster.resume(place, run)
    _submitted(place, what.run, what.workflow["metadata"]["name"], watching, as_json)


def mlflow(
    on: On = None,
    namespace: Namespace = None,
    port: Annotated[int, typer.Option(help="on this machine; 0: any that is free")] = 0,
) -> None:
    """Bring the chart's MLflow to this machine, until Ctrl-C."""
    from cuda_agent.pipeline import cluster_report, forward

    place = _cluster(on, namespace)
    with forward.forwarded(place, forward.pod_of(place, "mlflow"), cluster_report.MLFLOW_PORT, port) as local:
        print(f"http://127.0.0.1:{local}", flush=True)
        while True:
            time.sleep(3600)


def report(run: str, on: str, namespace: str | None, as_json: bool) -> None:
    """``cuda-agent report RUN --on CONTEXT``; `.` is the current one."""
    from cuda_agent.pipeline import cluster, cluster_report

    place = _cluster(None if on == "." else on, namespace)
    name = cluster.run_of(cluster.find(place, run))
    folder = cluster_report.fetch_report(place, name, Path(".cuda-agent") / "reports" / name)
    print((folder / "report.json").read_text() if as_json else folder / "index.html")


def render(
    root: Annotated[Path, typer.Argument(help="the repository")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit with 1 when something is not up to date")
    ] = False,
) -> None:
    """Bring what is made of the graph and the chart's values up to date: workflows/ and charts/cuda-agent."""
    from cuda_agent.pipeline import chart

    changed = chart.drift(root) if check else chart.write(root)
    for name in changed:
        print(name)
    if check and changed:
        print("not up to date: cuda-agent render", file=sys.stderr)
        sys.exit(1)


def list_runs(on: str, namespace: str | None, as_json: bool) -> None:
    """``cuda-agent runs --on CONTEXT``; `.` is the current one."""
    from cuda_agent.pipeline import cluster

    place = _cluster(None if on == "." else on, namespace)
    rows = [
        {
            "name": cluster.run_of(item),
            "workflow": item["metadata"]["name"],
            "profile": item["metadata"]["labels"].get(cluster.PROFILE_LABEL, ""),
            "config": item["metadata"].get("annotations", {}).get(cluster.CONFIG_ANNOTATION, ""),
            "status": cluster.phase(item).lower(),
            "created": item["metadata"]["creationTimestamp"],
            "message": item.get("status", {}).get("message", ""),
        }
        for item in cluster.workflows(place)
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print(f"no runs in namespace {place.namespace} of {place.name}; start one: cuda-agent submit experiment=smoke")
    for row in rows:
        print(
            f"{row['workflow']:28} {row['profile']:8} {row['status']:10} {row['created'][:16]}  config "
            f"{row['config'][:8]}  {row['message'][:70]}".rstrip()
        )


def _cluster(on: str | None, namespace: str | None) -> "Cluster":
    from cuda_agent.config import ConfigError

    try:
        from cuda_agent.pipeline.cluster_api import Cluster

        return Cluster.of_kubeconfig(on, namespace)
    except ModuleNotFoundError as missing:
        raise ConfigError(f"this needs {missing.name}: pip install 'cuda-agent[cluster]'") from None


def _print_objects(items: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(items, indent=1))
        return
    import yaml

    print("---\n".join(yaml.safe_dump(item, sort_keys=False, width=120) for item in items), end="")


def _submitted(place: "Cluster", run: str, workflow: str, watching: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": run, "workflow": workflow, "namespace": place.namespace, "cluster": place.name}))
    else:
        print(f"run {run} is Workflow {workflow} in namespace {place.namespace} of {place.name}")
        print(f"follow it with: cuda-agent watch {run} --namespace {place.namespace}")
    if watching:
        sys.exit(_follow(place, run))


def _follow(place: "Cluster", run: str) -> int:
    """Until it ends; 0, 75 when it was stopped, or 1."""
    from cuda_agent.pipeline import cluster, screen

    workflow = cluster.find(place, run)
    name = cluster.run_of(workflow)
    with screen.watching() as show:
        while True:
            shown = cluster.views(workflow)
            cluster.explain(place, workflow, shown)
            show(name, shown)
            if cluster.phase(workflow) in cluster.ENDED:
                break
            time.sleep(EVERY)
            workflow = place.get("Workflow", workflow["metadata"]["name"])
    now = cluster.phase(workflow)
    stopped = bool(workflow["spec"].get("shutdown"))
    print(f"run {name}: {now.lower()}" + (" (stopped)" if stopped and now != "Succeeded" else ""))
    if message := workflow.get("status", {}).get("message"):
        print(message)
    return 0 if now == "Succeeded" else 75 if stopped else 1
