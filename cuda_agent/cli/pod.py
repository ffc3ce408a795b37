"""The commands that the pods of the Helm chart run.  Users do not need them."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from cuda_agent.cli.options import command_group
from cuda_agent.cluster.api import Cluster
from cuda_agent.errors import EXIT_RETRY

if TYPE_CHECKING:
    from cuda_agent.cluster.pod import PodEnvironment

pod_app = command_group("What the chart's pods run.")
Run = Annotated[str, Option(help="name of the run; empty: that of its Workflow")]
ConfigSha = Annotated[str, Option("--config", help="sha256 of the configuration")]
Keep = Annotated[int, Option(min=1, envvar="CUDA_AGENT_KEEP", help="newest finished runs of each pipeline that stay")]
Days = Annotated[float, Option(min=0, envvar="CUDA_AGENT_DAYS", help="runs that were active in so many days stay")]
Workflow = Annotated[str, Option(help="name of the Workflow")]


@pod_app.command()
def prepare(config: ConfigSha, workflow: Workflow, run: Run = "") -> None:
    """Create the run in the store, take existing results from the cache, and start the sandbox and vLLM servers."""
    from cuda_agent.cluster import pod

    base = json.loads(os.environ.get("CUDA_AGENT_POOLS", "[]"))
    here = pod.PodEnvironment.from_environment()
    try:
        spread = "CUDA_AGENT_RAY" in os.environ
        cluster = Cluster.of_pod if base else None
        replicas = json.loads(os.environ.get("CUDA_AGENT_ENGINE", "[]"))
        outputs = pod.prepare(here, run or workflow, config, workflow, cluster, base, spread=spread, replicas=replicas)
    except Exception as error:
        pod.prepare_failed(here, run or workflow, config, error)
        raise
    print(json.dumps(outputs, indent=1))


@pod_app.command()
def stage(name: str, config: ConfigSha, workflow: Workflow, run: Run = "") -> None:
    """Run one stage."""
    from cuda_agent.pipeline.spawn import Spawner

    spawner = Spawner(preload=())
    spawner.open()  # both processes import at the same time
    from cuda_agent.cluster import pod

    here = pod.PodEnvironment.from_environment()
    sys.exit(pod.run_stage(here, name, run or workflow, config, spawner=spawner))


@pod_app.command()
def ray(name: str, config: ConfigSha, workflow: Workflow, run: Run = "") -> None:
    """Run one stage in a Ray cluster of several pods, and follow it until it ends."""
    from cuda_agent.cluster import pod

    here = pod.PodEnvironment.from_environment()
    base = json.loads(os.environ["CUDA_AGENT_RAY"])
    servers, served = (os.environ.get(f"CUDA_AGENT_{of}_SERVERS", "") for of in ("SANDBOX", "ENGINE"))
    sys.exit(pod.run_spread(here, name, run or workflow, config, workflow, servers, Cluster.of_pod(), base, served))


@pod_app.command()
def finish(config: ConfigSha, workflow: Workflow, status: Annotated[str, Option()], run: Run = "") -> None:
    """Remove the run's sandbox and vLLM servers, and record how the run ended."""
    from cuda_agent.cluster import pod

    here = pod.PodEnvironment.from_environment()
    facts = pod.finish(here, run or workflow, config, workflow, status, Cluster.of_pod())
    print(json.dumps(facts, indent=1))


@pod_app.command(name="search-prepare")
def search_prepare(run: Run, config: ConfigSha, workflow: Workflow) -> None:
    """Write the order of a search to the store, and start its sandbox servers."""
    from cuda_agent.cluster.pod import PodEnvironment
    from cuda_agent.optimize import search_pods

    base, here = json.loads(os.environ.get("CUDA_AGENT_POOLS", "[]")), PodEnvironment.from_environment()
    with _explained(here):
        print(json.dumps(search_pods.prepare(here, run, config, workflow, Cluster.of_pod(), base), indent=1))


