from cuda_agent.optimize.whole.tracing import trace

MODEL = """
import torch


class Halve(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x, *, shift=0.0):
        return x / self.by + shift


class InPlace(torch.nn.Module):
    def forward(self, x):
        return x.add_(1)


class Slow(torch.nn.Module):
    def forward(self, x):
        for _ in range(50):
            x = x + 1
        return x


class Text(torch.nn.Module):
    def forward(self, x):
        return "text"


class Model(torch.nn.Module):
    def __init__(self, width):
        super(Model, self).__init__()
        self.first, self.again, self.other = Halve(2), Halve(2), Halve(4)
        self.linear = torch.nn.Linear(width, width)
        self.slow, self.twice, self.keyword, self.in_place, self.text = Slow(), Halve(2), Halve(2), InPlace(), Text()
        self.blocks = torch.nn.ModuleList([torch.nn.Dropout()])

    def forward(self, x):
        x = self.other(self.again(self.first(x)))
        x = self.slow(self.linear(x))
        x = self.keyword(self.twice(self.twice(x)), shift=1.0)
        self.text(x)
        return self.blocks[0](self.in_place(x))


def get_inputs():
    return [torch.rand(16, 32)]


def get_init_inputs():
    return [32]
"""


def test_a_trace_says_what_can_be_a_task_alone_and_why_the_rest_cannot():
    found = trace(MODEL, "cpu", False)
    modules = {record["name"]: record for record in found["modules"]}
    assert {name: record["why"] for name, record in modules.items() if record["why"]} == {
        "twice": "is called 2 times",
        "keyword": "is called with keyword arguments",
        "in_place": "changes its inputs in place",
        "text": "returns no tensor",
        "blocks": "is not called",
    }
    assert modules["linear"]["inputs"] == [[[16, 32], "float32"]]
    assert modules["linear"]["state"] == [["weight", [32, 32], "float32"], ["bias", [32], "float32"]]
    assert modules["linear"]["kind"] == "Linear"
    assert modules["first"]["same"] == modules["again"]["same"] != modules["other"]["same"], (
        "another number to divide by"
    )


def test_a_trace_measures_one_call_in_which_shares_add_up():
    found = trace(MODEL, "cpu", False)
    seconds = {record["name"]: record["seconds"] for record in found["modules"]}
    assert seconds["slow"] == max(seconds.values()) and seconds["slow"] > 5 * seconds["first"]
    assert sum(seconds.values()) <= found["seconds"]
