"""Configuration: composition, validation, freezing, and what a person is told about a mistake."""

import hashlib
import json
import subprocess
import sys

import pytest

from cuda_agent.compose import RENAMED, compose, flat, freeze, key_paths, load, restricted, section_values
from cuda_agent.config import Config, PolicyConfig
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import work
from cuda_agent.pipeline.graph import STAGES, check
from cuda_agent.pipeline.schedule import base_parameters, derived, machines, parameter_count, schedule_lines
from cuda_agent.training.memory import layout, shape_of_policy


@pytest.mark.parametrize("name", ["smoke", "demo", "cuda", "single_gpu", "paper", "benchmark"])
def test_every_experiment_composes_validates_and_survives_freezing(name):
    config = compose([f"experiment={name}"])
    assert load(*freeze(config)) == config
    assert derived(config)["stages"]["agentic"]["optimizer_steps"] > 0


def test_by_default_the_actors_advantages_reach_back_to_the_first_token():
    for name in ("smoke", "demo", "single_gpu"):
        config = compose([f"experiment={name}"])
        assert (config.warmup.actor_lambda, config.agentic.actor_lambda) == (1.0, 1.0)


def test_a_sweep_over_designs_needs_a_gpu_of_this_machine():
    gpu = ["synthesis.headroom=1.15", "sandbox.device=cuda"]
    assert compose(gpu).synthesis.headroom == 1.15
    for other in ("sandbox.device=cpu", "sandbox.clock=model", "sandbox.servers=[http://one:80]"):
        with pytest.raises(ConfigError, match=r"synthesis\.headroom"):
            compose([*gpu, other])


def test_paper_carries_the_published_hyper_parameters():
    c = compose(["experiment=paper"])
    for ppo, context in ((c.warmup, 32768), (c.agentic, 131072)):
        assert (ppo.actor_lr, ppo.critic_lr, ppo.episodes_per_step, ppo.minibatches, ppo.epochs) == (
            3e-6,
            6e-6,
            1024,
            1,
            1,
        )
        assert (ppo.clip_low, ppo.clip_high, ppo.gamma, ppo.actor_lambda, ppo.critic_lambda) == (
            0.2,
            0.28,
            1,
            0.95,
            0.95,
        )
        assert (ppo.loss_mean, ppo.context) == ("trajectory", context)
    assert (c.agentic.steps, c.agent.turns, c.evaluate.turns) == (150, 150, 200)
    assert (c.critic.gate, c.critic.gae_lambda) == ("stop", 0.95)
    assert (c.sandbox.device, c.sandbox.format, c.sandbox.checks, c.sandbox.tolerance) == ("cuda", "extension", 5, 1e-2)
    assert (c.synthesis.window_ms, c.synthesis.max_ops, c.synthesis.max_similarity) == ((1, 100), 5, 0.9)


@pytest.mark.parametrize("name", ["cuda", "single_gpu", "paper"])
def test_a_recipe_for_gpus_uses_them_for_everything_in_half_precision(name):
    c = compose([f"experiment={name}"])
    assert {c.sandbox.device, c.policy.device, c.training.device} == {"cuda"} and c.policy.dtype == "bfloat16"
    for ppo in (c.warmup, c.agentic):
        assert ppo.behavior_logprobs == ("engine" if name == "paper" else "trainer"), "paper: one update a batch"
    if name != "cuda":
        assert c.synthesis.catalogue_share == 1, "the published tasks are of the full catalogue"


@pytest.mark.parametrize("name", ["single_gpu", "paper"])
def test_a_recipe_with_a_base_holds_out_tasks_of_the_catalogue_alone(name):
    """Eager takes less than a millisecond for the teacher's tasks on a GPU, so the window would drop all of them."""
    tasks = compose([f"experiment={name}"]).synthesis
    assert tasks.heldout == 0 and tasks.catalogue >= 100 and tasks.window_ms[0] >= 1


