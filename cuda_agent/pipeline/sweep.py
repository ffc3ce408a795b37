"""Turns a sweep into a list of runs.  A sweep is a list of overrides (``key=value``) in Hydra's grammar, of which some
have several values.

For example, ``critic.lr=1e-5,3e-5 'seed=range(3)'`` gives 6 runs: the cartesian product, in which the last key changes
fastest.  The runs of the sweep NAME are called NAME-1, NAME-2, and so on.  In a sweep of ten or more runs, all numbers
have the same width, as in NAME-01."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cuda_agent.compose import compose, freeze, parse_override
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_RETRY, ConfigError
from cuda_agent.pipeline.local import RunOutcome
from cuda_agent.pipeline.runs import read_run
from cuda_agent.storage import local_folder, open_store

MOST = 256  # most runs of one sweep


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its values of the swept keys, and the configuration that results."""

    overrides: list[str]  # one ``key=value`` for each swept key
    config: Config  # has the run's name in ``run.name``

    @property
    def name(self) -> str:
        return str(self.config.run.name)


def points(overrides: Sequence[str]) -> tuple[str, list[Point]]:
    """Returns the name and the runs of a sweep.  The name is ``run.name`` in ``overrides``, or is made from the date.

    Raises:
        ConfigError: An override is invalid, two runs are equal, no key is swept, or there are over ``MOST`` runs."""
    name, fixed, swept = _read(overrides)
    if not swept:
        raise ConfigError("A sweep needs a key with several values, as in critic.lr=1e-5,3e-5 or 'seed=range(3)'.")
    if empty := [key for key, values in swept.items() if not values]:
        raise ConfigError(f"{empty[0]}: these values are none at all.")
    count = math.prod(len(values) for values in swept.values())
    if count > MOST:
        sizes = " × ".join(str(len(values)) if len(values) <= MOST else f"over {MOST}" for values in swept.values())
        raise ConfigError(f"{sizes}: more than {MOST} runs, the most that one sweep may have. Make several.")
    name = name or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    found: list[Point] = []
    seen: dict[str, Point] = {}
    for number, chosen in enumerate(itertools.product(*swept.values()), start=1):
        label = f"{name}-{number:0{len(str(count))}}"
        point = Point(list(chosen), compose([*fixed, *chosen, f"run.name={label}", f"run.sweep={name}"]))
        nameless = point.config.model_copy(update={"run": point.config.run.model_copy(update={"name": None})})
        other = seen.setdefault(freeze(nameless)[1], point)
        if other is not point:
            raise ConfigError(f"{' '.join(other.overrides)} and {' '.join(point.overrides)} are the same run.")
        found.append(point)
    return name, found


def run_here(points: Sequence[Point], execute: Callable[[Point], RunOutcome]) -> Iterator[tuple[Point, RunOutcome]]:
    """Executes the runs ``points`` of a sweep one after the other, and yields each with its outcome.  A run that is
    already done is not executed again.  The sweep continues after a failed run.  It ends after a run that was stopped
    or could not use the store.

    Raises:
        ConfigError: The store has a run with the same name as a point but another configuration.  All points are
            checked before the first run begins."""
    done = {point.name: _is_done(point) for point in points}
    for point in points:
        outcome = RunOutcome(point.name, 0, resumed=True) if done[point.name] else execute(point)
        yield point, outcome
        if outcome.code == EXIT_RETRY and not outcome.stage:
            return


def _is_done(point: Point) -> bool:
    if (folder := local_folder(point.config.run.store)) is not None and not folder.is_dir():
        return False
    if not (store := open_store(point.config.run.store)).exists(f"runs/{point.name}/run.json"):
        return False
    record = read_run(store, point.name)
    if record.config != freeze(point.config)[1]:
        raise ConfigError(f"run.name: there is a run {point.name} of another configuration. Choose another name.")
    return record.code == 0


def _read(overrides: Sequence[str]) -> tuple[str, list[str], dict[str, list[str]]]:
    """Splits ``overrides`` into three parts: the sweep's name (or ""), the overrides that all runs share, and a map
    from each swept key to one override for each of its values.  For example, ``critic.lr=1e-5,3e-5`` gives
    critic.lr -> ["critic.lr=1e-5", "critic.lr=3e-5"]."""
    from hydra.errors import HydraException

    name, fixed, swept = "", [], {}
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group
        if not override.is_sweep_override():
            if key == "run.name":
                name = str(override.value())
            else:
                fixed.append(text)
            continue
        if key.startswith("run."):
            raise ConfigError(f"{key}: a sweep changes what a run computes, not where it lives or what it is called.")
        if not override.is_discrete_sweep():
            raise ConfigError(f"{text}: expected values to choose from, as in {key}=0.1,0.3 or {key}=range(3).")
        if key in swept:
            raise ConfigError(f"{key}: it is swept twice.")
        try:
            values = [str(value) for value in itertools.islice(override.sweep_string_iterator(), MOST + 1)]
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{text}: cannot be swept over ({reason}). List the values.") from error
        swept[key] = [f"{override.get_key_element()}={value}" for value in values]
    return name, fixed, swept
