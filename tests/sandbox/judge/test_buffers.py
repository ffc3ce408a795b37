"""A worker can neither resize the judge's areas nor write the one with its inputs."""

import mmap
import os

import pytest

from cuda_agent.sandbox.judge.buffers import Buffers
from cuda_agent.sandbox.wire import TaskSpec, Tensor

SPEC = TaskSpec((Tensor((64, 900), "float32"),), (Tensor((9000,), "float32"),), {}, (), ())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_areas_are_sealed_and_nothing_is_left_open():
    before = descriptors()
    buffers = Buffers(SPEC, 3)
    for area, size in zip((buffers.input_area, buffers.output_area), buffers.places["sizes"], strict=True):
        assert area.size == size == os.fstat(area.descriptor).st_size == len(area.bytes)
        assert not area.bytes.any()
        for other in (area.size - 1, area.size + 1):
            with pytest.raises(OSError):
                os.ftruncate(area.descriptor, other)
    with pytest.raises(OSError):
        mmap.mmap(buffers.input_area.descriptor, buffers.input_area.size)
    mmap.mmap(buffers.output_area.descriptor, buffers.output_area.size).close()
    buffers.close()
    assert descriptors() == before
