"""Muon in float32 against PyTorch's, which computes in bfloat16."""

import pytest
import torch

from cuda_agent.training.muon import FloatMuon, orthogonal
from cuda_agent.training.trainer import Trainer
from tests.training.training_cases import tiny_policy

SHAPES = [(32, 96), (96, 32), (64, 64)]


def test_updates_are_those_of_pytorch_within_bfloat16():
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in SHAPES]
    made = []
    for muon in (torch.optim.Muon, FloatMuon):
        parameters = [start.clone().requires_grad_() for start in starts]
        optimizer = muon(parameters, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        made.append((parameters, optimizer.state_dict()["state"]))
    for start, of_torch, ours in zip(starts, made[0][0], made[1][0], strict=True):
        moved = (of_torch - start).norm()
        assert moved > 0.1
        assert (ours - of_torch).norm() < 0.02 * moved
    for number in range(len(SHAPES)):
        torch.testing.assert_close(made[0][1][number], made[1][1][number])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonal_keeps_the_singular_vectors_and_brings_their_values_near_one(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    values = torch.linspace(1.0, 5.0, min(shape))
    found = u.T @ orthogonal(u @ torch.diag(values) @ v, (3.4445, -4.7750, 2.0315), 5) @ v.T
    assert (found - torch.diag(found.diagonal())).abs().max() < 1e-4
    assert 0.6 < found.diagonal().min() <= found.diagonal().max() < 1.3


@pytest.mark.parametrize("instructions", [False, True], ids=["without bfloat16", "with bfloat16"])
def test_the_trainer_takes_it_where_there_are_no_bfloat16_instructions(instructions, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": instructions})
    kinds = {type(optimizer) for optimizer in Trainer(tiny_policy(), optimizer="muon").optimizers}
    assert kinds == {torch.optim.AdamW, torch.optim.Muon if instructions else FloatMuon}
