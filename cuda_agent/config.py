"""The schema of record for everything a user can set.

Hydra composes ``conf/`` and the overrides exactly once, where the user types (``compose``); the result is validated by
the models below (unknown keys are refused) and frozen as canonical JSON.  Every other process gets that JSON and its
sha256 and validates with the same models (``load``).  Nothing a user can set is ever instantiated by name, and secrets
are names of environment variables, never values.

What it does not cover: which stage reads which section (``pipeline.graph``), and whether the numbers are wise.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from cuda_agent.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


# Keys of ``sandbox`` that say where a solution is judged, and nothing about how.
WHERE_JUDGED = ("servers", "token_env", "token_file")


# The same of ``policy.vllm``, for the policy that plays, and of ``ray``.
WHERE_SERVED = ("servers",)
WHERE_PLACED = ("address", "sync", "trainers", "trainer_cpus", "trainer_gpus", "worker_cpus", "worker_gpus")
OF_LEARNING = ("max_off_policy_steps", "oversample")  # of ``ray``, where nobody learns


# Sections that say how something is computed, and nothing about what.
HOW_COMPUTED = ("training",)


# Keys of before, and what they are called now; ``*`` stands for warmup and agentic.
RENAMED = {
    "sandbox.lane": "sandbox.format",
    "training.ranks": "training.num_processes",
    "training.share": "training.parallelism (rows: data, tokens: context)",
    "ray.staleness": "ray.max_off_policy_steps",
    "bootstrap.batch_tokens": "bootstrap.tokens_per_step",
    "rft.batch_tokens": "rft.tokens_per_step",
    "critic.batch_tokens": "critic.tokens_per_step",
    **{
        f"{stage}.{old}": new if "." in new else f"{stage}.{new}"
        for stage in ("warmup", "agentic")
        for old, new in (
            ("batch", "episodes_per_step"),
            ("samples", "samples_per_prompt"),
            ("importance_cap", "tis_cap"),
            ("old_logprobs", "behavior_logprobs"),
            ("batch_tokens", "training.microbatch_tokens"),
        )
    },
}


SERVED_RANK = 64  # the largest rank of an adapter that vLLM servers of ours take


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _addresses(servers: list[str], example: str) -> list[str]:
    for server in servers:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", server):
            raise ValueError(f"expected addresses such as {example}, got {server!r}")
    if len(set(servers)) < len(servers):
        raise ValueError("an address is listed twice")
    return servers


class RunConfig(Section):
    """Where a run lives.  Read by the executor, never by a stage: changing it invalidates nothing."""

    pipeline: str = Field("cuda-agent", description="name of the MLflow experiment")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run; made from the date when not given"
    )
    sweep: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the sweep it belongs to; set by `cuda-agent sweep`"
    )
    store: str = Field(".cuda-agent/store", description="a folder, memory:// or s3://bucket/prefix")
    mlflow: str | None = Field(None, description="tracking URI; default is SQLite beside the store; 'off' disables")
    parallel_stages: bool = Field(False, description="run sibling stages side by side (needs the memory and cores)")
    retries: int = Field(2, ge=0, description="how often a stage that exits 75 (try again) is started anew")


class SandboxConfig(Section):
    format: Literal["plan", "extension", "python"] = Field("plan", description="form of the solutions")
    device: Literal["cpu", "cuda"] = "cpu"
    clock: Literal["real", "model"] = Field(
        "real", description="model: a deterministic cost instead of time, for drills"
    )
    threads: Positive = Field(2, description="threads of a candidate and of its baselines (cpu)")
    checks: Positive = Field(5, description="inputs a candidate is checked on in quick mode")
    tolerance: float = Field(1e-2, gt=0, description="absolute and relative tolerance of a check")
    timed_calls: Positive = Field(12, description="most timed calls of a candidate in quick mode")
    build_seconds: float = Field(20.0, gt=0, description="limit for one build")
    first_pass_seconds: float = Field(
        180.0,
        gt=0,
        description="limit for a Python solution that compiles (load_inline, Triton, ...) to do so",
    )
    run_seconds: float = Field(10.0, gt=0, description="limit for one evaluation after the build")
    memory_mb: Positive = Field(2048, description="limit for one worker")
    required_walls: list[str] = Field(
        default=["no_new_privs", "landlock", "seccomp"], description="walls proven by an attack before a worker starts"
    )
    servers: list[str] = Field(
        default=[], description="addresses of `cuda-agent sandbox serve`; none: the sandbox runs in this process"
    )
    token_env: str = Field(
        "CUDA_AGENT_SANDBOX_TOKEN", description="environment variable that holds the token of the servers"
    )
    token_file: str | None = Field(None, description="file that holds the token instead")

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, servers: list[str]) -> list[str]:
        return _addresses(servers, "http://host:8750")


class Synthesis(Section):
    train: Positive = Field(16, description="tasks to train on")
    heldout: Positive = Field(24, description="held-out tasks of the teacher's family")
    catalogue: int = Field(6, ge=0, description="held-out tasks of the full operator catalogue, scored apart")
    catalogue_share: Share = Field(0.0, description="share of the training tasks that come from the full catalogue")
    max_candidates: Positive = Field(48, description="most candidates that are compiled")
    max_ops: int = Field(5, ge=1, le=5, description="most torch operators fused in one task")
    window_ms: tuple[float, float] = Field((0.1, 5.0), description="eager time a task must fall into")
    max_similarity: Share = Field(
        0.9, description="structural similarity to the evaluation set above which a task goes"
    )
    evaluation_set: str | None = Field(None, description="folder of tasks that training must not resemble")
    writer: Literal["programmatic", "model"] = Field("programmatic", description="who composes tasks")
    writer_url: str | None = Field(None, description="OpenAI-compatible address of the model writer")
    writer_model: str | None = None
    writer_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")

    @model_validator(mode="after")
    def _window_ascends(self) -> "Synthesis":
        if not 0 <= self.window_ms[0] < self.window_ms[1]:
            raise ValueError(f"window_ms must ascend from at least 0, got {list(self.window_ms)}")
        if self.writer == "model" and not (self.writer_url and self.writer_model):
            raise ValueError("writer=model needs writer_url and writer_model")
        return self


class Vllm(Section):
    """The servers of ``policy.engine=vllm``."""

    servers: list[str] = Field(
        default=[], description="addresses of running vLLM servers; none: the stage starts its own on this machine"
    )
    replicas: Positive = Field(1, description="servers that a stage starts")
    sync: Literal["disk", "lora", "nccl"] = Field(
        "disk", description="how new weights reach them: a folder, an adapter, or a broadcast (NCCL, Gloo on a cpu)"
    )
    gpu_memory: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that a server of ours takes")

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, servers: list[str]) -> list[str]:
        return _addresses(servers, "http://host:8000")


class PolicyConfig(Section):
    base: str | None = Field(
        None, description="Hugging Face folder or name; none: a small model is trained from scratch"
    )
    layers: Positive = 4
    hidden: Positive = 128
    heads: Positive = 4
    kv_heads: Positive = 2
    intermediate: Positive = 384
    vocab: Positive = 1024
    context: Positive = Field(1024, description="most tokens of prompt, answers and tool outputs together")
    engine: Literal["local", "vllm", "scripted"] = Field(
        "local", description="what serves the policy: this process, vLLM servers, or a script for drills"
    )
    vllm: Vllm = Vllm()
    engine_batch: Positive = Field(32, description="sequences decoded together")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where engine=local computes")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="what engine=local computes in; bfloat16 is twice as fast on a GPU, and not the trainer's "
        "log-probabilities: take behavior_logprobs=trainer",
    )
    threads: Positive = Field(2, description="threads of engine and trainer on a cpu")

    @model_validator(mode="after")
    def _heads_divide(self) -> "PolicyConfig":
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must divide hidden ({self.hidden}), and kv_heads ({self.kv_heads}) must "
                "divide heads"
            )
        return self


class Lora(Section):
    """Adapters of low rank instead of all weights, for policy and critic.  ``bootstrap`` trains all weights."""

    rank: int = Field(0, ge=0, description="rank of the adapters that are trained; 0: all weights are trained")
    alpha: float = Field(32.0, gt=0, description="an adapter's change is scaled by alpha / rank")
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="linear layers that get an adapter, by the last part of their names",
    )


class Training(Section):
    """How the stages that learn compute.  What they learn is the same up to rounding, so it is no part of a cache key,
    and a run that was cut goes on with other values."""

    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute activations twice instead of keeping them; auto: for rows of more than 8,192 tokens",
    )
    compile: bool = Field(False, description="torch.compile for the layers: on GPUs half the time, after a minute")
    num_processes: Positive = Field(
        1, description="processes that share the weights and rows of a trainer (not in bootstrap)"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where they compute; cuda: a GPU each, from the first on")
    parallelism: Literal["data", "context"] = Field(
        "data", description="data: each process takes whole rows; context: all share the tokens of every row"
    )
    microbatch_tokens: Positive | None = Field(
        None, description="most tokens of one forward pass; none: 4,096 on a cpu, 32,768 on a GPU"
    )


class Bootstrap(Section):
    examples: Positive = Field(6000, description="worked examples of the teacher in the corpus")
    agent_share: Share = Field(0.4, description="share of the examples that are full tool-using episodes")
    repair_share: Share = Field(0.2, description="share of those with a mistake that is then repaired")
    verify: int = Field(24, ge=0, description="examples verified in the sandbox")
    steps: Positive = 600
    tokens_per_step: Positive = Field(4096, description="most tokens of one optimizer step")
    lr: Rate = 6e-3
    max_seconds: float | None = Field(None, gt=0, description="stop training after this long; none: after steps")


class Ppo(Section):
    """PPO with a critic.  ``warmup`` and ``agentic`` each have one."""

    steps: Positive = 6
    episodes_per_step: Positive = 64
    samples_per_prompt: Positive = Field(
        4, description="episodes a task in one step; episodes_per_step / samples_per_prompt tasks are drawn"
    )
    minibatches: Positive = Field(2, description="optimizer steps a batch")
    epochs: Positive = Field(1, description="passes over a batch")
    actor_lr: Rate = 3e-4
    critic_lr: Rate = 1e-3
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    gamma: float = Field(1.0, gt=0, le=1)
    actor_lambda: float | None = Field(None, ge=0, le=1, description="none: length-adaptive, 1 - 1/(0.05 n)")
    critic_lambda: Share = 1.0
    critic_warmup: int = Field(0, ge=0, description="first steps that train the critic alone")
    behavior_logprobs: Literal["engine", "trainer"] = Field(
        "engine", description="denominator of the ratio; trainer: recomputed, needs two optimizer steps a batch or more"
    )
    tis_cap: float = Field(2.0, gt=0, description="truncation of trainer/engine importance weights")
    value_clip: float | None = Field(None, gt=0, description="values may move this far in one batch; none: no clipping")
    max_grad_norm: float = Field(1.0, gt=0)
    context: Positive = Field(1024, description="most tokens of one episode")

    @model_validator(mode="after")
    def _groups_are_whole(self) -> "Ppo":
        episodes, samples = self.episodes_per_step, self.samples_per_prompt
        if episodes % samples:
            raise ValueError(f"episodes_per_step ({episodes}) must be a multiple of samples_per_prompt ({samples})")
        if episodes < self.minibatches:
            raise ValueError(
                f"episodes_per_step ({episodes}) must not be smaller than minibatches ({self.minibatches})"
            )
        if self.behavior_logprobs == "trainer" and self.minibatches * self.epochs < 2:
            raise ValueError("behavior_logprobs=trainer with one optimizer step a batch: the ratio would always be 1")
        return self


class Agent(Section):
    turns: Positive = Field(6, description="most turns of an episode in training")
    turn_tokens: Positive = Field(320, description="most tokens sampled in one turn")
    tool_tokens: Positive = Field(96, description="most tokens of one tool output; the middle is cut")
    concurrency: Positive = Field(32, description="episodes under way at once")
    deadline_seconds: float = Field(120.0, gt=0, description="one episode, sandbox start and scoring included")
    temperature: float = Field(1.0, ge=0)


class Collect(Section):
    samples: Positive = Field(6, description="episodes a training task")


class Sft(Section):
    epochs: Positive = 2
    lr: Rate = 3e-4
    tokens_per_step: Positive = Field(8192, description="most tokens of one optimizer step")
    max_grad_norm: float = Field(1.0, gt=0)


class CriticConfig(Section):
    epochs: Positive = 4
    lr: Rate = 1e-3
    tokens_per_step: Positive = Field(8192, description="most tokens of one optimizer step")
    gae_lambda: Share = Field(1.0, description="1: Monte-Carlo returns; below 1 the targets are recomputed every epoch")
    heldout: Share = Field(
        0.2, description="share of the episodes that measure explained variance and are not trained on"
    )
    min_explained_variance: float = 0.2
    gate: Literal["warn", "stop"] = Field("warn", description="below the minimum: warn in the report, or exit 79")


class EvaluateConfig(Section):
    samples: Positive = Field(1, description="episodes a held-out task")
    turns: Positive = Field(6, description="most turns of an episode in evaluation")
    temperature: float = Field(1.0, ge=0)


class Ray(Section):
    """Who plays and who trains where ``runtime`` is ray: rollout workers, each with an engine and a sandbox of its own,
    and in stages that learn by rewards one trainer, whose ranks may be on several machines."""

    address: str | None = Field(
        None,
        pattern=r"^(auto|[^/?#@\s:]+:[0-9]+)$",
        description="host:port of a running Ray; none: one of the stage's own, on this machine",
    )
    workers: Positive = Field(2, description="rollout workers; each has an engine of its own")
    worker_cpus: float = Field(1.0, ge=0, description="processors that Ray sets aside for a rollout worker")
    worker_gpus: float = Field(0.0, ge=0, description="the same in GPUs, for its engine")
    trainers: Positive = Field(1, description="machines that the trainer's ranks are spread over, evenly")
    trainer_cpus: float = Field(1.0, ge=0, description="processors that Ray sets aside for the trainer on each of them")
    trainer_gpus: float = Field(0.0, ge=0, description="the same in GPUs")
    max_off_policy_steps: int = Field(
        1, ge=0, description="most steps that the weights of a token may be older than those it trains; 0: no overlap"
    )
    sync: Literal["store", "broadcast"] = Field(
        "store",
        description="how new weights reach the workers: Ray's object store, or a broadcast (NCCL, Gloo) to all at once",
    )
    oversample: Share = Field(
        0.0, description="episodes played beyond those of a step, as a share; the last to finish of a task are dropped"
    )


class Config(Section):
    seed: int = 0
    run: RunConfig = RunConfig()
    graph: Literal["full", "no_rft", "no_critic", "one_shot"] = Field(
        "full",
        description="which stages there are; no_rft: agentic starts from warmup's policy; no_critic: agentic makes its "
        "critic from the policy; one_shot: warmup is the last stage that trains",
    )
    runtime: Literal["local", "ray"] = Field(
        "local",
        description="where the stages that play do so, and learn by rewards: in their own process, or in Ray's actors",
    )
    ray: Ray = Ray()
    sandbox: SandboxConfig = SandboxConfig()
    synthesis: Synthesis = Synthesis()
    policy: PolicyConfig = PolicyConfig()
    lora: Lora = Lora()
    training: Training = Training()
    bootstrap: Bootstrap = Bootstrap()
    warmup: Ppo = Ppo()
    agent: Agent = Agent()
    collect: Collect = Collect()
    rft: Sft = Sft()
    critic: CriticConfig = CriticConfig()
    agentic: Ppo = Ppo()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _contexts_fit(self) -> "Config":
        for name in ("warmup", "agentic"):
            if getattr(self, name).context > self.policy.context:
                raise ValueError(
                    f"{name}.context: expected at most policy.context ({self.policy.context}), "
                    f"got {getattr(self, name).context}."
                )
        return self

    @model_validator(mode="after")
    def _ranks_can_be_spread(self) -> "Config":
        if self.runtime == "ray" and self.training.num_processes % self.ray.trainers:
            raise ValueError(
                f"training.num_processes: expected a multiple of ray.trainers ({self.ray.trainers}), "
                f"got {self.training.num_processes}."
            )
        return self

    @model_validator(mode="after")
    def _adapters_can_be_served(self) -> "Config":
        if self.policy.engine == "vllm" and self.policy.vllm.sync == "lora" and not 0 < self.lora.rank <= SERVED_RANK:
            raise ValueError(
                f"policy.vllm.sync=lora: expected a lora.rank from 1 to {SERVED_RANK}, got {self.lora.rank}."
            )
        if self.policy.engine == "vllm" and self.policy.vllm.sync == "lora" and self.runtime == "ray":
            raise ValueError("policy.vllm.sync=lora: Ray's trainer sends merged weights; choose disk or nccl.")
        return self


# Composing, freezing, loading -----------------------------------------------------------------------------------------


def conf_folder() -> Path:
    """``conf/`` of the installed wheel, or of the repository."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if (inside / "config.yaml").exists() else package.parent / "conf"


