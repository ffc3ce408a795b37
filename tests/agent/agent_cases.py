"""A task, its solution, and a scripted policy that plays the task."""

from cuda_agent.agent.loop import EpisodeSettings
from cuda_agent.policy.engines.engine import Completion
from cuda_agent.tasks.task import Task

CODE = """import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        x = torch.relu(x)
        x = x + 0.5
        return x


def get_inputs():
    return [torch.randn(128, 256)]


def get_init_inputs():
    return []
"""
KERNEL = """void fused(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = (x[i] > 0 ? x[i] : 0) + 0.5f;
}
"""
PLAN = (
    '{"nodes": [{"kernel": "kernels/fused.cpp", "function": "fused", "grid": 8, "args": ["in0", "out0", "in0.numel"]}]}'
)
TASK = Task("relu_add", CODE, ("torch.relu", "torch.add"), "torch#2", family="teacher")


def call(name, **arguments):
    """Returns the text of a tool call in the form that the policy writes."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


WRITE_KERNEL, WRITE_PLAN = (
    call("Write", path="kernels/fused.cpp", content=KERNEL),
    call("Write", path="plan.json", content=PLAN),
)
VERIFY, PROFILE = call("Bash", command="verify"), call("Bash", command="profile")


def settings(**changes):
    values = {"turns": 8, "turn_tokens": 2000, "tool_tokens": 60, "context": 8000, "deadline_seconds": 600.0}
    return EpisodeSettings(**(values | {"style": "compact"} | changes))


class scripted:
    """An engine that returns ``turns`` (texts or token ids) one after the other, and then ``default``. It counts the
    turns in the prompt to find the next one."""

    def __init__(self, chat, turns, default="done"):
        (self.header,) = chat.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self.chat, self.turns, self.default, self.calls = chat, turns, default, []

    async def generate(self, prompt, params):
        self.calls.append(list(prompt))
        said = self.calls[-1].count(self.header) - 1
        turn = self.turns[said] if said < len(self.turns) else self.default
        if isinstance(turn, str):
            turn = [*self.chat.tokenizer.encode(turn, add_special_tokens=False), *params.stop_ids[:1]]
        ids = list(turn)[: params.max_tokens]
        return Completion(ids, [-1.0] * len(ids), 0, "stop" if ids[-1] in params.stop_ids else "length")