def test_without_any_held_out_task_there_is_no_evaluation():
    with pytest.raises(ConfigError, match=r"heldout and catalogue"):
        compose(["synthesis.heldout=0", "synthesis.catalogue=0"])


def test_the_schedule_says_what_machines_a_run_needs():
    def needed(*overrides):
        return machines(compose(overrides))

    assert needed("experiment=demo") == ["one machine, no GPU"]
    assert needed("experiment=single_gpu") == ["one machine, 1 GPU: trainer 1, engine 1, judge 1"]
    assert needed("experiment=single_gpu", "training.num_processes=4")[0].startswith("one machine, 4 GPUs: trainer 4")
    apart = needed("experiment=single_gpu", "policy.engine=vllm", "policy.vllm.replicas=3")
    assert apart == ["one machine, 4 GPUs: trainer 1, engine 3, judge 1"]
    judged = needed("experiment=single_gpu", "sandbox.servers=['http://box:1']")
    assert judged == ["one machine, 1 GPU: trainer 1, engine 1", "judges with GPUs: 1 server (sandbox.servers)"]
    paper = needed("experiment=paper")
    assert paper == [
        "PPO: 8 machines of 8 GPUs each for the trainer",
        "rollouts: 16 workers of 1 GPU each",
        "rft, critic: one machine of 64 GPUs (training.num_processes, which may be lower for them)",
        "judges with GPUs of their own: name them in sandbox.servers, because a worker's GPUs all serve the policy",
    ]
    sent = needed(
        "experiment=single_gpu", "policy.engine=vllm", "policy.vllm.sync=nccl", "sandbox.servers=['http://b:1']"
    )
    assert sent[0] == "one machine, 2 GPUs: trainer 1, engine 1"
    spread = needed("experiment=cuda", "runtime=ray", "ray.trainer_gpus=1")
    assert spread == [
        "PPO: 1 machine of 1 GPU for the trainer",
        "rollouts: 2 workers of no GPU each",
        "bootstrap, rft: one machine of 1 GPU",
        "judges with GPUs of their own: name them in sandbox.servers, because workers have no GPU",
    ]
    assert "sandbox.servers" in "\n".join(schedule_lines(derived(compose(["experiment=paper"]))))


def test_a_policy_from_nothing_fits_one_gpu_with_its_activations_kept():
    c = compose(["experiment=cuda"])
    assert c.policy.base is None and parameter_count(c.policy) == pytest.approx(27.3e6, rel=0.01)
    rows = layout(c, shape_of_policy(c.policy), c.policy.context)
    assert (rows.row_tokens, rows.recompute, rows.peak.total < 16e9) == (32_768, False, True)
    lines = schedule_lines(derived(c))
    assert any(line.startswith("agentic ") and "GiB" in line for line in lines)
    assert any("on one GPU" in line for line in lines)


def test_the_schedule_counts_held_out_rounds_as_played_and_not_as_trained():
    sections = {"warmup": {"steps": 5, "samples_per_prompt": 4, "episodes_per_step": 8}, "synthesis": {"heldout": 3}}
    config = Config.model_validate(sections)
    plain, shown = (work.ppo(config, config.warmup.model_copy(update={"eval_every": every}), 100) for every in (0, 2))
    assert (plain.samples, shown.samples) == (40, 40 + 3 * 8 * 4), "before steps 0, 2 and 4: 8 of 3 + 6 tasks"
    assert shown.tokens == 100 * shown.samples and shown.decoded > plain.decoded and shown.overhead > plain.overhead
    assert shown.trained == plain.trained


