"""The schema of record for everything a user can set.

Hydra composes ``conf/`` and the overrides exactly once, where the user types (``compose``); the result is validated by
the models below (unknown keys are refused) and frozen as canonical JSON.  Every other process gets that JSON and its
sha256 and validates with the same models (``load``).  Nothing a user can set is ever instantiated by name, and secrets
are names of environment variables, never values.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    """Where a run lives.  Read by the executor, never by a stage: changing it invalidates nothing."""

    pipeline: str = Field("cuda-agent", description="name of the MLflow experiment")
    name: str | None = Field(None, description="name of the run; made from the date when not given")
    store: str = Field(".cuda-agent/store", description="a folder, memory:// or s3://bucket/prefix")
    mlflow: str | None = Field(None, description="tracking URI; default is SQLite beside the store; 'off' disables")
    parallel_stages: bool = Field(False, description="run sibling stages side by side (needs the memory and cores)")
    retries: int = Field(2, ge=0, description="how often a stage that exits 75 (try again) is started anew")


class Sandbox(Section):
    lane: Literal["plan", "extension", "python"] = Field("plan", description="form of the solutions")
    device: Literal["cpu", "cuda"] = "cpu"
    clock: Literal["real", "model"] = Field("real", description="model: a deterministic cost instead of time, for drills")
    threads: Positive = Field(2, description="threads of a candidate and of its baselines (cpu)")
    checks: Positive = Field(5, description="inputs a candidate is checked on in quick mode")
    tolerance: float = Field(1e-2, gt=0, description="absolute and relative tolerance of a check")
    timed_calls: Positive = Field(12, description="most timed calls of a candidate in quick mode")
    build_seconds: float = Field(20.0, gt=0, description="limit for one build")
    run_seconds: float = Field(10.0, gt=0, description="limit for one evaluation after the build")
    memory_mb: Positive = Field(2048, description="limit for one worker")
    required_walls: list[str] = Field(
        default=["no_new_privs", "landlock", "seccomp"], description="walls proven by an attack before a worker starts"
    )


class Synthesis(Section):
    train: Positive = Field(16, description="tasks to train on")
    heldout: Positive = Field(24, description="held-out tasks of the teacher's family")
    catalogue: int = Field(6, ge=0, description="held-out tasks of the full operator catalogue, scored apart")
    max_candidates: Positive = Field(48, description="most candidates that are compiled")
    max_ops: int = Field(5, ge=1, le=5, description="most torch operators fused in one task")
    window_ms: tuple[float, float] = Field((0.1, 5.0), description="eager time a task must fall into")
    max_similarity: Share = Field(0.9, description="structural similarity to the evaluation set above which a task goes")
    evaluation_set: str | None = Field(None, description="folder of tasks that training must not resemble")
    writer: Literal["programmatic", "model"] = Field("programmatic", description="who composes tasks")
    writer_url: str | None = Field(None, description="OpenAI-compatible address of the model writer")
    writer_model: str | None = None
    writer_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")


class Policy(Section):
    base: str | None = Field(None, description="Hugging Face folder or name; none: a small model is trained from scratch")
    layers: Positive = 4
    hidden: Positive = 128
    heads: Positive = 4
    kv_heads: Positive = 2
    intermediate: Positive = 384
    vocab: Positive = 1024
    context: Positive = Field(1024, description="most tokens of prompt, answers and tool outputs together")
    engine: Literal["local", "scripted"] = Field("local", description="what serves the policy; scripted is for drills")
    engine_batch: Positive = Field(32, description="sequences decoded together")
    threads: Positive = Field(2, description="threads of engine and trainer on a cpu")


class Bootstrap(Section):
    examples: Positive = Field(6000, description="worked examples of the teacher in the corpus")
    agent_share: Share = Field(0.4, description="share of the examples that are full tool-using episodes")
    repair_share: Share = Field(0.3, description="share of those with a mistake that is then repaired")
    verify: int = Field(24, ge=0, description="examples verified in the sandbox")
    steps: Positive = 600
    batch_tokens: Positive = 8192
    lr: Rate = 3e-3
    max_seconds: float | None = Field(None, gt=0, description="stop training after this long; none: after steps")


class Ppo(Section):
    """PPO with a critic.  ``warmup`` and ``agentic`` each have one."""

    steps: Positive = 6
    batch: Positive = Field(64, description="episodes a step, in all")
    samples: Positive = Field(4, description="episodes a task in one step; batch / samples tasks are drawn")
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
    importance_cap: float = Field(2.0, gt=0, description="truncation of trainer/engine importance weights")
    max_grad_norm: float = Field(1.0, gt=0)
    batch_tokens: Positive = Field(8192, description="tokens of one packed forward pass")
    context: Positive = Field(1024, description="most tokens of one episode")


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
    batch_tokens: Positive = 8192
    max_grad_norm: float = Field(1.0, gt=0)


class CriticConfig(Section):
    epochs: Positive = 4
    lr: Rate = 1e-3
    batch_tokens: Positive = 8192
    gae_lambda: Share = Field(1.0, description="1: Monte-Carlo returns; below 1 the targets are recomputed every epoch")
    heldout: Share = Field(0.2, description="share of the tasks whose episodes measure explained variance")
    min_explained_variance: float = 0.2
    gate: Literal["warn", "stop"] = Field("warn", description="below the minimum: warn in the report, or exit 79")


class Evaluate(Section):
    samples: Positive = Field(1, description="episodes a held-out task")
    turns: Positive = Field(6, description="most turns of an episode in evaluation")
    temperature: float = Field(1.0, ge=0)


class Config(Section):
    seed: int = 0
    run: Run = Run()
    sandbox: Sandbox = Sandbox()
    synthesis: Synthesis = Synthesis()
    policy: Policy = Policy()
    bootstrap: Bootstrap = Bootstrap()
    warmup: Ppo = Ppo()
    agent: Agent = Agent()
    collect: Collect = Collect()
    rft: Sft = Sft()
    critic: CriticConfig = CriticConfig()
    agentic: Ppo = Ppo()
    evaluate: Evaluate = Evaluate()
