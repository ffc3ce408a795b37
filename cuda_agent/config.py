"""The schema of the configuration: every key that a user can set, with its type and its default.

The pydantic models below refuse unknown keys, and values out of range.  The module ``compose`` makes a ``Config`` from
``conf/`` and the user's overrides.  No value is run as code or names code to run.  No value is a secret: a key takes
the name of the environment variable, or of the file, that holds the secret."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cuda_agent.format_names import Format

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# Keys of ``sandbox`` that say where a solution is judged; the verdict does not depend on them.
WHERE_JUDGED = ("servers", "token_env", "token_file")

# The old names of renamed keys -> their new names.
RENAMED = {
    "sandbox.lane": "sandbox.format",
    "training.ranks": "training.num_processes",
    "training.share": "training.parallelism (rows: data, tokens: context)",
    "ray.staleness": "ray.max_off_policy_steps",
    **{f"{stage}.batch_tokens": f"{stage}.tokens_per_step" for stage in ("bootstrap", "rft", "critic")},
}
for _stage in ("warmup", "agentic"):
    RENAMED |= {
        f"{_stage}.batch": f"{_stage}.episodes_per_step",
        f"{_stage}.samples": f"{_stage}.samples_per_prompt",
        f"{_stage}.importance_cap": f"{_stage}.tis_cap",
        f"{_stage}.old_logprobs": f"{_stage}.behavior_logprobs",
        f"{_stage}.batch_tokens": "training.microbatch_tokens",
    }

SERVED_RANK = 64  # largest adapter rank that the vLLM servers of a stage accept
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # the form of the name of a run or a sweep


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _addresses(servers: list[str]) -> list[str]:
    for server in servers:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", server):
            raise ValueError(f"expected addresses such as http://host:8000, got {server!r}")
    if len(set(servers)) < len(servers):
        raise ValueError("an address is listed twice")
    return servers


Addresses = Annotated[list[str], AfterValidator(_addresses)]


class RunConfig(Section):
    """Where a run is stored and tracked, and how its stages are executed.  Only the executor reads this section."""

    pipeline: str = Field("cuda-agent", description="name of the MLflow experiment")
    name: str | None = Field(None, pattern=_NAME, description="name of the run; default: the date")
    sweep: str | None = Field(None, pattern=_NAME, description="the sweep it belongs to; set by `cuda-agent sweep`")
    store: str = Field(".cuda-agent/store", description="a folder, memory:// or s3://bucket/prefix")
    mlflow: str | None = Field(None, description="tracking URI; default is SQLite beside the store; 'off' disables")
    parallel_stages: bool = Field(False, description="run sibling stages side by side (needs the memory and cores)")
    retries: int = Field(2, ge=0, description="how often a stage that exits 75 (try again) is started anew")


class SandboxConfig(Section):
    format: Format = Field("plan", description="form of the solutions")
    device: Literal["cpu", "cuda"] = "cpu"
    clock: Literal["real", "model"] = Field("real", description="model: a deterministic cost in place of time")
    threads: Positive = Field(2, description="threads of a candidate and of its baselines (cpu)")
    checks: Positive = Field(5, description="inputs a candidate is checked on in quick mode")
    tolerance: float = Field(1e-2, gt=0, description="absolute and relative tolerance of a check")
    train_mode: bool = Field(False, description="models stay in train(), as KernelBench runs them")
    timed_calls: Positive = Field(12, description="most timed calls of a candidate in quick mode")
    build_seconds: float = Field(20.0, gt=0, description="limit for one build")
    first_pass_seconds: float = Field(180.0, gt=0, description="limit for compilation inside a Python solution")
    run_seconds: float = Field(10.0, gt=0, description="limit for one evaluation after the build")
    memory_mb: Positive = Field(2048, description="limit for one worker")
    required_walls: list[str] = Field(
        default=["no_new_privs", "landlock", "seccomp"], description="walls that an attack must prove"
    )
    servers: Addresses = Field(default=[], description="addresses of `cuda-agent sandbox serve`; none: in this process")
    token_env: str = Field("CUDA_AGENT_SANDBOX_TOKEN", description="environment variable with the servers' token")
    token_file: str | None = Field(None, description="file that holds the token instead")


class Synthesis(Section):
    train: Positive = Field(16, description="tasks to train on")
    heldout: Positive = Field(24, description="held-out tasks of the teacher's family")
    catalogue: int = Field(6, ge=0, description="held-out tasks of the full operator catalogue, scored apart")
    catalogue_share: Share = Field(0.0, description="share of the training tasks that come from the full catalogue")
    max_candidates: Positive = Field(48, description="most candidates that are compiled")
    max_ops: int = Field(5, ge=1, le=5, description="most torch operators fused in one task")
    window_ms: tuple[float, float] = Field((0.1, 5.0), description="eager time a task must fall into")
    max_similarity: Share = Field(0.9, description="a task more similar to the evaluation set is dropped")
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
    """Settings of the vLLM servers that serve the policy if ``policy.engine`` is vllm."""

    servers: Addresses = Field(default=[], description="addresses of running vLLM servers; none: the stage starts some")
    replicas: Positive = Field(1, description="servers that a stage starts")
    sync: Literal["disk", "lora", "nccl"] = Field(
        "disk", description="how new weights reach them: a folder, an adapter, or a broadcast (NCCL, Gloo on a cpu)"
    )
    gpu_memory: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that a server of ours takes")


class PolicyConfig(Section):
    base: str | None = Field(None, description="Hugging Face folder or name; none: a small model from scratch")
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
            sizes = f"hidden ({self.hidden}), heads ({self.heads}) and kv_heads ({self.kv_heads})"
            raise ValueError(f"{sizes}: each must be a multiple of the next")
        return self


class Lora(Section):
    """Settings of low-rank adapters (LoRA).  If ``rank`` is not 0, policy and critic train adapters instead of all
    their weights.  The stage ``bootstrap`` always trains all weights."""

    rank: int = Field(0, ge=0, description="rank of the adapters that are trained; 0: all weights are trained")
    alpha: float = Field(32.0, gt=0, description="an adapter's change is scaled by alpha / rank")
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="linear layers that get an adapter, by the last part of their names",
    )


class Training(Section):
    """Settings of how and where training stages compute.  They change a result only by rounding errors.  So they are
    not part of a stage's cache key, and a stage can resume from a checkpoint that was made with other values."""

    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute activations twice instead of keeping them; auto: for rows of more than 8,192 tokens",
    )
    compile: bool = Field(False, description="torch.compile for the layers: halves the time on GPUs, takes a minute")
    num_processes: Positive = Field(1, description="processes that a trainer is spread over (not in bootstrap)")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the processes compute; cuda: one GPU per process")
    parallelism: Literal["data", "context"] = Field(
        "data", description="data: each process takes whole rows; context: all share the tokens of every row"
    )
    microbatch_tokens: Positive | None = Field(
        None, description="most tokens of a forward pass; unset: 4,096, on a GPU 32,768"
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
    """Settings of reinforcement learning with PPO's clipped loss (paper, section 3.3).  The stages ``warmup`` and
    ``agentic`` each have such a section."""

    reward: Literal["ladder", "speedup"] = Field(
        "ladder",
        description="what a verdict is worth; ladder: -1, 1, 2 or 3 (Eq. 1); speedup: -1, or 3 s/(1 + s) for a correct "
        "solution that is s times as fast as the faster of eager and torch.compile",
    )
    advantage: Literal["gae", "group", "rloo"] = Field(
        "gae",
        description="estimator of advantages; gae: with a critic; group: reward minus the mean of a task's samples, "
        "divided by their standard deviation (GRPO); rloo: reward minus the mean of the other samples; group and rloo "
        "train no critic, and read neither its keys nor gamma and lambda",
    )
    steps: Positive = 6
    episodes_per_step: Positive = 64
    samples_per_prompt: Positive = Field(4, description="episodes a task in one step, so a step has fewer tasks")
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
            raise ValueError(f"episodes_per_step ({episodes}) must be at least minibatches ({self.minibatches})")
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
    heldout: Share = Field(0.2, description="share of the episodes that only measure explained variance")
    min_explained_variance: float = 0.2
    gate: Literal["warn", "stop"] = Field("warn", description="below the minimum: warn in the report, or exit 79")


class EvaluateConfig(Section):
    samples: Positive = Field(1, description="episodes a held-out task")
    turns: Positive = Field(6, description="most turns of an episode in evaluation")
    temperature: float = Field(1.0, ge=0)


class Ray(Section):
    """Settings of Ray, for ``runtime=ray``.  A stage then has several rollout workers, each with an engine and a
    sandbox.  A PPO stage also has one trainer, whose processes may be spread over several machines."""

    address: str | None = Field(
        None,
        pattern=r"^(auto|[^/?#@\s:]+:[0-9]+)$",
        description="host:port of a running Ray; none: the stage starts one on this machine",
    )
    workers: Positive = Field(2, description="rollout workers; each has an engine")
    worker_cpus: float = Field(1.0, ge=0, description="processors that Ray sets aside for a rollout worker")
    worker_gpus: float = Field(0.0, ge=0, description="GPUs that Ray sets aside for its engine")
    trainers: Positive = Field(1, description="machines that the trainer's ranks are spread over, evenly")
    trainer_cpus: float = Field(1.0, ge=0, description="processors that Ray sets aside for the trainer on each machine")
    trainer_gpus: float = Field(0.0, ge=0, description="GPUs that Ray sets aside for the trainer on each machine")
    max_off_policy_steps: int = Field(
        1, ge=0, description="most steps between the weights that sample a token and those it trains; 0: no overlap"
    )
    oversample: Share = Field(0.0, description="extra share of episodes in a step; a task's last ones are dropped")


class Config(Section):
    seed: int = 0
    run: RunConfig = RunConfig()
    graph: Literal["full", "no_rft", "no_critic", "one_shot"] = Field(
        "full",
        description="which stages there are; no_rft: agentic starts from warmup's policy; no_critic: agentic makes its "
        "critic from the policy; one_shot: warmup is the last stage that trains",
    )
    runtime: Literal["local", "ray"] = Field(
        "local", description="where rollouts and PPO run: in the process of the stage, or in Ray's actors"
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
    def _sections_fit(self) -> "Config":
        limit = self.policy.context
        for name, ppo in (("warmup", self.warmup), ("agentic", self.agentic)):
            if ppo.context > limit:
                raise ValueError(f"{name}.context: expected at most policy.context ({limit}), got {ppo.context}.")
            if ppo.advantage != "gae" and ppo.samples_per_prompt < 2:
                estimator = f"{name}.advantage={ppo.advantage}, which compares the samples of a task"
                got = ppo.samples_per_prompt
                raise ValueError(f"{name}.samples_per_prompt: expected at least 2 with {estimator}, got {got}.")
        if self.runtime == "ray" and self.training.num_processes % self.ray.trainers:
            expected = f"expected a multiple of ray.trainers ({self.ray.trainers})"
            raise ValueError(f"training.num_processes: {expected}, got {self.training.num_processes}.")
        if self.policy.engine == "vllm" and self.policy.vllm.sync == "lora":
            rank = self.lora.rank
            if not 0 < rank <= SERVED_RANK:
                raise ValueError(f"policy.vllm.sync=lora: expected a lora.rank from 1 to {SERVED_RANK}, got {rank}.")
            if self.runtime == "ray":
                raise ValueError("policy.vllm.sync=lora: Ray's trainer sends merged weights; choose disk or nccl.")
        return self