def test_a_gpu_shortens_the_schedule_and_its_verdicts_take_turns():
    cpu, gpu = (
        derived(compose(["experiment=cuda", f"policy.device={place}", f"training.device={place}"]))["stages"]
        for place in ("cpu", "cuda")
    )
    assert cpu["bootstrap"]["seconds"] == gpu["bootstrap"]["seconds"] == 70, "max_seconds, and ten more"
    compiled = derived(compose(["experiment=cuda", "training.compile=true"]))["stages"]
    assert compiled["bootstrap"]["seconds"] == 130, "a minute for torch.compile"
    assert cpu["agentic"]["seconds"] > 10 * gpu["agentic"]["seconds"]
    assert gpu["evaluate-base"]["seconds"] > 10 + 0.1 * gpu["evaluate-base"]["samples"]


def test_a_headroom_makes_synthesis_several_times_as_long():
    with_room, without = (
        derived(compose(["experiment=cuda", f"synthesis.headroom={headroom}"]))["stages"]["synthesis"]["seconds"]
        for headroom in (1.15, 0)
    )
    assert with_room > 4 * without


@pytest.mark.parametrize(
    ("name", "graph", "reward"),
    [
        ("no_agent_loop", "one_shot", "speedup"), ("no_rft", "no_rft", "speedup"),
        ("no_critic", "no_critic", "speedup"), ("raw_reward", "full", "raw"), ("none", "full", "speedup"),
    ],
)  # fmt: skip
def test_an_ablation_changes_one_thing_of_an_experiment(name, graph, reward):
    """The experiment's own values stay, also where the ablation is named first."""
    given = ["experiment=smoke", "warmup.reward=speedup", "agentic.reward=speedup"]
    chosen = [f"ablation={name}", given[0], *(given[1:] if reward == "speedup" else [])]
    ablated, whole = (compose(overrides).model_dump() for overrides in (chosen, given))
    assert ablated["graph"] == graph and {ablated[stage]["reward"] for stage in ("warmup", "agentic")} == {reward}
    changed = {"graph"} if reward == "speedup" else {"warmup", "agentic"}
    assert {key for key in whole if whole[key] != ablated[key]} <= changed


def test_smoke_is_repeatable_and_tiny():
    config = compose(["experiment=smoke"])
    assert config.sandbox.clock == "model" and parameter_count(config.policy) < 200_000


def test_without_overrides_the_defaults_of_the_schema_hold():
    assert compose() == Config()


def test_overrides_win_over_the_experiment():
    assert compose(["critic.lr=0.01", "experiment=demo"]).critic.lr == 0.01


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("critc.lr=1e-4", ["critc.lr", "critic.lr"]),
        ("lr=1e-4", ["lr", "critic.lr"]),
        ("+agent.turn=3", ["agent.turn", "agent.turns"]),
        ("critic.lr=fast", ["critic.lr", "a number > 0 and < 1", "'fast'"]),
        ("critic.lr=3", ["critic.lr", "> 0 and < 1", "3"]),
        ("sandbox.format=plann", ["sandbox.format", "plan, extension, python"]),
        ("agent.turns=2.5", ["agent.turns", "whole number"]),
        ("policy={base: 3}", ["policy.base", "text or null"]),
        ("experiment=demmo", ["demmo", "Did you mean demo?"]),
        ("experimnt=demo", ["experimnt", "Did you mean experiment?"]),
        ("experiment=null", ["experiment=None", "demo"]),
        ("ablation=no_rtf", ["ablation=no_rtf", "no_agent_loop, no_critic, no_rft, none, raw_reward", "no_rft?"]),
        ("critic.lr=1e-4,1e-3", ["critic.lr", "sweep"]),
        ("critic.lr", ["critic.lr", "key=value"]),
        ("critic=3", ["critic", "critic.epochs"]),
        (
            "warmup.samples_per_prompt=5",
            ["warmup", "episodes_per_step (64) must be a multiple of samples_per_prompt (5)"],
        ),
        ("agentic.advantage=grpo", ["agentic.advantage", "one of gae, group, rloo", "'grpo'"]),
        ("warmup.reward=speed", ["warmup.reward", "one of ladder, speedup"]),
        (
            "agentic={advantage: group, samples_per_prompt: 1}",
            ["agentic.samples_per_prompt: expected at least 2", "agentic.advantage=group", "got 1"],
        ),
        (
            "warmup={advantage: rloo, samples_per_prompt: 1}",
            ["warmup.samples_per_prompt: expected at least 2", "warmup.advantage=rloo", "got 1"],
        ),
        ("ray.address=http://box", ["ray.address", "host:port"]),
        ("runtime=Ray", ["runtime", "local, ray"]),
        ("agentic.context=4096", ["agentic.context", "policy.context (1024)", "4096"]),
        ("synthesis.window_ms=[5,1]", ["synthesis", "window_ms"]),
        ("run.name=../x", ["run.name"]),
        ("policy={engine: vllm, vllm: {sync: lora}}", ["policy.vllm.sync=lora", "lora.rank from 1 to 64", "0"]),
        (
            "policy.dtype=bfloat16",
            ["warmup.behavior_logprobs: expected trainer", "policy.dtype=bfloat16 and 2 optimizer steps", "rounding"],
        ),
        ("sandbox.threads=true", ["sandbox.threads"]),
    ],
)
def test_a_mistake_is_told_with_path_expectation_and_nearest_name(override, said):
    with pytest.raises(ConfigError) as error:
        compose([override])
    text = str(error.value)
    assert all(words in text for words in said), text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_key_of_before_is_refused_with_the_name_that_it_has_now(old):
    new = RENAMED[old]
    assert old not in key_paths() and new.split()[0] in key_paths()
    for override in (f"{old}=1", f"+{old}=1"):
        with pytest.raises(ConfigError) as error:
            compose([override])
        assert f"It is called {new} now." in str(error.value)


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        compose(["critic.lr=7", "sandbox.device=tpu"])
    assert "critic.lr" in str(error.value) and "sandbox.device" in str(error.value)


