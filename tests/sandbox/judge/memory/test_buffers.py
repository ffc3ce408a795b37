"""Areas that were made before anybody asked for them are those that would have been made then."""

import mmap
import os

import pytest

from cuda_agent.sandbox.judge.memory.buffers import Buffers, Spare
from cuda_agent.sandbox.wire import TaskSpec, Tensor

SMALL = TaskSpec((Tensor((64, 100), "float32"),), (Tensor((64,), "float32"),), {}, (), ())
LARGE = TaskSpec((Tensor((64, 900), "float32"),), (Tensor((9000,), "float32"),), {}, (), ())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_spare_is_cut_to_what_is_asked_for_and_sealed():
    spare = Spare()
    Buffers(LARGE, 3, areas=spare.take).close()
    spare.make()
    inputs, outputs = spare._areas
    buffers = Buffers(SMALL, 3, areas=spare.take)
    assert (buffers.input_area, buffers.output_area) == (inputs, outputs)
    in_size, out_size = spare._asked[-1]
    for area, size, writable in ((inputs, in_size, False), (outputs, out_size, True)):
        assert area.size == max(size, mmap.PAGESIZE) == os.fstat(area.descriptor).st_size == len(area.bytes)
        assert not area.bytes.any()
        for other in (area.size - 1, area.size + 1):
            with pytest.raises(OSError):
                os.ftruncate(area.descriptor, other)
        if not writable:
            with pytest.raises(OSError):
                mmap.mmap(area.descriptor, area.size)
    buffers.close()


def test_what_is_too_small_is_not_used_and_nothing_is_left_open():
    before = descriptors()
    spare = Spare()
    spare.make()
    assert spare._areas is None  # nobody has asked for any yet
    Buffers(SMALL, 2, areas=spare.take).close()
    spare.make()
    kept = spare._areas
    spare.make()
    assert spare._areas is kept
    buffers = Buffers(LARGE, 2, areas=spare.take)
    assert buffers.input_area not in kept and spare._areas is None
    buffers.close()
    spare.make()
    spare.close()
    assert descriptors() == before
