"""Defines the graph of the training workflow as a table, ``ROWS``, with one row per stage.

A row holds all facts about one stage, such as the stage's inputs and outputs, and the sections of the configuration
that enter the stage's cache key.  A variant of the graph leaves out some rows.  ``Config.graph`` selects the
variant."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cuda_agent.config import Config
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import work
from cuda_agent.pipeline.work import Estimate

# The executor makes the input of this name.  It is a folder with one sub-folder for each finished stage above
# (``metrics.jsonl``, ``notes.jsonl``, ``manifest.json``), with ``graph.json`` (name, chart, curves and about of those
# stages' rows, in order) and with ``config.json``.
STAGES_INPUT = "stages"
GRAPH_FILE = "graph.json"

ABSENT = "absent"  # the state, in a cluster's plan, of a stage that the run's graph leaves out


@dataclass(frozen=True)
class Stage:
    """One stage: a row of the graph's table.  Its code is the function ``run(ctx)`` in the Python module ``module``.

    ``inputs`` maps the name of each input to its source: an artifact of an earlier stage, such as ``warmup.policy``.
    In ``ROWS`` a source may list alternatives, as in ``rft.policy | warmup.policy``.  The input is then the first
    artifact whose stage is in the graph.  A ``?`` after the source makes the input optional: if the graph lacks the
    source's stage, the input is absent.  The source ``STAGES_INPUT`` stands for a folder that describes all stages on
    which this stage depends."""

    name: str
    module: str
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # names of the artifacts that the stage makes
    config: tuple[str, ...] = ()  # sections, or keys of them, that the stage reads; ctx.config has no others
    timing: bool = False  # whether it measures times: the device is then part of its key, and it runs alone
    weight: float = 1.0  # share of a run's time, for the progress of the run
    work: Estimate | None = None  # estimates its work for a run's schedule; None: the schedule omits the stage
    chart: str = ""  # heading of its curves in the report; stages may share a heading; empty: no curves
    curves: tuple[str, ...] = ()  # metrics whose curves the report shows unfolded
    about: str = ""  # for an evaluation: name of the scored policy in the report's tables

    @property
    def upstream(self) -> tuple[str, ...]:
        """Returns the names of the stages whose artifacts this stage reads.  If an input has alternative sources,
        includes the stages of all alternatives."""
        sources = [source for text in self.inputs.values() if text != STAGES_INPUT for source in _alternatives(text)]
        return tuple(dict.fromkeys(source.split(".")[0] for source in sources))


_PLAY = ("sandbox", "policy", "agent")  # sections that every stage reads in which a policy writes kernels
_PLACE = ("runtime", "ray")  # sections that every stage reads which can run on Ray's actors
_PPO_CURVES = (
    "reward", "pass_rate", "faster_than_eager", "faster_than_compile", "explained_variance",
    "heldout_explained_variance", "heldout_pass_rate", "heldout_speedup", "entropy", "kl", "response_length",
)  # fmt: skip
_SUPERVISED: dict[str, Any] = {
    "chart": "Supervised stages",
    "curves": ("heldout_explained_variance", "loss", "heldout_loss", "value_loss"),
}


def _stage(name: str, **facts: Any) -> Stage:
    return Stage(name, f"cuda_agent.stages.{name}", **facts)


def _evaluate(which: str, about: str, policy: str) -> Stage:
    return Stage(
        f"evaluate-{which}", "cuda_agent.stages.evaluate",
        inputs={"tasks": "synthesis.tasks", "policy": policy}, outputs=("scores",),
        config=(*_PLAY, *_PLACE, "evaluate"), timing=True, work=work.evaluate, about=about,
    )  # fmt: skip


# fmt: off
ROWS: tuple[Stage, ...] = (
    _stage(
        "synthesis", outputs=("tasks",),
        config=("sandbox", "synthesis"), timing=True, weight=2.0, work=work.synthesis,
    ),
    _stage(
        "bootstrap", inputs={"tasks": "synthesis.tasks"}, outputs=("policy",),
        config=(*_PLAY, "training", "bootstrap"), weight=5.0, work=work.bootstrap, **_SUPERVISED,
    ),
    _evaluate("base", "before reinforcement learning", policy="bootstrap.policy"),
    _stage(
        "warmup", inputs={"tasks": "synthesis.tasks", "policy": "bootstrap.policy"}, outputs=("policy",),
        config=(*_PLAY, *_PLACE, "lora", "training", "warmup"), timing=True, weight=2.0,
        work=lambda config: work.ppo(config, config.warmup, config.agent.turn_tokens),
        chart="One-shot PPO (warmup)", curves=_PPO_CURVES,
    ),
    _evaluate("warmup", "after one-shot PPO", policy="warmup.policy"),
    _evaluate("one-shot", "after one-shot PPO, one answer without tools", policy="warmup.policy"),
    _stage(
        "collect", inputs={"tasks": "synthesis.tasks", "policy": "warmup.policy"}, outputs=("episodes",),
        config=(*_PLAY, *_PLACE, "collect"), timing=True, work=work.collect,
    ),
    _stage(
        "rft", inputs={"episodes": "collect.episodes", "policy": "warmup.policy"}, outputs=("policy",),
        config=("policy", "lora", "training", "rft"), weight=0.5,
        work=lambda config: work.supervised(config, config.rft), **_SUPERVISED,
    ),
    _evaluate("rft", "after rejection fine-tuning", policy="rft.policy"),
    _stage(
        "critic", inputs={"episodes": "collect.episodes", "policy": "warmup.policy"}, outputs=("critic",),
        config=("policy", "lora", "training", "critic", "agentic.reward"), weight=0.5,
        work=lambda config: work.supervised(config, config.critic), **_SUPERVISED,
    ),
    _stage(  # without the input critic the stage makes a critic from the policy
        "agentic",
        inputs={"tasks": "synthesis.tasks", "policy": "rft.policy | warmup.policy", "critic": "critic.critic?"},
        outputs=("policy", "critic"),
        config=(*_PLAY, *_PLACE, "lora", "training", "agentic"), timing=True, weight=4.0,
        work=lambda config: work.ppo(config, config.agentic, work.agent_tokens(config, config.agent.turns)),
        chart="Multi-turn PPO (agentic)", curves=_PPO_CURVES,
    ),
    _evaluate("agentic", "after multi-turn PPO", policy="agentic.policy"),
    _stage(
        "report",
        inputs={
            "tasks": "synthesis.tasks", "scores-base": "evaluate-base.scores",
            "scores-warmup": "evaluate-warmup.scores", "scores-rft": "evaluate-rft.scores?",
            "scores-agentic": "evaluate-agentic.scores?", "scores-one-shot": "evaluate-one-shot.scores?",
            "stages": STAGES_INPUT,
        },
        outputs=("report",), config=("sandbox",), weight=0.2,
    ),
)
# fmt: on


def without(rows: Sequence[Stage], left_out: Iterable[str]) -> tuple[Stage, ...]:
    """Returns ``rows`` without the stages that ``left_out`` names.  If an input has alternative sources, keeps only the
    first source that a remaining stage makes.

    Raises:
        ValueError: A required input has no source left, or a stage in ``left_out`` does not exist."""
    names = {row.name for row in rows}
    if unknown := set(left_out) - names:
        raise ValueError(f"there is no stage {', '.join(sorted(unknown))}: {', '.join(row.name for row in rows)}")
    kept = names - set(left_out)

    def inputs_of(row: Stage) -> Iterator[tuple[str, str]]:
        for name, text in row.inputs.items():
            made = [source for source in _alternatives(text) if source == STAGES_INPUT or source.split(".")[0] in kept]
            if made:
                yield name, made[0]
            elif not text.endswith("?"):
                raise ValueError(f"stage {row.name}: no stage of this graph makes {text}")

    graph = tuple(replace(row, inputs=dict(inputs_of(row))) for row in rows if row.name in kept)
    check(graph)
    return graph


def policy_of(evaluation: str, clock: str) -> str:
    """Returns the policy that the stage ``evaluation`` scores: ``agentic`` for ``evaluate-agentic``.  Adds a remark if
    its speed-ups are not measured: ``clock``, the setting ``sandbox.clock``, is "model"."""
    return evaluation.removeprefix("evaluate-") + (", model clock" if clock == "model" else "")


def ancestors(stages: Sequence[Stage], name: str) -> list[str]:
    """Returns the names of all stages on which stage ``name`` depends, directly or not, in the order of ``stages``."""
    found = {name}
    for stage in reversed(stages):  # the table is an order of execution
        if stage.name in found:
            found.update(stage.upstream)
    return [stage.name for stage in stages if stage.name in found - {name}]


def needs(stages: Sequence[Stage], stage: Stage) -> Sequence[str]:
    """Returns the names of the stages that must be done before ``stage``: the stages that make its inputs.  If one of
    its inputs is ``STAGES_INPUT`` (a folder that describes the stages before it), returns all stages on which ``stage``
    depends, directly or not."""
    return ancestors(stages, stage.name) if STAGES_INPUT in stage.inputs.values() else stage.upstream


def up_to(stages: Sequence[Stage], name: str) -> tuple[Stage, ...]:
    """Returns stage ``name`` and all stages on which it depends, directly or not, in the order of ``stages``.

    Raises:
        ConfigError: There is no stage ``name``."""
    names = [stage.name for stage in stages]
    if name not in names:
        raise ConfigError(f"--to: there is no stage {name}: {', '.join(names)}")
    chosen = {name, *ancestors(stages, name)}
    return tuple(stage for stage in stages if stage.name in chosen)


def check(stages: Iterable[Stage]) -> None:
    """Raises ValueError if two stages have the same name, or a stage reads an artifact that no earlier stage makes."""
    made: set[str] = {STAGES_INPUT}
    names: set[str] = set()
    for stage in stages:
        if stage.name in names:
            raise ValueError(f"stage {stage.name}: defined twice")
        if missing := [s for text in stage.inputs.values() for s in _alternatives(text) if s not in made]:
            raise ValueError(f"stage {stage.name}: no stage above makes {missing}")
        names.add(stage.name)
        made |= {f"{stage.name}.{artifact}" for artifact in stage.outputs}


def _alternatives(source: str) -> list[str]:
    return [text.strip() for text in source.removesuffix("?").split("|")]


# Stages of ``ROWS`` that each variant leaves out, by the value of ``Config.graph``.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "full": ("evaluate-one-shot",),
    "no_rft": ("rft", "evaluate-rft", "evaluate-one-shot"),
    "no_critic": ("critic", "evaluate-one-shot"),
    "one_shot": ("collect", "rft", "critic", "agentic", "evaluate-rft", "evaluate-agentic"),
}
GRAPHS: dict[str, tuple[Stage, ...]] = {name: without(ROWS, left_out) for name, left_out in LEFT_OUT.items()}
STAGES = GRAPHS["full"]  # the paper's graph


def stages_of(config: Config) -> tuple[Stage, ...]:
    return GRAPHS[config.graph]
