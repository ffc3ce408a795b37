"""Makes the schedule of a run before it begins: estimates of the work, time and memory of each stage."""

import json
import re
from pathlib import Path
from typing import Any

from cuda_agent.config import Config, PolicyConfig
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline.graph import stages_of
from cuda_agent.pipeline.screen import duration
from cuda_agent.pipeline.work import Work
from cuda_agent.training.memory import Shape, layout, shape_of, shape_of_policy

# Parameters of the measured model, tokens that it samples in a second, and tokens that it trains on.  Twice the
# parameters halve both rates.  The GPU is an H200: bfloat16, compiled layers, 256 sequences decoded together.
RATES = {"cpu": (1.3e6, 9_000, 7_000), "cuda": (27.3e6, 73_000, 300_000)}
# A pretrained base model is too large for these rates.  Its times follow from the bfloat16 operations and the bytes of
# memory that an H100 or H200 handles in a second, and from the shares of both that engine and trainer usually reach.
OPERATIONS, BYTES = 990e12, 3.3e12
ENGINE_SHARE, TRAINER_SHARE = 0.5, 0.35
ALONE = {"rft", "critic"}  # stages that train a base model on one machine, also with Ray
MACHINE = 8  # GPUs of one machine

_BILLIONS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?:-a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")  # 30b-a3b, 1.5b


def derived(config: Config) -> dict[str, Any]:
    """Returns the schedule of a run as a dict: estimates of the run's work, time and memory.

    The entry ``stages`` has for each stage the number of samples (tasks, examples or episodes), an upper bound of their
    tokens, the number of optimizer steps, and the duration in seconds.  A stage that trains also has ``memory``: the
    peak memory of a training step in bytes, or None if the base model is not on this machine.  (The base model is the
    pretrained model that ``policy.base`` names.)  The entry ``machines`` has a line of text for each kind of machine
    that the run needs.

    Without a base model, the policy is trained from scratch, and the durations are estimates for 2 CPU cores or one
    GPU.  With a base model, they are estimates for the GPUs in ``machines``.  They are None if the base model's number
    of parameters is unknown, or if the inference engine or the trainer computes on a CPU."""
    rows: dict[str, dict[str, Any]] = {}
    for stage in stages_of(config):
        if stage.work is None:
            continue
        work = stage.work(config)
        rates, seconds = token_seconds(config, stage.name), None
        if rates:
            seconds = round(work.decoded * rates[0] + work.trained * rates[1] + work.overhead, 1)
            if work.most_seconds:
                seconds = min(seconds, work.most_seconds)
        rows[stage.name] = {
            "samples": work.samples,
            "tokens": work.tokens,
            "optimizer_steps": work.optimizer_steps,
            "seconds": seconds,
            **({"memory": training_memory(config, work)} if work.models else {}),
        }
    times = [row["seconds"] for row in rows.values()]
    return {
        "machines": machines(config),
        "parameters": parameter_count(config.policy) if config.policy.base is None else None,
        "base": config.policy.base,
        "stages": rows,
        "optimizer_steps": sum(row["optimizer_steps"] for row in rows.values()),
        "seconds": None if None in times else sum(times),
        "device": config.training.device,
    }


def machines(config: Config) -> list[str]:
    """Returns one line of text for each kind of machine that a run needs.  Each line gives the number of GPUs."""
    lines = _local_machines(config) if config.runtime == "local" else _ray_machines(config)
    if config.sandbox.device == "cuda" and (count := len(config.sandbox.servers)):
        lines.append(f"judges with GPUs: {count} server{'s' * (count > 1)} (sandbox.servers)")
    return lines


def _local_machines(config: Config) -> list[str]:
    policy, judge, trainer, servers = config.policy, _judge_gpus(config), _trainer_gpus(config), _vllm_servers(config)
    engine = (servers if policy.engine == "vllm" else 1) * (policy.device == "cuda")
    # No server decodes on the GPU on which the judge takes times, or from which the trainer sends weights.
    judge_times = judge > 0 and config.sandbox.clock == "real"
    first = int(servers > 0 and (judge_times or policy.vllm.sync == "nccl"))
    count = max(trainer, judge, engine + first)
    uses = {"trainer": trainer, "engine": engine, "judge": judge}
    said = ", ".join(f"{name} {gpus}" for name, gpus in uses.items() if gpus)
    return [f"one machine, {_gpus(count)}: {said}" if count else "one machine, no GPU"]


