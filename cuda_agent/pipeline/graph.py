"""The graph: one table of stages.  Executors, cache keys, the live table and the report all read it, nothing else says
what depends on what.

What it does not cover: how a stage is run (``local``), and what a stage does (``cuda_agent.stages``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# An input of this name is no artifact of one stage: the executor makes it, a folder with one sub-folder a finished
# stage above: ``<stage>/metrics.jsonl``, ``<stage>/notes.jsonl``, ``<stage>/manifest.json``; and ``config.json``.
STAGES_INPUT = "stages"


@dataclass(frozen=True)
class Stage:
    """One row.  ``module`` has ``run(ctx)``; ``inputs`` maps the name under which the stage finds an artifact to the
    ``stage.artifact`` that makes it."""

    name: str
    module: str
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    config: tuple[str, ...] = ()  # sections it reads; the others are absent from ctx.config
    timing: bool = False  # holds times: the device is part of its key, and nothing runs beside it
    weight: float = 1.0  # share of a run's time, for the progress of the whole

    @property
    def upstream(self) -> tuple[str, ...]:
        """The stages whose artifacts it reads, in order."""
        return tuple(dict.fromkeys(source.split(".")[0] for source in self.inputs.values() if source != STAGES_INPUT))


_PLAY = ("sandbox", "policy", "agent")  # what everything reads that lets a policy write kernels
_PLACE = ("runtime", "ray")  # what those read that can be spread over Ray's actors


def _evaluate(which: str, source: str) -> Stage:
    return Stage(
        f"evaluate-{which}",
        "cuda_agent.stages.evaluate",
        inputs={"tasks": "synthesis.tasks", "policy": source},
        outputs=("scores",),
        config=(*_PLAY, *_PLACE, "evaluate"),
        timing=True,
        weight=1.0,
    )


STAGES: tuple[Stage, ...] = (
    Stage(
        "synthesis",
        "cuda_agent.stages.synthesis",
        outputs=("tasks",),
        config=("sandbox", "synthesis"),
        timing=True,
        weight=2.0,
    ),
    Stage(
        "bootstrap",
        "cuda_agent.stages.bootstrap",
        inputs={"tasks": "synthesis.tasks"},
        outputs=("policy",),
        config=(*_PLAY, "training", "bootstrap"),
        weight=5.0,
    ),
    Stage(
        "warmup",
        "cuda_agent.stages.warmup",
        inputs={"tasks": "synthesis.tasks", "policy": "bootstrap.policy"},
        outputs=("policy",),
        config=(*_PLAY, *_PLACE, "lora", "training", "warmup"),
        timing=True,
        weight=2.0,
    ),
    Stage(
        "collect",
        "cuda_agent.stages.collect",
        inputs={"tasks": "synthesis.tasks", "policy": "warmup.policy"},
        outputs=("episodes",),
        config=(*_PLAY, *_PLACE, "collect"),
        timing=True,
        weight=1.0,
    ),
    Stage(
        "rft",
        "cuda_agent.stages.rft",
        inputs={"episodes": "collect.episodes", "policy": "warmup.policy"},
        outputs=("policy",),
        config=("policy", "lora", "training", "rft"),
        weight=0.5,
    ),
    Stage(
        "critic",
        "cuda_agent.stages.critic",
        inputs={"episodes": "collect.episodes", "policy": "warmup.policy"},
        outputs=("critic",),
        config=("policy", "lora", "training", "critic"),
        weight=0.5,
    ),
    Stage(
        "agentic",
        "cuda_agent.stages.agentic",
        inputs={"tasks": "synthesis.tasks", "policy": "rft.policy", "critic": "critic.critic"},
        outputs=("policy", "critic"),
        config=(*_PLAY, *_PLACE, "lora", "training", "agentic"),
        timing=True,
        weight=4.0,
    ),
    _evaluate("base", "bootstrap.policy"),
    _evaluate("warmup", "warmup.policy"),
    _evaluate("rft", "rft.policy"),
    _evaluate("agentic", "agentic.policy"),
    Stage(
        "report",
        "cuda_agent.stages.report",
        inputs={
            "tasks": "synthesis.tasks",
            "scores-base": "evaluate-base.scores",
            "scores-warmup": "evaluate-warmup.scores",
            "scores-rft": "evaluate-rft.scores",
            "scores-agentic": "evaluate-agentic.scores",
            "stages": STAGES_INPUT,
        },
        outputs=("report",),
        config=("sandbox",),
        weight=0.2,
    ),
)


def ancestors(stages: Sequence[Stage], name: str) -> list[str]:
    """All stages above ``name``, in the table's order."""
    by_name = {stage.name: stage for stage in stages}
    found: set[str] = set()
    front = [name]
    while front:
        for above in by_name[front.pop()].upstream:
            if above not in found:
                found.add(above)
                front.append(above)
    return [stage.name for stage in stages if stage.name in found]


def up_to(stages: Sequence[Stage], name: str) -> tuple[Stage, ...]:
    """``name`` and all stages above it, in the table's order.  Raises ValueError when there is no such stage."""
    if name not in {stage.name for stage in stages}:
        raise ValueError(f"there is no stage {name}: {', '.join(stage.name for stage in stages)}")
    chosen = {name, *ancestors(stages, name)}
    return tuple(stage for stage in stages if stage.name in chosen)


def check(stages: Iterable[Stage]) -> None:
    """Every input comes from a row further up, so the table is also an order of execution; names are unique."""
    made: set[str] = set()
    names: set[str] = set()
    for stage in stages:
        missing = [source for source in stage.inputs.values() if source not in made and source != STAGES_INPUT]
        if missing or stage.name in names:
            raise ValueError(
                f"stage {stage.name}: {'defined twice' if stage.name in names else f'nobody above makes {missing}'}"
            )
        names.add(stage.name)
        made |= {f"{stage.name}.{artifact}" for artifact in stage.outputs}