def test_ranks_are_dealt_out_to_machines_evenly():
    with pytest.raises(ConfigError, match=r"a multiple of ray.trainers \(2\), got 3"):
        compose(["runtime=ray", "ray.trainers=2", "training.num_processes=3"])
    assert compose(["runtime=local", "ray.trainers=2", "training.num_processes=3"]).training.num_processes == 3


def test_a_bfloat16_policy_learns_from_the_trainers_own_denominators_or_in_one_step_a_batch():
    ours, once = "{behavior_logprobs: trainer}", "{minibatches: 1}"
    for warmup, agentic in ((ours, ours), (once, once), (ours, once)):
        compose(["policy.dtype=bfloat16", f"warmup={warmup}", f"agentic={agentic}"])
    with pytest.raises(ConfigError, match=r"agentic\.behavior_logprobs: expected trainer .* 4 optimizer steps"):
        compose(["policy.dtype=bfloat16", f"warmup={ours}", "agentic={minibatches: 2, epochs: 2}"])


def test_the_number_type_is_part_of_the_key_of_every_stage_that_learns():
    other = compose(["policy.dtype=bfloat16", *(f"{s}.behavior_logprobs=trainer" for s in ("warmup", "agentic"))])
    learning = [stage for stage in STAGES if "training" in stage.config]
    assert len(learning) == 5 and all("policy" in stage.config for stage in learning)
    assert section_values(Config(), ("policy",)) != section_values(other, ("policy",))


def test_adapters_do_not_travel_from_rays_trainer_to_vllm():
    with pytest.raises(ConfigError, match="disk or nccl"):
        compose(["policy={engine: vllm, vllm: {sync: lora}}", "lora.rank=4", "runtime=ray"])


def test_the_command_line_ends_with_78_and_no_traceback():
    command = [sys.executable, "-m", "cuda_agent.cli", "run", "experiment=demo", "agentic.actor_lrr=1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 78
    assert "agentic.actor_lrr" in ended.stderr and "agentic.actor_lr?" in ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) < 20


def test_a_changed_frozen_text_is_refused():
    text, sha256 = freeze(Config())
    with pytest.raises(ConfigError, match="changed"):
        load(text.replace("16", "17", 1), sha256)


