"""The commands for the upkeep of an installation: ``doctor`` checks it, ``gc`` removes old runs and their data, and
``pin`` says which runs ``gc`` keeps."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cuda_agent.cli.options import (
    STORE,
    AsJson,
    Namespace,
    Release,
    RunName,
    StoreOption,
    command,
    command_group,
    print_json,
)
from cuda_agent.cli.places import cluster_of, open_existing
from cuda_agent.cluster.api import ClusterError
from cuda_agent.errors import ConfigError

commands = command_group()


@command(commands, "cuda-agent doctor --store s3://kernels/main", "cuda-agent doctor my-cluster --namespace cuda-agent")
def doctor(
    cluster: Annotated[
        str | None,
        Argument(
            metavar="CONTEXT", help="context of your kubeconfig (`.`: the current one) [default: check this machine]"
        ),
    ] = None,
    store: StoreOption = STORE,
    mlflow: Annotated[
        str | None, Option(help="tracking URI of this machine, as in run.mlflow [default: SQLite beside the store]")
    ] = None,
    namespace: Namespace = None,
    release: Release = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine or a cluster. Print one line per check, and a remedy for each failed one (✗).

    On a cluster, a pod tests the store and MLflow from inside. A second pod has the restrictions of a sandbox. It
    tries to connect to the store, MLflow, the API server and DNS, and all these attempts must fail."""
    if cluster is None:
        from cuda_agent.diagnostics.doctor import examine
        from cuda_agent.pipeline.runs import local_home

        found = examine(store, mlflow or f"sqlite:///{local_home(store) / 'mlflow.db'}")
    else:
        from cuda_agent.cluster import doctor as cluster_doctor

        found = cluster_doctor.examine(cluster_of(cluster, namespace), release)
    checks = []
    for check in found:
        checks.append(check)
        if not as_json:
            print(f"{'✓' if check.ok else '✗'} {check.name:14} {check.text}", flush=True)
            if check.mend:
                print(f"  {'':14} fix: {check.mend}", flush=True)
    if as_json:
        print_json([vars(check) for check in checks])
    sys.exit(0 if all(check.ok for check in checks) else 1)


Where = Annotated[
    str,
    Option(
        "--on",
        metavar="local|CONTEXT",
        help="local: the store; CONTEXT: a cluster of your kubeconfig (`.`: the current one)",
    ),
]


@command(commands, "cuda-agent gc --keep 5 --dry-run", "cuda-agent gc --on my-cluster --dry-run")
def gc(
    keep: Annotated[
        int | None,
        Option(
            min=1,
            help="newest finished runs to keep of each pipeline; a sweep counts as one; on a cluster the chart's "
            "gc.keep sets it [default: 10]",
        ),
    ] = None,
    days: Annotated[
        float | None,
        Option(
            min=0,
            help="runs that were active in so many days are kept; on a cluster the chart's gc.days sets it "
            "[default: 7]",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list what would be removed, and remove nothing")] = False,
    store: StoreOption = STORE,
    mlflow: Annotated[
        str | None, Option(help="tracking URI of this machine, as in run.mlflow [default: SQLite beside the store]")
    ] = None,
    on: Where = "local",
    namespace: Namespace = None,
    release: Release = None,
    as_json: AsJson = False,
) -> None:
    """Remove old runs, and the data that only they need, while others go on.

    The data are artifacts, checkpoints, cache entries and rows in MLflow. A pipeline is a series of runs with the
    same run.pipeline; its newest finished runs stay. Runs that are pinned or under way stay, too. Rows of runs that
    were cut off end in MLflow. On a cluster, a pod of the Helm chart does this work. It also removes servers that
    ended Argo Workflows left, ConfigMaps of deleted Workflows, and searches of `optimize --on` of which nothing has
    changed in the chart's `gc.days`."""
    if on == "local":
        found = _collect_here(keep, days, dry_run, store, mlflow)
    else:
        if keep is not None or days is not None:
            raise ConfigError("gc --keep, --days: on a cluster the chart decides, by its values gc.keep and gc.days.")
        found = maintenance_answer(on, namespace, release, "gc-plan" if dry_run else "gc")
    if as_json:
        print_json(found)
        return
    for one, kind in (("run", "runs"), ("pool", "pools"), ("config map", "config maps"), ("search", "searches")):
        for name in found.get(kind, []):
            print(f"{one} {name}")
    if found["pinned"]:
        print(f"pinned, so kept: {', '.join(found['pinned'])}")
    verb = "removed" if found["removed"] else "would be removed"
    print(f"{found['objects']} objects, {found['bytes'] / 2**20:.1f} MiB {verb}")
    if found.get("rows") or found.get("ended"):
        print(f"MLflow: {found['rows']} rows removed; ended as cut off: {', '.join(found['ended']) or 'none'}")
    if said := found.get("mlflow"):
        print(f"MLflow could not be tidied: {said}")


@command(commands, "cuda-agent pin last", "cuda-agent pin first --remove --on my-cluster")
def pin(
    run: RunName,
    remove: Annotated[bool, Option("--remove", help="remove the pin")] = False,
    store: StoreOption = STORE,
    on: Where = "local",
    namespace: Namespace = None,
    release: Release = None,
    as_json: AsJson = False,
) -> None:
    """Pin a run: `gc` keeps it, with its sweep, however old it is."""
    from cuda_agent.cluster import submit
    from cuda_agent.pipeline import runs

    if on == "local":
        opened = open_existing(store)
        name = runs.find_run(opened, run).name
        runs.pin(opened, name, not remove)
    else:
        name = submit.known_name(cluster_of(on, namespace), run)
        maintenance_answer(on, namespace, release, "unpin" if remove else "pin", name)
    print(json.dumps({"run": name, "pinned": not remove}) if as_json else f"run {name} is {'not ' * remove}pinned")


def _collect_here(
    keep: int | None, days: float | None, dry_run: bool, store: str, mlflow: str | None
) -> dict[str, Any]:
    from cuda_agent.pipeline import gc as collector
    from cuda_agent.pipeline import locks, rows, runs
    from cuda_agent.storage import StoreUnavailable, local_folder

    opened, home = open_existing(store), runs.local_home(store)
    with contextlib.nullcontext("") if dry_run else locks.collecting(opened) as busy:
        if busy:
            raise StoreUnavailable(f"{busy} Nothing was removed. Try again later.")
        live = {run.name for run in runs.list_runs(opened) if runs.is_running(home, opened, run)}
        here = local_folder(store) is not None  # all its runs are runs of this machine
        what = collector.plan(
            opened, keep or collector.KEEP, collector.DAYS if days is None else days, live, lambda run: here
        )
        if not dry_run:
            collector.collect(opened, what)
    found = what.to_json() | {"removed": not dry_run}
    if not dry_run:
        uri = mlflow or f"sqlite:///{home / 'mlflow.db'}"
        unused = uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()
        found |= rows.tidy("off" if unused else uri, runs.store_id(opened), what.runs, what.sweeps, what.still)
    return found


def maintenance_answer(on: str, namespace: str | None, release: str | None, job: str, run: str = "") -> dict[str, Any]:
    """Runs a maintenance job on a cluster, and returns its answer.

    Raises:
        ClusterError: The job did nothing now, and may later, or it failed.
        ConfigError: The job cannot do it."""
    from cuda_agent.cluster import maintenance

    answer = maintenance.ask(cluster_of(on, namespace), release, job, run)
    if busy := answer.get("busy"):
        raise ClusterError(f"{busy} Nothing was removed.")
    if error := answer.get("error"):
        raise ConfigError(error)
    return answer
