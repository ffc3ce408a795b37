"""Turns folders and weights into messages between Ray's actors. A folder is sent as parts of its files, so that memory
holds only a few parts at a time. A model's weights are sent as arrays."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.storage import files_below

Part = tuple[str, bytes]  # path of a file in the folder, and the next piece of its content
Weights = dict[str, Any]  # arrays by name
PART_BYTES = 64 << 20


def parts(folder: Path) -> Iterator[Part]:
    """Yields the files in ``folder`` in parts of at most ``PART_BYTES`` bytes. ``keep`` writes a part to a folder."""
    for path in files_below(folder):
        name = path.relative_to(folder).as_posix()
        with open(path, "rb") as file:
            content = file.read(PART_BYTES)
            yield name, content
            while content := file.read(PART_BYTES):
                yield name, content


def keep(part: Part, folder: Path) -> None:
    name, content = part
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(content)


def arrays(parameters: Iterable[tuple[str, Any]]) -> Weights:
    """Returns a model's ``parameters`` (pairs of name and tensor) as a dict from names to NumPy arrays."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in parameters}


def load_weights(model: Any, weights: Mapping[str, Any], expected: str | None = None) -> None:
    """Loads ``weights``, arrays by parameter name, into ``model``.

    Raises:
        EngineError: Names or shapes differ from the model's, or the loaded model's digest differs from ``expected``."""
    import torch

    parameters = dict(model.named_parameters())
    wrong = parameters.keys() ^ weights.keys()
    wrong |= {n for n in parameters.keys() & weights.keys() if tuple(parameters[n].shape) != tuple(weights[n].shape)}
    if wrong:
        raise EngineError(f"these are the weights of another model: {', '.join(sorted(wrong)[:3])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(weights[name]))
    if expected is not None and (found := digest(model.named_parameters())) != expected:
        raise EngineError(f"weights arrived with digest {found[:12]} instead of {expected[:12]}")