def test_frozen_text_is_canonical():
    text, _ = freeze(compose(["experiment=smoke"]))
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_a_stage_sees_only_its_sections():
    part = restricted(Config(seed=3), ("critic", "policy"))
    assert (part.seed, part.critic.epochs, part.policy.layers) == (3, Config().critic.epochs, 4)
    with pytest.raises(AttributeError):
        _ = part.agentic


def test_the_tasks_of_an_older_configuration_have_the_seed_of_its_run():
    values = compose(["seed=3"]).model_dump(mode="json")
    assert values["synthesis"].pop("seed") == 3
    text = json.dumps(values)
    assert load(text, hashlib.sha256(text.encode()).hexdigest()).synthesis.seed == 3


@pytest.mark.parametrize("key", ["run.mlflow", "synthesis.writer_url"])
def test_an_address_with_a_password_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError, match=key) as refused:
        compose([f"{key}='http://user:hunter2@host/path'"])
    assert "without user and password" in str(refused.value) and "hunter2" not in str(refused.value)
    assert compose([f"{key}='http://host/path@version'"])


@pytest.mark.parametrize("key", ["sandbox.tolerance=inf", "agentic.clip_high=inf", "warmup.tis_cap=nan"])
def test_numbers_that_are_not_finite_are_refused(key):
    with pytest.raises(ConfigError, match=key.partition("=")[0]):
        compose([key])


def test_a_policy_cannot_learn_from_its_likeliest_tokens_alone():
    with pytest.raises(ConfigError, match=r"agent\.temperature"):
        compose(["agent.temperature=0"])
    assert compose(["evaluate.temperature=0"]).evaluate.temperature == 0


def test_runs_with_different_seeds_can_have_the_same_tasks():
    stage = next(stage for stage in STAGES if stage.name == "synthesis")
    one, other, same = (compose(["seed=1"]), compose(["seed=2"]), compose(["seed=2", "synthesis.seed=1"]))
    assert [each.synthesis.seed for each in (one, other, same)] == [1, 2, 1]
    keys = [section_values(each, stage.config) for each in (one, other, same)]
    assert keys[0] == keys[2] != keys[1]
    with pytest.raises(AttributeError):
        _ = restricted(one, stage.config).seed


def test_a_stage_may_see_one_key_of_a_section_and_only_this_is_in_its_cache_key():
    raw, faster = (Config.model_validate({"agentic": other}) for other in ({"reward": "raw"}, {"actor_lr": 0.5}))
    part = restricted(raw, ("critic", "agentic.reward"))
    assert part.agentic.reward == "raw" and part.critic.epochs
    with pytest.raises(AttributeError):
        _ = part.agentic.steps
    ours, same, other = (section_values(one, ("agentic.reward",)) for one in (Config(), faster, raw))
    assert ours == same != other


