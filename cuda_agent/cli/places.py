"""Finds the run, the store or the cluster that a command names."""

from typing import TYPE_CHECKING

from cuda_agent.cli.options import STORE
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.errors import ConfigError

if TYPE_CHECKING:
    from cuda_agent.pipeline.runs import Run
    from cuda_agent.storage import Store


def find(run: str, store: str, on: str | None, namespace: str | None) -> "tuple[tuple[Store, Run] | Cluster, str]":
    """Finds a run by its name, the start of its name, or ``last``.

    ``on`` selects where to look: ``local`` (in the store), a context of the kubeconfig (on its cluster), or None
    (first in the store, then on the current cluster if ``store`` is the default store).  On a cluster, a name that no
    Workflow has is returned unchanged, because MLflow may still have the run.

    Returns:
        A pair.  First: (store, record) for a run of the store, or the cluster.  Second: the run's full name.

    Raises:
        ConfigError: Several runs match, or no run matches.  On a cluster, the latter is raised only for ``last``.
        StoreError: The store cannot be read.
        ClusterError: The cluster does not answer, or refuses."""
    from cuda_agent.cluster import submit as cluster
    from cuda_agent.pipeline import runs
    from cuda_agent.storage import StoreUnavailable

    if on not in (None, "local"):
        place = cluster_of(on, namespace)
        return place, cluster.known_name(place, run)
    nearest: Exception
    try:
        opened = open_existing(store)
        record = runs.find_run(opened, run)
        return (opened, record), record.name
    except (ConfigError, StoreUnavailable) as error:
        several = isinstance(error, ConfigError) and runs.matching([each.name for each in runs.list_runs(opened)], run)
        if on == "local" or several:
            raise
        nearest = error
    if (elsewhere := current(store, namespace)) is None:
        raise nearest
    try:
        return elsewhere, cluster.known_name(elsewhere, run)
    except ConfigError as error:
        raise ConfigError(f"{nearest}\n{error}") from None
    except ClusterError as error:
        raise ClusterError(f"{nearest}\n{error}", error.status) from None


def open_existing(store: str) -> "Store":
    """Opens the store at the address ``store``.  Never creates its folder.

    Raises:
        StoreUnavailable: The folder of the store does not exist."""
    from cuda_agent.storage import StoreUnavailable, local_folder, open_store

    folder = local_folder(store)
    if folder is not None and not folder.is_dir():
        raise StoreUnavailable(f"There is no store at {folder}. Name one with --store, or start a run.")
    return open_store(store)


def cluster_of(on: str | None, namespace: str | None) -> Cluster:
    """Returns the cluster of the kubeconfig's context ``on``; None or ``.`` stands for the current context.

    Raises:
        ClusterError: The kubeconfig cannot be used.
        ConfigError: The Kubernetes client is not installed."""
    try:
        return Cluster.of_kubeconfig(None if on == "." else on, namespace)
    except ModuleNotFoundError as missing:
        raise ConfigError(f"this needs {missing.name}: pip install 'cuda-agent[cluster]'") from None


def current(store: str, namespace: str | None) -> Cluster | None:
    """Returns the cluster of the kubeconfig's current context.  Returns None if ``store`` is not the default store,
    because then only that store is searched.  Also returns None without a context or Kubernetes client."""
    if store != STORE:
        return None
    try:
        return cluster_of(None, namespace)
    except (ClusterError, ConfigError):
        return None
