"""MLflow's rows of runs that are gone or were cut off.

A run that is killed with all its processes leaves its rows in the state RUNNING.  A garbage collection ends them, and
deletes the rows of runs that it removes.  Several stores can share a server, so the row of a run must have a certain
tag: the id of the store, or the hash of the run's configuration."""

from collections.abc import Collection, Iterable
from typing import Any

from cuda_agent.mlflow_api import Api, connect
from cuda_agent.tracking import RUN_TAG, STORE_TAG, SWEEP_TAG, with_tag


def tidy(uri: str, store: str, gone: Iterable[str], sweeps: Iterable[str], still: Collection[str]) -> dict[str, Any]:
    """Deletes the rows of the runs ``gone`` and of their ``sweeps`` in the MLflow at ``uri``, and ends those of runs in
    ``still`` that are shown as running.  ``store`` is the id of the store to which the runs belong.

    Returns:
        ``rows``, the number of deleted rows, and ``ended``, the names of the runs whose rows were ended; or ``mlflow``,
        the reason why MLflow could not be asked: the store has been collected then, nevertheless."""
    if uri == "off":
        return {"rows": 0, "ended": []}
    try:
        api, ours = connect(uri), (STORE_TAG, store)
        return {"rows": delete(api, ours, gone, sweeps), "ended": end(api, ours, still)}
    except Exception as error:
        return {"rows": 0, "ended": [], "mlflow": (str(error).splitlines() or [type(error).__name__])[0][:300]}


def delete(api: Api, tag: tuple[str, str], runs: Iterable[str], sweeps: Iterable[str]) -> int:
    """Deletes the rows of ``runs`` that have the tag ``tag`` (name, value), with those of their stages, and the common
    parents of ``sweeps``, if no row is left below them.  Returns how many rows were deleted."""
    experiments = api.experiments()
    gone = [row for run in runs for row in with_tag(api.find(experiments, RUN_TAG, run), *tag)]
    for row in gone:
        api.delete(row.run_id)
    for sweep in sweeps:
        left = api.find(experiments, SWEEP_TAG, sweep)
        parents = [row for row in left if not row.tags.get(RUN_TAG)]
        if len(left) == len(parents):
            gone += parents
            for row in parents:
                api.delete(row.run_id)
    api.purge([row.run_id for row in gone])
    return len(gone)


def end(api: Api, tag: tuple[str, str], runs: Collection[str]) -> list[str]:
    """Ends the rows of ``runs`` with the tag ``tag`` (name, value) that MLflow shows as running, and those of their
    stages.  Returns the names of these runs."""
    ended, experiments = [], api.experiments()
    for name in sorted({row.tags.get(RUN_TAG, "") for row in api.running(experiments)} & set(runs)):
        own = [row for row in with_tag(api.find(experiments, RUN_TAG, name), *tag) if row.status == "RUNNING"]
        for row in own:
            api.end(row.run_id, "KILLED")
        ended += [name] if own else []
    return ended