def compose(overrides: Sequence[str] = ()) -> Config:
    """Composes ``conf/`` and the overrides (Hydra's grammar: ``experiment=demo critic.lr=1e-4``), and validates.

    Call it once, where the user types.  Raises ConfigError."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _check_overrides(overrides)
    ConfigStore.instance().store(name="defaults", node=Config().model_dump(mode="json"))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    return validate(values)


def validate(values: Any) -> Config:
    """Raises ConfigError with one line a mistake."""
    try:
        return Config.model_validate_json(json.dumps(values), strict=True)  # strict: true is no number, "3" neither
    except ValidationError as error:
        mistakes = {tuple(str(part) for part in problem["loc"][:2]): problem for problem in reversed(error.errors())}
        raise ConfigError("\n".join(_explain(problem) for problem in list(mistakes.values())[:8])) from error


def freeze(config: Config) -> tuple[str, str]:
    """The canonical JSON of the whole configuration, defaults included, and its sha256."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text, hashlib.sha256(text.encode()).hexdigest()


def load(text: str, sha256: str) -> Config:
    """The inverse of ``freeze``, in another process.  Raises ConfigError when the text is not what was frozen."""
    actual = hashlib.sha256(text.encode()).hexdigest()
    if actual != sha256:
        raise ConfigError(f"The frozen configuration has sha256 {actual[:12]}, expected {sha256[:12]}: it was changed.")
    return validate(json.loads(text))


