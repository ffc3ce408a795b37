"""Structural similarity and duplicates."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.synthesis import catalogue
from cuda_agent.synthesis.compose import build, pick_operators
from cuda_agent.synthesis.similarity import duplicate_key, nearest, shingles
from cuda_agent.synthesis.similarity import similarity as dice

CODE = '''"""Doc."""
import torch
import torch.nn.functional as F
N = 16
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = torch.nn.Linear(width, width)
    def forward(self, x):
        y = self.fc(x)
        return F.gelu(y) * 0.5
def get_inputs():
    return [torch.randn(N, 8)]
def get_init_inputs():
    return [8]
'''
RENAMED = (
    CODE.replace('"""Doc."""', "# no doc")
    .replace("self.fc", "self.projection")
    .replace("y = ", "hidden = ")
    .replace("(y)", "(hidden)")
    .replace("import torch.nn.functional as F", "from torch.nn import functional as G")
    .replace("F.gelu", "G.gelu")
    .replace("x)", "value)")
    .replace("N = 16\n", "")
    .replace("N, 8", "16, 8")
)


def chain(seed: int) -> str:
    rng = Random(seed)
    operators = [o for o in catalogue.CATALOGUE if 2 in o.ranks]
    while True:
        picked = pick_operators(operators, rng.choice((1, 2, 3)), rng)
        if picked and (built := build(picked, (4, 32), rng)):
            return built.code()


chains = st.integers(0, 10**6).map(chain)


def similarity(left: str, right: str) -> float:
    return dice(shingles(left), shingles(right))


def test_renamed_code_is_the_same():
    assert RENAMED != CODE and similarity(CODE, RENAMED) == 1.0
    assert duplicate_key(CODE) == duplicate_key(RENAMED)


@pytest.mark.parametrize(("old", "new"), [("N = 16", "N = 17"), ("* 0.5", "* 0.25"), ("return [8]", "return [9]")])
def test_other_shapes_and_constants_are_alike_but_no_duplicates(old, new):
    other = CODE.replace(old, new)
    assert similarity(CODE, other) == 1.0
    assert duplicate_key(CODE) != duplicate_key(other)


def test_another_operator_is_less_alike():
    assert 0.3 < similarity(CODE, CODE.replace("F.gelu", "F.relu")) < 1.0
    assert duplicate_key(CODE) != duplicate_key(CODE.replace("F.gelu", "F.relu"))


@settings(max_examples=60, deadline=None)
@given(chains, chains)
def test_similarity_is_symmetric_bounded_and_one_for_itself(left, right):
    score = similarity(left, right)
    assert 0.0 <= score <= 1.0 and score == similarity(right, left)
    assert similarity(left, left) == 1.0
    if duplicate_key(left) == duplicate_key(right):
        assert score == 1.0


@settings(max_examples=20, deadline=None)
@given(chains, st.lists(chains, min_size=1, max_size=8))
def test_the_nearest_is_the_reference_with_the_largest_similarity(code, references):
    name, score = nearest(code, [(str(place), shingles(reference)) for place, reference in enumerate(references)])
    scores = [similarity(code, reference) for reference in references]
    assert score == pytest.approx(max(scores)) and scores[int(name)] == pytest.approx(score)


def test_source_that_does_not_parse_and_no_references_are_no_error():
    assert not shingles("def (")
    assert nearest(CODE, []) == ("", 0.0)
    assert nearest("def (", [("a", shingles(CODE))])[1] == 0.0


def test_every_name_of_a_constant_counts_as_its_value():
    one, two = CODE + "\nA = B = 3\nx = (A, B)\n", CODE + "\nA = B = 4\nx = (A, B)\n"
    assert duplicate_key(one) != duplicate_key(two)
    assert duplicate_key(CODE + "\nA = B = 3\nx = (0, B)\n") != duplicate_key(CODE + "\nA = B = 4\nx = (0, B)\n")