def _ray_machines(config: Config) -> list[str]:
    ray, trainer = config.ray, _trainer_gpus(config)
    lines = [
        f"PPO: {_several(ray.trainers, 'machine', ray.trainer_gpus)} for the trainer",
        f"rollouts: {_several(ray.workers, 'worker', ray.worker_gpus)}",
    ]
    alone = ALONE | ({"bootstrap"} if config.policy.base is None else set())
    alone_stages = [stage.name for stage in stages_of(config) if stage.name in alone]
    if trainer and alone_stages:
        may = " (training.num_processes, which may be lower for them)" if trainer > 1 else ""
        lines.append(f"{', '.join(alone_stages)}: one machine of {_gpus(trainer)}{may}")
    if _judge_gpus(config):
        if config.sandbox.clock == "real" and _vllm_servers(config) >= ray.worker_gpus:
            why = "a worker's GPUs all serve the policy" if ray.worker_gpus else "workers have no GPU"
            lines.append(f"judges with GPUs of their own: name them in sandbox.servers, because {why}")
        else:
            lines.append("synthesis and evaluations: one machine of 1 GPU for the judge")
    return lines


def _judge_gpus(config: Config) -> int:
    """Returns the number of GPUs, 0 or 1, that the run's machines need for the judge (the process that checks and times
    solutions).  The number is 0 if solutions are judged on CPUs or on the servers in ``sandbox.servers``."""
    return int(config.sandbox.device == "cuda" and not config.sandbox.servers)


def _trainer_gpus(config: Config) -> int:
    return config.training.num_processes if config.training.device == "cuda" else 0


def _vllm_servers(config: Config) -> int:
    """Returns the number of vLLM servers that a stage starts on its machine.  With Ray, each rollout worker starts this
    number.  The number is 0 if ``policy.engine`` is not vllm, or if ``policy.vllm.servers`` lists running servers."""
    return config.policy.vllm.replicas if config.policy.engine == "vllm" and not config.policy.vllm.servers else 0


def _several(count: int, name: str, gpus: float) -> str:
    return f"{count} {name}s of {_gpus(gpus)} each" if count > 1 else f"1 {name} of {_gpus(gpus)}"


def _gpus(count: float) -> str:
    return f"{count:g} GPU{'s' * (count > 1)}" if count else "no GPU"


def token_seconds(config: Config, stage: str) -> tuple[float, float] | None:
    """Returns (seconds to sample a token, seconds to train on a token) for ``stage``.

    For a pretrained base model, the times are for all inference engines and all training processes of the stage: twice
    as many engines halve the seconds to sample a token.  For a model trained from scratch, the times are for one engine
    and one training process.

    Returns None for a base model if its number of parameters is unknown, or if an engine or trainer computes on a
    CPU."""
    if config.policy.base is None:
        decoding, training = (_small(config, device) for device in (config.policy.device, config.training.device))
        return decoding[0], training[1]
    sizes = base_parameters(config.policy)
    if sizes is None or config.policy.device == "cpu" or config.training.device == "cpu":
        return None
    whole, active = sizes
    batch = config.policy.engine_batch
    reading, computing = 2 * whole / BYTES, 2 * active * batch / OPERATIONS  # seconds of a step at full speed
    trainers = config.training.num_processes
    if stage in ALONE:
        trainers = min(trainers, MACHINE)
    sampled = max(reading, computing) / ENGINE_SHARE / batch / _engines(config)
    return sampled, 6 * active / (OPERATIONS * TRAINER_SHARE * trainers)


def _small(config: Config, device: str) -> tuple[float, float]:
    """Returns (seconds to sample a token, seconds to train on a token) on ``device``, for a policy that is trained from
    scratch."""
    parameters, sampled, trained = RATES[device]
    scale = parameter_count(config.policy) / parameters
    if device == "cuda":  # a smaller model does not fill a GPU
        scale = max(scale, 1.0)
    return scale / sampled, scale / trained