def section_values(config: Config, sections: Sequence[str]) -> dict[str, Any]:
    """The sub-tree that decides what a stage gives, as JSON values: the seed and the named sections, without what says
    where its sandbox, its engine and its Ray are, and how it computes; without ``ray`` where nothing runs there, and
    without what it says of learning where nobody learns."""
    where: dict[str, Any] = {
        "sandbox": set(WHERE_JUDGED),
        "policy": {"vllm": set(WHERE_SERVED)},
        "ray": set(WHERE_PLACED),
    }
    whole = config.model_dump(mode="json", exclude=where)
    if "training" not in sections:
        whole["ray"] = {name: value for name, value in whole["ray"].items() if name not in OF_LEARNING}
    unused = {*HOW_COMPUTED, *(["ray"] if config.runtime == "local" else [])}
    return {name: whole[name] for name in ("seed", *sections) if name not in unused}


def restricted(config: Config, sections: Sequence[str]) -> Config:
    """The same configuration with every other section absent (reading one raises AttributeError), so that a stage
    cannot depend on what is not part of its cache key."""
    part = config.model_copy()
    for name in Config.model_fields:
        if name not in ("seed", *sections):
            del part.__dict__[name]
    return part


def key_paths() -> dict[str, FieldInfo]:
    """Every key a user can set, by its dotted path, sections included."""
    return dict(_walk(Config, ""))


