"""Compares runs: two runs with each other, the runs of a sweep, and a stage with its earlier result."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cuda_agent.compose import flat, flat_values, section_values
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_DONE, ConfigError
from cuda_agent.pipeline.closure import code_digests, environment_versions
from cuda_agent.pipeline.graph import GRAPHS, ROWS, Stage, policy_of
from cuda_agent.pipeline.manifest import Identity, Manifest, read_manifest
from cuda_agent.pipeline.runs import Run, list_runs, read_config, run_manifests
from cuda_agent.storage import Store, StoreDamaged, side_by_side

_PARTS = ("code", "environment", "device", "inputs")  # of a cache key, besides the configuration
_RECENT = 100  # runs in which the earlier result of a stage is looked for
_NAMES = 3  # most names of changed files or keys in one message


@dataclass(frozen=True)
class Facts:
    """The name, settings and manifests (records of finished stages) of a run."""

    name: str
    config: Config
    manifests: dict[str, Manifest]  # by stage

    @property
    def settings(self) -> dict[str, Any]:
        """Returns dotted key of the configuration -> value."""
        return flat(self.config)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Returns policy -> metric -> value, in the order of the evaluations.  The last policy is the run's result."""
        found = {row.name: self.manifests[row.name].scores for row in ROWS if row.name in self.manifests}
        return {policy_of(stage, self.config.sandbox.clock): scores for stage, scores in found.items() if scores}


def facts(store: Store, run: Run, stages: Sequence[Stage]) -> Facts:
    return Facts(run.name, read_config(store, run.config), run_manifests(store, run, stages))


def standings(store: Store, records: Sequence[Run]) -> list[tuple[list[str], str, dict[str, float]]]:
    """Returns for each run the names of its finished stages, the policy that was scored last ("" if none was), and
    metric -> value.  The records of done runs have them; those of other runs are read from their manifests."""
    read = iter(side_by_side(partial(_standing, store), [run for run in records if not _is_known(run)]))
    return [(run.stages, run.policy, run.scores) if _is_known(run) else next(read) for run in records]


def _standing(store: Store, run: Run) -> tuple[list[str], str, dict[str, float]]:
    there = _finished(store, run)
    finished = [stage for stage in GRAPHS[run.graph] if stage.name in there]
    names = [stage.name for stage in finished]
    for stage in reversed([stage.name for stage in finished if stage.about]):
        if (manifest := read_manifest(store, run.name, stage)) and manifest.scores:
            return names, policy_of(stage, run.clock), manifest.scores
    return names, "", {}


def _is_known(run: Run) -> bool:
    """Returns whether the record of ``run`` has its finished stages: other runs may have been continued since."""
    return run.code == EXIT_DONE and run.stages != []


def _finished(store: Store, run: Run) -> list[str]:
    """Returns the names of a run's finished stages, in any order."""
    if _is_known(run):
        return run.stages
    return [key.split("/")[2] for key in store.list(f"runs/{run.name}") if key.endswith("/manifest.json")]


def diff(one: Facts, other: Facts, stages: Sequence[Stage] = ROWS) -> dict[str, Any]:
    """Compares two runs.  Returns the scores of both, and the settings and the stages that differ.  ``stages`` say
    which sections of the configuration are part of a stage's cache key.

    A stage differs if only one run has finished it, or if the runs have different cache keys for it.  (A cache key is a
    hash of a stage's code, environment, device, inputs and configuration.)  If the keys differ, the stage's entry has:

    - the parts of the key that differ;
    - the stage's duration in each run, in seconds;
    - the names of the outputs that are equal in both runs."""
    before, after = one.settings, other.settings
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    sections = {stage.name: stage.config for stage in stages}
    changes: dict[str, Any] = {}
    for name in one.manifests | other.manifests:
        a, b = one.manifests.get(name), other.manifests.get(name)
        if a is None or b is None:
            changes[name] = {"only in": one.name if a else other.name}
        elif a.key != b.key:
            pairs = {part: [getattr(a, part), getattr(b, part)] for part in _PARTS}
            parts: dict[str, Any] = {part: pair for part, pair in pairs.items() if pair[0] != pair[1]}
            values = [section_values(run.config, sections.get(name, ())) for run in (one, other)]
            if not parts or values[0] != values[1]:
                parts["configuration"] = True
            changes[name] = {
                "differs in": parts,
                "seconds": [a.seconds, b.seconds],
                "same outputs": [artifact for artifact in a.outputs if a.outputs[artifact] == b.outputs.get(artifact)],
            }
    return {
        "runs": [one.name, other.name],
        "scores": {policy: [one.scores.get(policy), other.scores.get(policy)] for policy in one.scores | other.scores},
        "config": {key: [before.get(key), after.get(key)] for key in keys},
        "stages": changes,
    }


