"""Reading task sources without running them."""

import pytest

from cuda_agent.tasks.inspect import problems, recompute_ops, with_advice

TAIL = "\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"


def model(forward: str, init: str = "pass", head: str = "") -> str:
    return (
        "import torch, math\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        f"{head}\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x, y):\n        {forward}\n{TAIL}"
    )


def test_a_task_in_the_published_form_has_no_problems():
    assert problems(model("return x")) == []


NET = "class Net(nn.Module):\n    def forward(self, x): return torch.relu(x)\n"
LAMBDAS = "get_inputs = lambda: [torch.randn(2)]\nget_init_inputs = lambda: []\n"


@pytest.mark.parametrize(
    ("code", "ops"),
    [
        (NET + "Model = Net\n" + LAMBDAS, ("torch.relu",)),
        (NET + "Model: type = Net\n" + TAIL, ("torch.relu",)),
        ("from torch.nn import ReLU as Model\n" + LAMBDAS, ()),
        ("import functools\nModel = functools.partial(nn.Linear, 2)\n" + TAIL, ()),
        (NET + "Model = Net\ndef inputs(): return []\nget_inputs = get_init_inputs = inputs\n", ("torch.relu",)),
    ],
    ids=["model-is-net", "annotated", "imported", "made", "functions-with-other-names"],
)
def test_a_task_may_bind_its_names_by_assignment(code, ops):
    code = "import torch\nimport torch.nn as nn\n" + code
    assert problems(code) == [] and recompute_ops(code) == ops


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ModuleNotFoundError: No module named 'utils' (model.py line 1)", "stands alone"),
        ("ImportError: attempted relative import with no known parent package (model.py line 1)", "stands alone"),
        ("RuntimeError: 0 active drivers ([]). There should only be one. (model.py line 9)", "on a GPU only"),
    ],
)
def test_an_error_of_many_first_tasks_comes_with_advice(error, advice):
    assert with_advice(error).startswith(error) and advice in with_advice(error)
    assert with_advice("ValueError: no") == "ValueError: no"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Model(X):\n    pass\nget_inputs = lambda n: []\nget_init_inputs = lambda: []\n", "line 3: get_inputs"),
        ("x = (\n", "line 1: syntax error"),
        (TAIL, "no class Model"),
        ("class Model(X):\n    pass\ndef get_inputs(): return []\n", "no function get_init_inputs"),
        (
            "class Model(X):\n    pass\ndef get_inputs(n): return []\ndef get_init_inputs(): return []\n",
            "line 3: get_inputs must be callable",
        ),
        ("class Model:\n    pass\n" + TAIL, "no forward"),
        ("a\0b", ""),
        ("x = " + "-" * 400 + "1" + TAIL, "nested"),
        ("x = " + "1 + " * 3000 + "1" + TAIL, ""),
    ],
)
def test_problems_are_named_with_their_line(code, message):
    assert message in "; ".join(problems(code)) and problems(code)


@pytest.mark.parametrize(
    ("code", "ops"),
    [
        (model("return F.gelu(torch.relu(x))"), ("torch.relu", "F.gelu")),
        (model("return self.a(x)", "self.a = nn.Linear(2, 2); self.b = nn.BatchNorm1d(2)"), ("nn.Linear",)),
        (model("return x @ y + 1"), ("torch.matmul", "torch.add")),
        (model("return x.softmax(-1).view(2, -1)"), ("torch.softmax", "Tensor.view")),
        (model("n = x.shape[0] * 2; return x.sum() / math.sqrt(n)"), ("torch.sum", "torch.div")),
        (model("return self.w * x", "self.w = nn.Parameter(torch.randn(2))"), ("torch.mul",)),
        (model("return nn.Softmax(dim=-1)(x)"), ("nn.Softmax",)),
        (model("return g(x)", head="from torch.nn.functional import silu as g"), ("F.silu",)),
        (model("return h(x)", head="def h(v): return torch.exp(v)"), ("torch.exp",)),
        (model("return self.h(x)\n    def h(self, v): return -v"), ("torch.neg",)),
        (model("for l in self.ls: x = l(x)\n        return x", "self.ls = nn.ModuleList([nn.GELU()])"), ("nn.GELU",)),
        (model("return self.s(x)", "self.s = nn.Sequential(nn.ReLU(), nn.Tanh())"), ("nn.ReLU", "nn.Tanh")),
        (model("x += y; return torch.where(x > 0, x, y * 2)"), ("torch.add", "torch.gt", "torch.mul", "torch.where")),
        (model("return self.a(x)", "self.a = Q(2)", "from transformers.activations import Q"), ("transformers.Q",)),
        (model("return torch.linalg.norm(x) * len(y)"), ("torch.linalg.norm", "torch.mul")),
    ],
)  # fmt: skip
def test_ops_are_those_the_forward_pass_uses_in_order(code, ops):
    assert recompute_ops(code) == ops


def test_a_layer_that_is_made_but_never_used_is_no_op():
    assert recompute_ops(model("return x", "self.a = nn.Conv2d(1, 1, 1)")) == ()


def test_recursive_code_does_not_hang():
    assert recompute_ops(model("return f(x)", head="def f(v): return f(torch.abs(v))")) == ("torch.abs",)