def flat(config: Config) -> dict[str, Any]:
    """Dotted path -> value of every leaf, as MLflow wants its params."""

    def walk(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(walk(config.model_dump(mode="json"), ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        section: Any = info.annotation
        if _is_section(info):
            yield from _walk(section, f"{prefix}{name}.")


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuses unknown keys before Hydra does, whose message names neither the path nor the nearest key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    known = key_paths()
    for text in overrides:
        try:
            (override,) = OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{text}: expected `key=value` in Hydra's grammar, as in critic.lr=1e-4. {reason}"
            ) from error
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(f"{key}: expected one value, not a sweep. A list is written [a,b].")
        if key == "experiment":
            choices = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))
            if override.value() not in [*choices, None]:
                raise ConfigError(
                    f"experiment={override.value()}: expected one of {', '.join(choices)}."
                    + _nearest(str(override.value()), choices)
                )
        elif key not in known:
            raise ConfigError(f"{key}: there is no such key." + _nearest(key, ["experiment", *known]))
        elif _is_section(known[key]) and not isinstance(override.value(), dict):
            raise ConfigError(f"{key}: expected a key of this section, as in {key}.{_first_key(known, key)}=…")


def _explain(problem: Any) -> str:
    """One mistake found by pydantic: full path, what was expected, the nearest right name."""
    known = key_paths()
    parts = [str(part) for part in problem["loc"]]
    path = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        return f"{path}: there is no such key." + _nearest(path, list(known))
    while parts and ".".join(parts) not in known:
        parts.pop()
    key = ".".join(parts)
    if problem["type"] == "value_error":  # of a validator of ours, about more than one key
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    info = known[key]
    line = f"{key}: expected {_type_words(info.annotation, [*info.metadata])}, got {problem['input']!r}."
    return line + (f"\n  {key} is: {info.description}" if info.description else "")


