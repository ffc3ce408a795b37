"""Every operator and layer of the catalogue against the installed torch and transformers.

The code that runs here is the catalogue's own, so it runs in this process, on tiny shapes.
"""

from random import Random

import pytest
import torch

from cuda_agent.synthesis import catalogue, layers
from cuda_agent.synthesis.compose import build, input_values
from cuda_agent.tasks.inspect import problems, recompute_ops

TINY = {2: (2, 16), 3: (2, 6, 16), 4: (2, 8, 12, 12), 5: (2, 4, 6, 8, 8)}


def run(code: str, seed: int = 0) -> torch.Tensor:
    names: dict = {}
    exec(compile(code, "task", "exec"), names)
    torch.manual_seed(seed)
    model = names["Model"](*names["get_init_inputs"]()).eval()
    with torch.no_grad():
        return model(*names["get_inputs"]())


def test_there_are_at_least_eighty_operators_of_every_kind():
    operators = catalogue.CATALOGUE
    assert len(operators) >= 80 and len({operator.name for operator in operators}) == len(operators)
    wanted = "elementwise reduction normalisation pooling convolution matmul attention loss shape"
    assert set(wanted.split()) <= {operator.kind for operator in operators}


@pytest.mark.parametrize("operator", catalogue.CATALOGUE, ids=lambda operator: operator.name)
def test_an_operator_runs_and_keeps_its_word(operator):
    """Shape, ops and range of values are what the table says, in every rank and several forms."""
    for rank in operator.ranks:
        for seed in range(2) if rank > 1 else ():
            chain = build([operator], TINY[rank], Random(seed))
            assert chain is not None
            code = chain.code()
            output = run(code)
            assert problems(code) == [] and recompute_ops(code) == (operator.name,)
            assert tuple(output.shape) == chain.shape
            assert torch.isfinite(output).all()
            low, high = operator.gives or input_values(operator)
            if operator.gives:
                assert low - 1e-3 <= output.min() and output.max() <= high + 1e-3


@pytest.mark.parametrize("layer", layers.LAYERS, ids=lambda layer: layer.name)
def test_a_layer_of_transformers_runs_as_a_task_of_its_own(layer):
    code = layer.code(2, False, Random(1))
    assert problems(code) == [] and f"transformers.{layer.name}" in recompute_ops(code)
    assert torch.isfinite(run(code)).all()
    assert min(layer.cost(2, False, Random(1))) > 0
