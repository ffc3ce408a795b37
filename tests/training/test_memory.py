"""Worked-out memory against steps that are measured, tensor by tensor, on small models of several shapes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory

from cuda_agent.config import Config, PolicyConfig
from cuda_agent.training import losses, memory, recipes
from cuda_agent.training.memory import Shape, layout, peak, shape_of, shape_of_policy
from cuda_agent.training.packing import batch_of, tokens_of
from cuda_agent.training.trainer import Trainer

TOLERANCE = 0.1
QWEN3_4B = Shape(36, 2560, 32, 8, 128, 9728, 151_936, True)
QWEN3_30B_A3B = Shape(48, 2048, 32, 4, 128, 768, 151_936, False, experts=128, active=8)
SMALL = Shape(3, 64, 4, 2, 16, 192, 320, True)
SHAPES = {
    "small": SMALL,
    "wide": Shape(2, 128, 4, 1, 32, 512, 256, True),
    "deep": Shape(8, 48, 6, 3, 16, 96, 256, False),
    "many heads": Shape(2, 64, 16, 8, 16, 128, 256, True),
}
QUICK = (("small", "fp32"), ("wide", "fp32"), ("small", "bf16"))


def model_of(shape: Shape):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head,
            tie_word_embeddings=shape.tied,
        )
    )


def measured(shape: Shape, tokens: int, segment: int, precision="fp32", checkpointing=False, lora=0) -> int:
    """Most bytes alive in the second optimizer step on two rows, weights and moments included."""
    from cuda_agent.policy.lora import attach

    with LiveMemory() as live:
        model = model_of(shape)
        if lora:
            attach(model, lora, 8.0, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
        trainer = Trainer(model, row_tokens=tokens, precision=precision, gradient_checkpointing=checkpointing)
        trainer.workers = 1
        ids = torch.randint(shape.vocab, (segment,)).tolist()
        sequence = tokens_of(ids, [0] + [1] * (segment - 1))
        recipes.sft_step(trainer, batch_of([tokens_of(ids[:2], [0, 1])]), 1e-3)  # for the moments, which it makes
        live.peak = live.live
        recipes.sft_step(trainer, batch_of([sequence] * (2 * tokens // segment)), 1e-3)
    return live.peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "twice"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[pytest.mark.nightly] * ((name, precision) not in QUICK))
        for precision in ("fp32", "bf16")
        for name in SHAPES
    ],
)
def test_a_step_takes_what_was_worked_out(name, precision, checkpointing, monkeypatch):
    monkeypatch.setitem(memory.LOGITS, "cpu", 2**17)
    shape, tokens = SHAPES[name], 2560  # longer than what attention keeps
    settings = {"precision": precision, "checkpointing": checkpointing}
    worked_out = peak(shape, tokens, device="cpu", **settings)
    assert measured(shape, tokens, tokens, **settings) == pytest.approx(worked_out.total, rel=TOLERANCE)


@pytest.mark.parametrize("tokens", [1024, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4096, 8192))])
def test_it_grows_with_the_row_as_was_worked_out(tokens, monkeypatch):
    monkeypatch.setitem(memory.LOGITS, "cpu", 2**17)
    worked_out = peak(SMALL, tokens, precision="fp32", device="cpu")
    assert measured(SMALL, tokens, tokens, checkpointing=True) == pytest.approx(worked_out.total, rel=TOLERANCE)


def test_short_sequences_on_a_cpu_keep_their_probabilities(monkeypatch):
    monkeypatch.setitem(memory.LOGITS, "cpu", 2**17)
    worked_out = peak(SMALL, 4096, precision="fp32", checkpointing=False, segment=1024, device="cpu")
    assert measured(SMALL, 4096, 1024) == pytest.approx(worked_out.total, rel=TOLERANCE)
    assert worked_out.total > 1.3 * peak(SMALL, 4096, precision="fp32", checkpointing=False, device="cpu").total


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "twice"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_take_what_was_worked_out(precision, checkpointing, monkeypatch):
    monkeypatch.setitem(memory.LOGITS, "cpu", 2**17)
    settings = {"precision": precision, "checkpointing": checkpointing}
    shape = SHAPES["wide"]
    worked_out = peak(shape, 2560, lora_rank=8, device="cpu", **settings)
    taken = measured(shape, 2560, 2560, lora=8, **settings)
    assert taken == pytest.approx(worked_out.total, rel=TOLERANCE)


def test_no_step_holds_tokens_times_vocabulary(monkeypatch):
    """Chunks of logits are made again one after the other in the backward pass, and freed."""
    vocab, hidden, chunk = 4096, 16, 64
    weight = torch.randn(vocab, hidden, requires_grad=True)
    peaks = []
    for tokens in (4 * chunk, 32 * chunk):
        states, ids = torch.randn(tokens, hidden, requires_grad=True), torch.randint(vocab, (tokens,))
        with LiveMemory() as live:
            logprobs, _ = losses.token_logprobs(states, ids, lambda part: part @ weight.T, chunk)
            logprobs.sum().backward()
        peaks.append(live.peak)
        weight.grad = None
    assert peaks[0] < 8 * 4 * chunk * vocab
    assert peaks[1] < 1.2 * peaks[0] < 4 * 32 * chunk * vocab / 2


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted(name):
    shape = SHAPES[name]
    norms = shape.layers * 2 * shape.head
    assert sum(p.numel() for p in model_of(shape).parameters()) == shape.parameters + norms


def test_the_shapes_of_the_table_are_those_of_the_models():
    assert QWEN3_4B.parameters == pytest.approx(4.02e9, rel=0.005)
    assert QWEN3_30B_A3B.parameters == pytest.approx(30.5e9, rel=0.005)
    inactive = QWEN3_30B_A3B.layers * 3 * 2048 * 768 * (128 - 8)
    assert QWEN3_30B_A3B.parameters - inactive == pytest.approx(3.3e9, rel=0.02)


SMALL_27M = Shape(8, 512, 8, 4, 64, 1536, 4096, True)
QWEN2_1_5B = Shape(28, 1536, 12, 2, 128, 8960, 151_936, True)


@pytest.mark.parametrize(
    ("shape", "gigabytes", "recompute"),
    [(SMALL_27M, 80, False), (SMALL_27M, 12, True), (QWEN2_1_5B, 80, True), (QWEN2_1_5B, 640, False), (None, 80, True)],
)
def test_activations_of_long_rows_are_kept_where_the_device_has_the_memory(monkeypatch, shape, gigabytes, recompute):
    monkeypatch.setattr(memory, "memory_bytes", lambda device: gigabytes * 10**9 if device == "cuda" else 0)
    sections = {"policy": {"dtype": "bfloat16"}, "training": {"device": "cuda"}}
    sections |= {stage: {"behavior_logprobs": "trainer"} for stage in ("warmup", "agentic")}
    rows = layout(Config.model_validate(sections), shape, 2048)
    assert (rows.row_tokens, rows.recompute) == (32_768, recompute)
    for setting, chosen in (("on", True), ("off", False)):
        config = Config.model_validate(sections | {"training": {"device": "cuda", "checkpointing": setting}})
        assert layout(config, shape, 2048).recompute is chosen


def test_processes_on_a_processor_share_its_memory_and_a_new_model_takes_one(monkeypatch):
    one, two = (Config.model_validate({"training": {"num_processes": count}}) for count in (1, 2))
    kept = peak(SMALL_27M, 4096, precision="fp32", checkpointing=False, segment=1024, device="cpu").total
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 3 * kept)
    assert [layout(one, SMALL_27M, 1024).recompute, layout(two, SMALL_27M, 1024).recompute] == [False, True]
    assert not layout(two, SMALL_27M, 1024, scratch=True).recompute


def test_a_shape_comes_from_configurations():
    config = json.loads(model_of(SMALL).config.to_json_string(use_diff=False))
    assert shape_of(config) == SMALL
    assert shape_of_policy(PolicyConfig(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=320)) == Shape(
        2, 32, 4, 2, 8, 48, 320, True
    )
    expert = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert shape_of(config | expert).active == 8 and shape_of(config | expert).intermediate == 768


def test_the_table_in_the_documentation_is_what_is_worked_out():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("memory_benchmark", root / "benchmarks" / "memory.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = (root / "docs" / "training.md").read_text()
    shown = page.split("<!-- memory table: begin -->\n")[1].split("\n<!-- memory table: end -->")[0]
    assert shown == benchmark.table(), "python benchmarks/memory.py --table"


def test_ranks_share_what_does_not_grow_with_the_row():
    one, eight = (peak(QWEN3_4B, 131_072, ranks=ranks) for ranks in (1, 8))
    assert eight.weights == one.weights // 8 and eight.moments == one.moments // 8
    assert eight.activations == one.activations
    assert eight.fixed < one.fixed / 3