def _engines(config: Config) -> int:
    """Returns the number of inference engines that sample from the policy at the same time.  With Ray, the workers
    share the servers of ``policy.vllm.servers``.  If there are none, each worker starts its own engines."""
    if config.policy.engine == "vllm" and config.policy.vllm.servers:
        return len(config.policy.vllm.servers)
    return max(1, _vllm_servers(config)) * (config.ray.workers if config.runtime == "ray" else 1)


def base_parameters(policy: PolicyConfig) -> tuple[float, float] | None:
    """Returns (number of parameters, number of active parameters per token) of the model ``policy.base``.  The numbers
    differ for a mixture of experts.  They come from the model's config.json, or else from its name, such as
    ``Qwen3-30B-A3B``.  Returns None if neither gives them."""
    if shape := _shape(policy):
        idle = (shape.experts - shape.active) * 3 * shape.hidden * shape.intermediate * shape.layers
        return shape.parameters, shape.parameters - idle
    named = _BILLIONS.search((policy.base or "").lower())
    return (float(named[1]) * 1e9, float(named[2] or named[1]) * 1e9) if named else None


def schedule_lines(schedule: dict[str, Any]) -> list[str]:
    """Returns ``schedule``, a result of ``derived``, as the lines of a table for people."""
    lines = [f"{'stage':18} {'samples':>10} {'tokens, most':>16} {'optimizer steps':>16} {'time':>8} {'memory':>9}"]
    for name, row in schedule["stages"].items():
        numbers = f"{row['samples']:>10,} {row['tokens']:>16,} {row['optimizer_steps']:>16,}"
        memory = _size(row["memory"]) if "memory" in row else ""
        lines.append(f"{name:18} {numbers} {_about(row['seconds']):>8} {memory:>9}".rstrip())
    size = f"{schedule['parameters'] / 1e6:.2f}M parameters" if schedule["parameters"] else schedule["base"]
    place = "these machines" if schedule["base"] else "one GPU" if schedule["device"] == "cuda" else "2 CPU cores"
    time = "" if schedule["seconds"] is None else f"; on {place} {_about(schedule['seconds'])}"
    lines.append(f"\n{size}; {schedule['optimizer_steps']:,} optimizer steps{time}")
    lines += [f"needs: {line}" for line in schedule["machines"]]
    return [*lines, "memory: of a training step at most, without PyTorch, engine and sandbox (docs/training.md)"]


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _about(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)


def training_memory(config: Config, work: Work) -> int | None:
    """Returns the peak memory of one training step, in bytes, summed over all training processes.  ``work`` is the
    estimated work of the stage.  Returns None if this machine has no readable config.json of the pretrained model
    ``policy.base``."""
    step = layout(config, _shape(config.policy), work.longest, scratch=work.from_scratch).peak
    if step is None:
        return None
    ranks = 1 if work.from_scratch else config.training.num_processes
    return ranks * (step.total + (work.models - 1) * step.fixed)  # the models take turns


def _shape(policy: PolicyConfig) -> Shape | None:
    if policy.base is None:
        return shape_of_policy(policy)
    try:
        return shape_of(json.loads(_base_config(policy.base).read_text()))
    except (OSError, ValueError, KeyError):
        return None


def _base_config(base: str) -> Path:
    """Returns the path of config.json of the model ``base``.  ``base`` is a folder, or the name of a model that was
    downloaded from Hugging Face's hub."""
    if Path(base).is_dir() or base.count("/") != 1:
        return Path(base) / "config.json"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, "config.json")
    return Path(found) if isinstance(found, str) else Path(base) / "config.json"


def require_base(base: str | None) -> None:
    """Raises ConfigError if ``base`` is clearly a path, such as ``./model``, but no model is there.  A name such as
    ``org/name`` passes, because it may be a model of Hugging Face's hub."""
    if base is None:
        return
    is_path = base.startswith(("/", ".", "~")) or base.endswith("/") or base.count("/") > 1
    if is_path and not (Path(base) / "config.json").is_file():
        raise ConfigError(f"policy.base: there is no folder {base} with a model")


def parameter_count(policy: PolicyConfig) -> int:
    """Returns the number of parameters of the model that ``policy`` describes for training from scratch.  Its
    architecture is Qwen3 with tied embeddings."""
    shape = shape_of_policy(policy)
    return shape.parameters + 2 * shape.head * shape.layers  # adds the norms of single heads
