"""The schema of the configuration: every key that a user can set, with its type and its default.

The pydantic models below refuse unknown keys, and values out of range.  The module ``compose`` makes a ``Config`` from
the YAML files in ``conf/`` and the user's overrides.  A configuration contains neither code nor secrets.  For a
secret, it contains only the name of an environment variable or the path of a file."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cuda_agent.format_names import Format

T = TypeVar("T")
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
InputKind = Literal["shifted", "ramp", "negative", "large", "sparse", "boundary"]  # of ``wire.KINDS``

WHERE_JUDGED = ("servers", "token_env", "token_file")  # keys of ``sandbox`` on which no verdict depends
EVAL_TASKS = 8  # most held-out tasks of an evaluation during PPO (``Ppo.eval_every``)
SERVED_RANK = 64  # largest adapter rank that the vLLM servers of a stage accept
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # the form of the name of a run or a sweep


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def key(default: T, description: str, **limits: Any) -> T:
    """Returns a pydantic field with this default and description.  ``limits`` constrain the value, as in ``gt=0``."""
    return Field(default, description=description, **limits)


def _addresses(servers: list[str]) -> list[str]:
    for server in servers:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", server):
            raise ValueError(f"expected addresses such as http://host:8000, got {server!r}")
    if len(set(servers)) < len(servers):
        raise ValueError("an address is listed twice")
    return servers


Addresses = Annotated[list[str], AfterValidator(_addresses)]


def _without_password(address: str | None) -> str | None:
    if address and re.match(r"[a-z+]+://[^/?#]*@", address):
        raise ValueError("expected an address without user and password: it is stored with the run")
    return address


Address = Annotated[str | None, AfterValidator(_without_password)]


class RunConfig(Section):
    """Settings of a run: where it is stored and tracked, and how its stages (the steps of the training pipeline) are
    executed.  The stages themselves do not receive these settings."""

    pipeline: str = key("cuda-agent", "name of the MLflow experiment")
    name: str | None = key(None, "name of the run; none: date, time and the configuration's hash", pattern=_NAME)
    sweep: str | None = key(None, "sweep that the run belongs to; set by `cuda-agent sweep`", pattern=_NAME)
    store: str = key(".cuda-agent/store", "where runs are stored: a folder, memory:// or s3://bucket/prefix")
    mlflow: Address = key(None, "tracking URI of MLflow; none: SQLite beside the store; off: no tracking")
    parallel_stages: bool = key(
        False, "run independent stages side by side, unless one measures times (needs the memory and cores)"
    )
    gpu_hours: float | None = key(
        None,
        "GPU-hours that the run may use; then its stages stop at a checkpoint (exit code 76); none: no limit",
        gt=0,
    )
    retries: int = key(2, "how often a stage that exits with 75 (try again) is restarted; not on a cluster", ge=0)


class SandboxConfig(Section):
    format: Format = key("plan", "format of the solutions")
    device: Literal["cpu", "cuda"] = key("cpu", "device that runs tasks and solutions")
    clock: Literal["real", "model"] = key("real", "real: times are measured; model: a deterministic cost replaces them")
    threads: Positive = key(2, "threads of a solution and of its baselines, on a CPU")
    checks: Positive = key(5, "number of inputs on which quick mode checks a solution")
    input_kinds: list[InputKind] = key(
        [], "kinds of inputs on which quick mode checks a solution too, once each; strict mode checks all kinds"
    )
    tolerance: float = key(1e-2, "absolute and relative difference from the reference that a check allows", gt=0)
    train_mode: bool = key(False, "run models in train() mode, as KernelBench does, not in eval() mode")
    timed_calls: Positive = key(
        12, "limit of timed calls in quick mode; up to four times as many if they do not decide the reward"
    )
    build_seconds: float = key(20.0, "time limit for one build, in seconds", gt=0)
    first_pass_seconds: float = key(
        180.0, "time limit, in seconds, for the first pass of a Python solution, which compiles its kernels", gt=0
    )
    run_seconds: float = key(10.0, "time limit for one evaluation after the build, in seconds", gt=0)
    memory_mb: Positive = key(2048, "memory limit, in MiB, for a build and for a process that runs a solution")
    required_walls: list[str] = key(
        ["no_new_privs", "landlock", "seccomp"],
        "protections that must withstand a test attack before the sandbox judges anything",
    )
    servers: Addresses = key(
        [], "addresses of sandbox servers (`cuda-agent sandbox serve`); empty: the sandbox runs locally"
    )
    token_env: str = key("CUDA_AGENT_SANDBOX_TOKEN", "environment variable that holds the servers' token")
    token_file: str | None = key(None, "file that holds the servers' token; it goes before token_env")


class Synthesis(Section):
    seed: int = key(0, "seed of the tasks; by default the run's seed; runs with equal values share their tasks")
    train: Positive = key(16, "number of training tasks")
    heldout: int = key(24, "number of held-out tasks of the teacher's family", ge=0)
    catalogue: int = key(
        6, "number of held-out tasks from the full operator catalogue, which are scored separately", ge=0
    )
    catalogue_share: Share = key(0.0, "share of the training tasks that come from the full catalogue")
    max_candidates: Positive = key(48, "limit of candidate tasks that are compiled")
    max_ops: int = key(5, "limit of torch operators in one task", ge=1, le=5)
    window_ms: tuple[float, float] = key(
        (0.1, 5.0), "least and greatest time of a task in eager PyTorch, in milliseconds; other tasks are dropped"
    )
    headroom: float = key(
        0.0,
        "how many times as fast as torch.compile the best design of a task of the teacher's family must be; a sweep "
        "times the designs, which needs sandbox.device=cuda; 0: no sweep",
        ge=0,
    )
    tasks: str | None = key(
        None,
        "task set in place of new tasks: one that `tasks import` wrote, CUDA-Agent-Ops-6K, or that of a finished run; "
        "train, heldout + catalogue limit its tasks, and all filters hold",
    )
    max_similarity: Share = key(0.9, "a task that is more similar to a task of the evaluation set is dropped; 1: equal")
    evaluation_set: str | None = key(
        None, "task set that no task may resemble (max_similarity), such as a KernelBench folder"
    )
    writer: Literal["programmatic", "model"] = key(
        "programmatic", "what composes tasks of the full catalogue: a program, or a language model"
    )
    writer_url: Address = key(None, "OpenAI-compatible address of the language model, for writer=model")
    writer_model: str | None = key(None, "name of the language model at writer_url")
    writer_key_env: str = key("OPENAI_API_KEY", "environment variable that holds the API key for writer_url")

    @model_validator(mode="after")
    def _window_ascends(self) -> "Synthesis":
        if not 0 <= self.window_ms[0] < self.window_ms[1]:
            raise ValueError(f"window_ms must ascend from at least 0, got {list(self.window_ms)}")
        if not self.heldout + self.catalogue:
            raise ValueError("heldout and catalogue: expected a held-out task in one of them, got 0 and 0")
        if self.writer == "model" and not (self.writer_url and self.writer_model):
            raise ValueError("writer=model needs writer_url and writer_model")
        return self


class Vllm(Section):
    """Settings of the vLLM servers that serve the policy if ``policy.engine`` is vllm."""

    servers: Addresses = key([], "addresses of running vLLM servers; empty: the stage starts servers")
    replicas: Positive = key(1, "number of servers that a stage starts")
    sync: Literal["disk", "lora", "nccl"] = key(
        "disk", "how servers get new weights: disk: a folder; lora: an adapter; nccl: a broadcast (Gloo on a CPU)"
    )
    gpu_memory: float = key(0.9, "share of a GPU's memory that a server takes, if the stage starts it", gt=0, le=1)


class PolicyConfig(Section):
    base: str | None = key(None, "Hugging Face folder or name; none: bootstrap trains a small model from scratch")
    layers: Positive = key(4, "layers of a model from scratch")
    hidden: Positive = key(128, "width of a model from scratch")
    heads: Positive = key(4, "attention heads of a model from scratch")
    kv_heads: Positive = key(2, "key and value heads of a model from scratch")
    intermediate: Positive = key(384, "width of the feed-forward layers of a model from scratch")
    vocab: Positive = key(1024, "size of the vocabulary of a model from scratch")
    context: Positive = key(1024, "limit of tokens in a conversation: prompt, answers and tool outputs")
    engine: Literal["local", "vllm", "scripted"] = key(
        "local", "what serves the policy: this process (local), vLLM servers, or a script for drills"
    )
    vllm: Vllm = Vllm()
    engine_batch: Positive = key(32, "number of sequences that are decoded together")
    device: Literal["cpu", "cuda"] = key("cpu", "device on which engine=local computes")
    dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "number type in which engine=local, PPO and critic compute (trained weights stay float32); bfloat16 is "
        "several times faster on a GPU; it needs behavior_logprobs=trainer, as the log-probabilities of engine and "
        "trainer differ",
    )
    threads: Positive = key(2, "threads of engine and trainer on a CPU")

    @model_validator(mode="after")
    def _heads_divide(self) -> "PolicyConfig":
        if self.hidden % self.heads or self.heads % self.kv_heads:
            sizes = f"hidden ({self.hidden}), heads ({self.heads}) and kv_heads ({self.kv_heads})"
            raise ValueError(f"{sizes}: each must be a multiple of the next")
        return self


class Lora(Section):
    """Settings of low-rank adapters (LoRA).  If ``rank`` is above 0, the transformer weights of policy and critic
    are frozen.  Training changes the adapters, and the critic's value head.  The stage ``bootstrap``, which makes
    the first policy, uses no adapters."""

    rank: int = key(0, "rank of the adapters that are trained; 0: all weights are trained", ge=0)
    alpha: float = key(32.0, "scale of the adapters: an adapter's change is multiplied by alpha / rank", gt=0)
    targets: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "linear layers that get an adapter, by the last part of their names",
        min_length=1,
    )


class Training(Section):
    """Settings for the hardware, speed and memory use of training stages.  They change results only by rounding
    errors, so they are not part of the key under which a stage's results and checkpoints are cached.  A stage can
    therefore resume from a checkpoint that was made with other values."""

    checkpointing: Literal["auto", "on", "off"] = key(
        "auto",
        "whether activations are computed twice to save memory; auto: if keeping them would make a step take over "
        "half of the device's memory",
    )
    compile: bool = key(
        False, "use torch.compile for the layers, which halves the time on GPUs and takes a minute at the start"
    )
    num_processes: Positive = key(1, "number of processes that a trainer is spread over (bootstrap always uses one)")
    device: Literal["cpu", "cuda"] = key("cpu", "device on which the processes compute; cuda: one GPU per process")
    parallelism: Literal["data", "context"] = key(
        "data", "data: each process takes whole rows; context: all share the tokens of every row"
    )
    microbatch_tokens: Positive | None = key(
        None, "limit of tokens in a forward pass; none: 4,096 on a CPU, 32,768 on a GPU"
    )


class Bootstrap(Section):
    examples: Positive = key(6000, "number of the teacher's worked examples in the corpus")
    agent_share: Share = key(0.4, "share of the examples that are episodes with tools; the others are single answers")
    repair_share: Share = key(0.2, "share of the other episodes with tools in which a mistake is made and repaired")
    careless_share: Share = key(
        0.6, "share of the episodes with tools that end after the first solution, even if it is wrong or not verified"
    )
    mistake_share: Share = key(
        0, "share of the careless episodes and single answers in which a correct solution gets a mistake, which stays"
    )
    designs: Positive = key(2, "most designs that the teacher profiles in one of the other episodes with tools")
    verify: int = key(24, "number of the teacher's solutions that the sandbox verifies", ge=0)
    steps: Positive = key(600, "number of optimizer steps")
    tokens_per_step: Positive = key(4096, "limit of tokens in one optimizer step")
    lr: Rate = key(6e-3, "learning rate")
    max_seconds: float | None = key(
        None, "limit of training, in seconds, without the steps in which torch.compile works; none: no limit", gt=0
    )


class Ppo(Section):
    """Settings of PPO (CUDA Agent, arXiv 2602.24286, section 3.3).  Two stages train with PPO.  Each has its own
    section in the configuration: ``warmup`` for single answers, and ``agentic`` for episodes with tools."""

    reward: Literal["ladder", "speedup", "raw"] = key(
        "ladder",
        "reward of a verdict; ladder: -1, 1, 2 or 3 (Eq. 1); speedup: -1, or 3 s/(1 + s) for a correct "
        "solution that is s times as fast as the faster of eager and torch.compile; raw: -1, or s itself",
    )
    advantage: Literal["gae", "group", "rloo"] = key(
        "gae",
        "estimator of advantages; gae: with a critic; group: reward minus the mean of a task's samples, "
        "divided by their standard deviation (GRPO); rloo: reward minus the mean of the other samples; group and rloo "
        "train no critic, and read neither its keys nor gamma and lambda",
    )
    steps: Positive = key(6, "number of steps; each plays a batch of episodes and learns from it")
    max_seconds: float | None = key(
        None, "limit of the steps' time, in seconds, counted anew when the stage is resumed; none: no limit", gt=0
    )
    episodes_per_step: Positive = key(64, "number of episodes in the batch of one step")
    samples_per_prompt: Positive = key(
        4, "number of episodes per task in one step; a step has episodes_per_step / samples_per_prompt tasks"
    )
    minibatches: Positive = key(2, "number of optimizer steps in one pass over a batch")
    epochs: Positive = key(1, "number of passes over a batch")
    actor_lr: Rate = key(3e-4, "learning rate of the policy")
    critic_lr: Rate = key(1e-3, "learning rate of the critic")
    lr_rise: int = key(0, "number of first optimizer steps in which the policy's learning rate rises to actor_lr", ge=0)
    clip_low: float = key(0.2, "lower limit of PPO's ratio is 1 - clip_low", gt=0, lt=1)
    clip_high: float = key(0.28, "upper limit of PPO's ratio is 1 + clip_high", gt=0)
    dual_clip: float | None = key(
        None, "upper limit of PPO's ratio at negative advantages, such as 3; none: no limit", gt=1
    )
    loss_mean: Literal["tokens", "trajectory"] = key(
        "tokens",
        "what the policy's loss is a mean of; tokens: all sampled tokens of an optimizer step; trajectory: each "
        "episode's mean over its tokens, so that a long episode weighs no more than a short one",
    )
    gamma: float = key(1.0, "discount factor per token", gt=0, le=1)
    actor_lambda: Share = key(1.0, "lambda of GAE for the policy")
    critic_lambda: Share = key(1.0, "lambda of GAE for the critic's targets")
    critic_warmup: int = key(0, "number of first steps that train only the critic", ge=0)
    eval_every: int = key(
        0, "before every so many steps held-out tasks are played, for the curves only; 0: never", ge=0
    )
    behavior_logprobs: Literal["engine", "trainer"] = key(
        "engine",
        "what computes the log-probabilities in the denominator of PPO's ratio; trainer needs at least two "
        "optimizer steps per batch",
    )
    tis_cap: float = key(2.0, "upper limit of a token's importance weight, p(trainer) / p(engine)", gt=0)
    value_clip: float | None = key(None, "how far the critic's values may move in one batch; none: no clipping", gt=0)
    max_grad_norm: float = key(1.0, "gradients of a larger norm are clipped to it", gt=0)
    context: Positive = key(1024, "limit of tokens in one episode")

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
    turns: Positive = key(6, "limit of turns in an episode of collect and agentic")
    turn_tokens: Positive = key(320, "limit of tokens sampled in one turn")
    tool_tokens: Positive = key(96, "limit of tokens in one tool output; a longer one loses its middle")
    concurrency: Positive = key(32, "limit of episodes under way at the same time")
    deadline_seconds: float = key(
        120.0, "time limit for one episode, in seconds; waiting for the judge does not count", gt=0
    )
    temperature: float = key(1.0, "sampling temperature in training", gt=0)


class Collect(Section):
    samples: Positive = key(6, "number of episodes per training task")


class Sft(Section):
    fastest: Positive | None = key(
        None, "of each task, imitate only this number of good episodes, the fastest; null: all"
    )
    epochs: Positive = key(2, "number of passes over the episodes")
    lr: Rate = key(3e-4, "learning rate")
    tokens_per_step: Positive = key(8192, "limit of tokens in one optimizer step")
    max_grad_norm: float = key(1.0, "gradients of a larger norm are clipped to it", gt=0)


class CriticConfig(Section):
    epochs: Positive = key(4, "number of passes over the episodes")
    lr: Rate = key(1e-3, "learning rate")
    tokens_per_step: Positive = key(8192, "limit of tokens in one optimizer step")
    gae_lambda: Share = key(1.0, "lambda of the targets; 1: Monte-Carlo returns; below 1: recomputed every epoch")
    heldout: Share = key(0.2, "share of the episodes that are held out to measure explained variance")
    min_explained_variance: float = key(0.2, "least explained variance on held-out episodes; see gate")
    gate: Literal["warn", "stop"] = key(
        "warn", "what happens below min_explained_variance; warn: the report warns; stop: exit code 79"
    )


class EvaluateConfig(Section):
    samples: Positive = key(1, "number of episodes per held-out task")
    turns: Positive = key(6, "limit of turns in an episode of an evaluation")
    temperature: float = key(1.0, "sampling temperature in evaluations; 0: the likeliest token", ge=0)
    mode: Literal["quick", "strict"] = key("quick", "mode of the sandbox that judges the final solution of an episode")


class Ray(Section):
    """Settings of Ray, used if ``runtime`` is ray.  A stage then plays its episodes in rollout workers.  Each worker
    has a sandbox, and an engine that serves the policy.  A PPO stage also has one trainer, whose processes may be
    spread over several machines."""

    address: str | None = key(
        None,
        "host:port of a running Ray; none: the stage starts one on this machine",
        pattern=r"^(auto|[^/?#@\s:]+:[0-9]+)$",
    )
    workers: Positive = key(2, "number of rollout workers; each has an engine and a sandbox")
    worker_cpus: float = key(1.0, "processors that Ray reserves for each rollout worker", ge=0)
    worker_gpus: float = key(0.0, "GPUs that Ray reserves for the engine of each rollout worker", ge=0)
    trainers: Positive = key(1, "number of machines over which the trainer's processes are spread evenly")
    trainer_cpus: float = key(1.0, "processors that Ray reserves for the trainer on each machine", ge=0)
    trainer_gpus: float = key(0.0, "GPUs that Ray reserves for the trainer on each machine", ge=0)
    max_off_policy_steps: int = key(
        1,
        "how many steps the weights that sampled a token may be older than those trained on it; 0: playing "
        "and learning take turns",
        ge=0,
    )
    oversample: Share = key(0.0, "share of additional episodes per task in a step; the task's last ones are dropped")


class Config(Section):
    seed: int = key(0, "seed of the run's random choices")
    run: RunConfig = RunConfig()
    graph: Literal["full", "no_rft", "no_critic", "one_shot"] = key(
        "full",
        "stages of the workflow; full: all; no_rft: agentic starts from warmup's policy; no_critic: "
        "agentic makes its critic from the policy; one_shot: warmup is the last stage that trains",
    )
    runtime: Literal["local", "ray"] = key(
        "local", "where episodes are played and PPO trains: in the stage's process, or in Ray's actors"
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
            steps = ppo.minibatches * ppo.epochs
            if self.policy.dtype == "bfloat16" and ppo.behavior_logprobs == "engine" and steps > 1:
                why = "the engine's differ from the trainer's by rounding, and PPO would clip the difference"
                expected = f"expected trainer with policy.dtype=bfloat16 and {steps} optimizer steps a batch"
                raise ValueError(f"{name}.behavior_logprobs: {expected}, got engine: {why}.")
        judged = self.sandbox
        if self.synthesis.headroom and (judged.device == "cpu" or judged.servers or judged.clock == "model"):
            needed = "sandbox.device=cuda and sandbox.clock=real, without sandbox.servers"
            raise ValueError(f"synthesis.headroom: the sweep over designs needs {needed}.")
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