@pod_app.command()
def search(what: Literal["begin", "player", "end"], run: Run, player: Annotated[int, Option(min=0)] = 0) -> None:
    """Play a step of a search."""
    from cuda_agent.cluster.pod import PodEnvironment
    from cuda_agent.optimize import search_pods

    here = PodEnvironment.from_environment()
    with _explained(here):
        search_pods.search(here, run, what, player)


@pod_app.command(name="search-finish")
def search_finish(workflow: Workflow) -> None:
    """Remove the sandbox servers of a search."""
    from cuda_agent.cluster.run_pools import remove_pools

    remove_pools(Cluster.of_pod(), workflow)


@contextlib.contextmanager
def _explained(here: "PodEnvironment") -> Iterator[None]:
    """Writes why the step of a search in the ``with`` block fails to the pod's status, if Argo will not retry it."""
    from cuda_agent.cluster.pod import termination_message
    from cuda_agent.errors import FINAL, UserError

    try:
        yield
    except UserError as error:
        if error.exit_code in FINAL:
            termination_message(here, str(error))
        raise


@pod_app.command()
def bucket(expire_logs_days: Annotated[int, Option(min=1)] = 30) -> None:
    """Create the store's bucket in MinIO, with a rule that deletes Argo's logs after some days."""
    from cuda_agent.cluster import bucket as making
    from cuda_agent.cluster.pod import PodEnvironment

    print(making.make(PodEnvironment.from_environment().store, expire_logs_days))


@pod_app.command()
def probe() -> None:
    """Test whether the store can be written and read, and whether MLflow answers. Print one line per check."""
    from cuda_agent.cluster import bucket as making
    from cuda_agent.cluster.pod import PodEnvironment

    here = PodEnvironment.from_environment()
    failed = False
    for check in making.probe(here.store, here.mlflow):
        print(f"{'✓' if check.ok else '✗'} {check.text}", flush=True)
        failed |= not check.ok
    sys.exit(1 if failed else 0)


@pod_app.command()
def gc(dry_run: Annotated[bool, Option("--dry-run")] = False, keep: Keep = 10, days: Days = 7.0) -> None:
    """Remove old runs, the data that only they need, and their rows in MLflow.

    Also remove Kubernetes objects that Argo Workflows left: servers of ended ones, ConfigMaps of deleted ones."""
    from cuda_agent.cluster import pod_maintenance
    from cuda_agent.cluster.pod import PodEnvironment

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_RETRY))  # the lock in the store goes with this process
    here = PodEnvironment.from_environment()
    found = pod_maintenance.collect(here, keep, days, dry_run, Cluster.of_pod())
    pod_maintenance.answer(here, found)
    print(json.dumps(found, indent=1))


@pod_app.command()
def pin(run: Run, remove: Annotated[bool, Option("--remove")] = False) -> None:
    """Pin a run, so that gc keeps it, or remove its pin."""
    from cuda_agent.cluster import pod_maintenance
    from cuda_agent.cluster.pod import PodEnvironment

    here = PodEnvironment.from_environment()
    pod_maintenance.answer(here, pod_maintenance.pin(here, run, not remove))


@pod_app.command()
def doctor(workflow: Workflow) -> None:
    """Test the store and MLflow from inside the cluster, and test that a sandbox cannot connect to other services."""
    from cuda_agent.cluster import pod_maintenance
    from cuda_agent.cluster.pod import PodEnvironment

    here = PodEnvironment.from_environment()
    base = json.loads(os.environ.get("CUDA_AGENT_POOLS", "[]"))
    places = pod_maintenance.forbidden(here.mlflow)
    found = [vars(check) for check in pod_maintenance.doctor(here, workflow, Cluster.of_pod(), base, places)]
    pod_maintenance.answer(here, found)
    print(json.dumps(found, indent=1))


@pod_app.command()
def reach(addresses: list[str]) -> None:
    """Try to connect to addresses, and write the results to the pod's termination message."""
    from cuda_agent.cluster.pod_maintenance import tell

    tell(addresses)
