"""Counts the bytes of all living tensors after every operation. The counts are the same on any machine.

Only storages that operations return are counted, not memory that an operation uses internally."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """A context that measures ``peak``, the largest number of bytes that are alive at once. It counts the storages that
    are created in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        old = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if self._is_tensor(tensor)}
        for tensor in tree_leaves(out):
            if self._is_tensor(tensor) and (key := tensor.untyped_storage()._cdata) not in old:
                self._count(key, tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    @staticmethod
    def _is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def _count(self, key: int, storage: Any) -> None:
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = size
        self.live += size
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)