def of_sweep(store: Store, name: str) -> list[Facts]:
    """Returns the runs of the sweep ``name``, oldest first."""
    return [facts(store, record, ROWS) for record in list_runs(store) if record.sweep == name]


def sweep_rows(found: Sequence[Facts]) -> list[dict[str, Any]]:
    """Returns a row for each run of a sweep: ``run`` (its name), ``settings`` (the keys whose values differ between the
    runs), ``policy`` (the last one that was scored, or "") and its ``scores``.  Of keys that have the same values in
    every run, such as ``seed`` and ``synthesis.seed``, only the first is in ``settings``."""
    settings = [run.settings for run in found]
    columns: dict[str, str] = {}  # values in all runs -> key
    for key in dict.fromkeys(key for own in settings for key in own if not key.startswith("run.")):
        column = [repr(own.get(key)) for own in settings]
        if len(set(column)) > 1:
            columns.setdefault(str(column), key)
    rows = []
    for run, own in zip(found, settings, strict=True):
        policy, scores = next(reversed(run.scores.items()), ("", {}))
        swept = {key: own.get(key) for key in columns.values()}
        rows.append({"run": run.name, "settings": swept, "policy": policy, "scores": scores})
    return rows


def newest_results(store: Store) -> dict[str, str]:
    """Returns stage -> name of the newest run that has finished this stage, with a new result or one from the cache.
    Of stages that none of the newest ``_RECENT`` runs has finished, it returns nothing."""
    recent = list_runs(store)[-_RECENT:]
    found: dict[str, str] = {}
    for run, finished in zip(recent, side_by_side(partial(_finished, store), recent), strict=True):
        found |= dict.fromkeys(finished, run.name)
    return found


def why_missed(store: Store, run: str | None, stage: Stage, identity: Identity) -> str:
    """Returns why the cache has no result of ``stage`` with this identity: what has changed since the result that
    ``run`` uses.  Returns "" if ``run`` is None or has no such result."""
    if run is None or (before := read_manifest(store, run, stage.name)) is None:
        return ""
    if before.key == identity.key:
        return f"the result of run {run} " + ("lost episodes to faults" if before.lost else "is no longer complete")
    inputs = _changed(before.inputs, identity.inputs)
    changes = [_names("input", inputs)] if inputs else []
    changes += _changed_settings(store, before.config, stage, identity)
    if before.code != identity.code:
        changes.append(_names("code", _changed(_kept(store, before.code), code_digests(stage.module))))
    if before.environment != identity.environment:
        names = _changed(_kept(store, before.environment), environment_versions())
        changes.append(_names("environment", names))
    if before.device != identity.device:
        changes.append(f"device {before.device} -> {identity.device}")
    if not changes and "task_sets" in identity.config:
        changes = ["files of a task set"]
    return f"changed since run {run}: {'; '.join(changes)}"


def _changed_settings(store: Store, sha256: str, stage: Stage, identity: Identity) -> list[str]:
    try:
        before = flat_values(section_values(read_config(store, sha256), stage.config))
    except (ConfigError, StoreDamaged):  # of another version, or removed
        return ["perhaps the configuration, which is unknown"]
    after = flat_values({name: value for name, value in identity.config.items() if name != "task_sets"})
    changed = [f"{key} {before.get(key)} -> {after.get(key)}" for key in _changed(before, after)]
    return [*changed[:_NAMES], *([f"{len(changed) - _NAMES} more keys"] if len(changed) > _NAMES else [])]


def _kept(store: Store, digest: str) -> dict[str, str]:
    try:
        return store.get_json(digest)
    except StoreDamaged:  # made by an earlier version, or an image's digest
        return {}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names whose values differ.  Returns an empty list if ``before`` is empty, which means unknown."""
    return [name for name in sorted(before | after) if before and before.get(name) != after.get(name)]


def _names(part: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{part} ({', '.join(names[:_NAMES])}{more})" if names else part
