"""The steps of a search on a cluster.  Each runs in a separate pod; Argo decides their order and retries them.

    prepare  writes the order of the search to the store and starts its sandbox servers
    search   one of the steps of ``fan_out``: begin, a player, or the end
    finish   removes the sandbox servers

Only the pods of the step ``search`` have the key of the model's server and may reach it.  They run nothing that the
model writes: that runs in the sandbox servers, which are other pods."""

import asyncio
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from cuda_agent.cluster import run_pools, searches
from cuda_agent.cluster.api import Cluster
from cuda_agent.cluster.pod import LAST_RECORD_SECONDS, PodEnvironment
from cuda_agent.compose import validate
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError, TryAgain
from cuda_agent.optimize import fan_out, screen
from cuda_agent.optimize.archive import beside
from cuda_agent.optimize.shared_archive import SharedArchive
from cuda_agent.pipeline.manifest import placed
from cuda_agent.pipeline.runs import cache_of
from cuda_agent.storage import open_store


def prepare(
    here: PodEnvironment,
    name: str,
    sha256: str,
    workflow: str,
    cluster: Cluster | None,
    base: Sequence[dict[str, Any]],
) -> dict[str, str]:
    """Writes the order of the search ``name`` to the store, and starts its sandbox servers.

    Args:
        sha256: Hash of the order.
        workflow: Name of the search's Workflow.
        cluster: The cluster on which the servers start; None: no servers are started.
        base: Templates of the sandbox servers' Kubernetes objects.

    Returns:
        The outputs, which are also written to files for Argo: ``servers``, the addresses of the sandbox servers,
        separated by commas, and ``players``, the numbers of the players as JSON.

    Raises:
        TryAgain: The ConfigMap with the order does not exist yet.
        ConfigError: The order does not have this hash, or there is a search of this name for another problem.
        ClusterError: The sandbox servers do not become ready."""
    if not here.config.exists():
        raise TryAgain("The order has not arrived yet: it is made right after its Workflow.")
    text = here.config.read_text()
    if hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise ConfigError("The order of the search was changed on its way.")
    held, shared = json.loads(text), SharedArchive(open_store(here.store), name)
    before = shared.order()
    if before is not None and before["code"] != held["code"]:
        raise ConfigError(f"There is a search {name} for another problem.")
    config = _config(held)
    shared.store.put(shared.key("order.json"), text.encode())
    servers = run_pools.make_pools(cluster, base, workflow, config) if cluster else []
    count = beside(int(held["order"]["attempts"]), True)
    outputs = {"servers": ",".join(servers), "players": json.dumps([*range(count)])}
    here.plan.mkdir(parents=True, exist_ok=True)
    for output, value in outputs.items():
        (here.plan / output).write_text(value)
    return outputs


def search(here: PodEnvironment, name: str, what: str, player: int) -> None:
    """Plays a step of the search ``name``: ``begin``, ``player`` or ``end``.

    Raises:
        UserError: See the functions of ``fan_out``.
        TryAgain: MLflow does not take the result."""
    shared = SharedArchive(open_store(here.store), name)
    held = shared.order()
    config = placed(_config(held)) if held else Config()
    here.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=here.work) as folder:
        write = partial(print, flush=True)
        step = fan_out.step_of(shared, config.sandbox, cache_of(config), Path(folder), screen.plain(write, 160))
        if what == "begin":
            asyncio.run(fan_out.begin(step))
        elif what == "player":
            write(asyncio.run(fan_out.play_player(step, player)))
        else:
            outcome = asyncio.run(fan_out.end(step))
            if here.mlflow != "off":
                _leave(here.mlflow, name, outcome.folder)


def _leave(mlflow: str, name: str, folder: Path) -> None:
    deadline = time.monotonic() + LAST_RECORD_SECONDS
    while True:
        try:
            return searches.leave(mlflow, name, folder)
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise TryAgain(f"MLflow does not take the result: {error}") from None
            time.sleep(2.0)


def _config(held: dict[str, Any]) -> Config:
    """Returns a configuration with the sandbox's settings of the order ``held``."""
    return validate({"sandbox": held["sandbox"]})
