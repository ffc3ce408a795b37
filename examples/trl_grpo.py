import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from cuda_agent.environments.gymnasium import KernelEnv

env = KernelEnv(sys.argv[2], ["sandbox.clock=model"], style="compact", tools=False)
rows = Dataset.from_list([{"prompt": env.prompts[n], "task": n} for n, t in env.tasks.items() if t.split != "heldout"])
args = dict(learning_rate=1e-4, max_steps=40, per_device_train_batch_size=32, use_cpu=True, bf16=False, logging_steps=1)


def reward(completions, task, **_):
    return env.score(task, [messages[0]["content"] for messages in completions])


GRPOTrainer(sys.argv[1], reward, GRPOConfig("trained", **args), train_dataset=rows).train()