@pytest.mark.parametrize("kind", ["folder", "downloaded"])
def test_the_memory_of_a_base_that_is_here_is_worked_out(tmp_path, monkeypatch, kind):
    shape = {"num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "intermediate_size": 9728, "vocab_size": 151_936, "tie_word_embeddings": True}
    folder, base = tmp_path, str(tmp_path)
    if kind == "downloaded":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        folder, base = tmp_path / "models--some--model" / "snapshots" / "abc", "some/model"
        folder.mkdir(parents=True)
        (tmp_path / "models--some--model" / "refs").mkdir()
        (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    settings = Config.model_validate({"policy": {"base": base}})
    assert derived(settings)["stages"]["agentic"]["memory"] is None
    (folder / "config.json").write_text(json.dumps(shape))
    taken = derived(settings)["stages"]["agentic"]["memory"] / 2**30
    assert 120 < taken < 180, "weights, gradients and moments of policy and critic, and one row of 4,096 tokens"


@pytest.mark.parametrize(
    ("base", "billions"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", (30, 3)), ("Qwen/Qwen2.5-Coder-1.5B-Instruct", (1.5, 1.5)),
        ("meta-llama/Llama-3.1-70B", (70, 70)), ("org/mixtral-8x7b", None), ("gpt2", None), ("org/model-7b-v2", (7, 7)),
    ],
)  # fmt: skip
def test_the_parameters_of_a_base_that_is_not_here_are_in_its_name(base, billions):
    found = base_parameters(PolicyConfig(base=base))
    assert found == (None if billions is None else tuple(1e9 * count for count in billions))


def test_the_time_of_a_base_needs_its_size_and_falls_with_more_machines():
    def row(*overrides):
        return derived(compose(["experiment=paper", *overrides]))

    usual, unknown = row(), row("policy.base=org/secret")
    assert usual["seconds"] > 24 * 3600 and unknown["seconds"] is None
    assert "on these machines" in "\n".join(schedule_lines(usual)) and "unknown" in "\n".join(schedule_lines(unknown))
    stages = usual["stages"]
    for change, stage in (("ray.workers=32", "agentic"), ("sandbox.servers=[http://a,http://b]", "collect"),
                          ("training.num_processes=8", "rft")):  # fmt: skip
        other = row(change)["stages"][stage]["seconds"]
        assert (other < stages[stage]["seconds"]) == (stage != "rft"), change  # rft has one machine of 8 GPUs


def test_rays_workers_share_the_running_engines_of_a_schedule():
    def seconds(*overrides):
        given = ["experiment=paper", "policy.engine=vllm", "ray.workers=2", *overrides]
        return derived(compose(given))["stages"]["agentic"]["seconds"]

    four = "policy.vllm.servers=[http://a:1,http://b:1,http://c:1,http://d:1]"
    assert seconds(four) == seconds("policy.vllm.replicas=2"), "four engines, started here or elsewhere"
    assert seconds(four) == seconds(four, "ray.workers=4")
    assert seconds(four, "policy.engine=local") == seconds("policy.engine=local"), "the servers are not used"


def test_the_schedule_shows_the_memory_of_bootstrap_only_where_it_trains():
    bases: list[str | None] = [None, "some/model"]
    rows = [derived(Config.model_validate({"policy": {"base": base}}))["stages"]["bootstrap"] for base in bases]
    assert rows[0]["memory"] > 0 and "memory" not in rows[1]


def test_how_training_computes_is_no_part_of_a_cache_key():
    one, other = Config(), Config.model_validate({"training": {"checkpointing": "on"}})
    for stage in STAGES:
        assert section_values(one, stage.config) == section_values(other, stage.config)


def test_every_key_has_one_path_and_the_flat_form_has_the_same():
    leaves = {path for path in key_paths() if not any(other.startswith(path + ".") for other in key_paths())}
    assert leaves == set(flat(Config()))


def test_where_ray_is_decides_no_result_and_without_it_its_settings_do_not_either():
    def values(*overrides, learns=True):
        return section_values(compose(overrides), ("runtime", "ray", *(["training"] if learns else [])))

    assert values("ray.workers=9") == values() and values("runtime=ray") != values()
    assert values("runtime=ray", "ray.address=box-1:6379") == values("runtime=ray")
    assert values("runtime=ray", "ray.trainers=2", "training.num_processes=2", "ray.trainer_gpus=8") == values(
        "runtime=ray"
    )
    assert values("runtime=ray", "ray.max_off_policy_steps=0") != values("runtime=ray")
    learning = ("runtime=ray", "ray.max_off_policy_steps=0", "ray.oversample=0.5")
    assert values(*learning, learns=False) == values("runtime=ray", learns=False)
    assert values("runtime=ray", "ray.workers=9", learns=False) != values("runtime=ray", learns=False)


def test_the_graph_is_sound_and_names_sections_that_exist():
    check(STAGES)
    for stage in STAGES:
        assert set(stage.config) <= set(key_paths())
        assert "run" not in stage.config
