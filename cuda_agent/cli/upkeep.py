"""The commands for the upkeep of an installation: ``doctor`` checks it, ``gc`` removes old runs and their data."""

import sys
from typing import Annotated, Any

from typer import Argument, Option

from cuda_agent.cli.options import STORE, AsJson, Namespace, Release, StoreOption, command, command_group, print_json
from cuda_agent.cli.runs import cluster_of, open_existing
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


@command(commands, "cuda-agent gc --keep 5 --dry-run", "cuda-agent gc --on my-cluster --dry-run")
def gc(
    keep: Annotated[
        int | None,
        Option(
            min=1, help="newest runs to keep of each pipeline; on a cluster the chart's gc.keep sets it [default: 10]"
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list what would be removed, and remove nothing")] = False,
    store: StoreOption = STORE,
    on: Annotated[
        str,
        Option(
            "--on",
            metavar="local|CONTEXT",
            help="local: the store; CONTEXT: a cluster of your kubeconfig (`.`: the current one)",
        ),
    ] = "local",
    namespace: Namespace = None,
    release: Release = None,
    as_json: AsJson = False,
) -> None:
    """Remove old runs, and the data that only they need.

    The data are artifacts, checkpoints and cache entries. A pipeline is a series of runs with the same run.pipeline;
    its newest runs stay. On a cluster, a pod of the Helm chart does this work. It also removes servers that ended
    Argo Workflows left, and ConfigMaps of deleted Workflows."""
    if on == "local":
        found = _collect_here(keep, dry_run, store)
    else:
        found = _collect_there(keep, dry_run, on, namespace, release)
    if as_json:
        print_json(found)
        return
    for kind in ("runs", "pools", "config maps"):
        for name in found.get(kind, []):
            print(f"{kind.removesuffix('s')} {name}")
    verb = "removed" if found["removed"] else "would be removed"
    print(f"{found['objects']} objects, {found['bytes'] / 2**20:.1f} MiB {verb}")


def _collect_here(keep: int | None, dry_run: bool, store: str) -> dict[str, Any]:
    from cuda_agent.pipeline import gc as collector
    from cuda_agent.pipeline import runs
    from cuda_agent.storage import StoreUnavailable

    opened = open_existing(store)
    with runs.try_lock(runs.local_home(store) / "locks" / "gc") as alone:
        if not alone and not dry_run:
            raise StoreUnavailable("A run is under way on this store. Collect when it has ended.")
        what = collector.plan(opened, keep or collector.KEEP)
        if not dry_run:
            collector.collect(opened, what)
    return what.to_json() | {"removed": not dry_run}


def _collect_there(
    keep: int | None, dry_run: bool, on: str, namespace: str | None, release: str | None
) -> dict[str, Any]:
    from cuda_agent.cluster import maintenance

    if keep is not None:
        raise ConfigError("gc --keep: on a cluster the chart decides what stays, by its value gc.keep.")
    answer = maintenance.ask(cluster_of(on, namespace), release, "gc-plan" if dry_run else "gc")
    if busy := answer.get("busy"):
        raise ClusterError(f"{busy} Nothing was removed.")
    return answer
