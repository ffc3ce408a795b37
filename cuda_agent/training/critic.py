"""Defines the critic, which estimates the value (expected reward) of each state of an episode.

A critic consists of a trunk (a transformer without its language-model head) and a value head. The trunk starts as a
copy of the policy's trunk. On disk a critic is a folder: the trunk in Hugging Face format and
``value_head.safetensors``. The head computes in float32, even if the trunk computes in bfloat16."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cuda_agent.policy.lora import save_merged

HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """A transformer ``trunk`` without a language-model head, and a linear value head. At first this head returns 0."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        return None

    def values(self, states: Tensor) -> Tensor:
        """Returns the values, float32 [n], of the trunk's last hidden ``states``, float [n, hidden]."""
        return self.head(states.float())[:, 0]


def critic_from_policy(folder: Path | str, expected_reward: float = 0.0) -> Critic:
    """Makes a critic from the policy in ``folder``. At first every state has the value ``expected_reward``."""
    critic = Critic(_trunk(folder))
    nn.init.constant_(critic.head.bias, expected_reward)
    return critic


def save_critic(critic: Critic, folder: Path | str) -> None:
    """Writes the critic's trunk (with adapters merged) and its head into ``folder``."""
    save_merged(critic.trunk, folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in critic.head.named_parameters()}
    save_file(weights, Path(folder) / HEAD)


def load_critic(folder: Path | str) -> Critic:
    """Loads a critic that ``save_critic`` wrote, in float32. Raises ``ValueError`` if ``folder`` holds no critic, or if
    the head is damaged or does not fit the trunk."""
    head = Path(folder) / HEAD
    if not head.is_file():
        raise ValueError(f"{folder} is no critic: {HEAD} is missing")
    critic = Critic(_trunk(folder))
    try:
        critic.head.load_state_dict(load_file(head))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{head} does not fit its trunk or is damaged: {error}") from None
    return critic


def _trunk(folder: Path | str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