def _type_words(annotation: Any, metadata: list[Any]) -> str:
    """``Annotated[float, Field(gt=0, lt=1)]`` -> "a number > 0, < 1"."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _type_words(inner, [*more, *metadata])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_words(arg, metadata if arg is not type(None) else []) for arg in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return (
            f"a list of {len(get_args(annotation))}: ["
            + ", ".join(_type_words(a, []) for a in get_args(annotation))
            + "]"
        )
    if get_origin(annotation) is list:
        return "a list, each " + _type_words(get_args(annotation)[0], [])
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    bounds = []
    for item in metadata:
        for constraint in getattr(item, "metadata", None) or [item]:
            for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                if (bound := getattr(constraint, name, None)) is not None:
                    bounds.append(f"{sign} {bound}")
    return words.get(annotation, "a section") + (f" {' and '.join(bounds)}" if bounds else "")


def _nearest(name: str, choices: Sequence[str]) -> str:
    """Completes the sentence with the nearest right name: the new name of a key of before, the whole path, or its last
    part (a right key in a wrong section), or what sounds like its last part."""
    if name in RENAMED:
        return f" It is called {RENAMED[name]} now."
    last = name.rsplit(".", 1)[-1]
    tails = {choice: choice.rsplit(".", 1)[-1] for choice in choices}
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.8)
    close = close or [choice for choice, tail in tails.items() if tail == last][:3]
    close = (
        close or [c for c, tail in tails.items() if tail in difflib.get_close_matches(last, tails.values(), 1, 0.7)][:3]
    )
    close = close or difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else " `cuda-agent config` prints all keys."


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _first_key(known: dict[str, FieldInfo], section: str) -> str:
    return next(path for path in known if path.startswith(section + ".")).removeprefix(section + ".")
