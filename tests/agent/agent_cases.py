"""One task, its solution, and how a scripted policy plays it."""

from cuda_agent.agent.loop import EpisodeSettings
from cuda_agent.policy.engines.scripted import ScriptedEngine
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
    """A tool call in the policy's own form."""
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


def scripted(chat, turns, default="done"):
    """An engine that says ``turns`` one after the other; which one is next, it reads off the prompt."""
    headers = chat.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    assert len(headers) == 1

    def answer(prompt, seed):
        said = prompt.count(headers[0]) - 1
        return turns[said] if said < len(turns) else default

    return ScriptedEngine(answer, chat.tokenizer)
