"""Areas that were made before anybody asked for them are those that would have been made then."""

import mmap
import os

import numpy
import pytest

from cuda_agent.sandbox.jail.processes import WorkerError
from cuda_agent.sandbox.judge.memory.buffers import Area, Buffers, Spare
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


ODD = TaskSpec((), (Tensor((5,), "uint8"), Tensor((0,), "float32"), Tensor((64,), "float32")), {}, (), ())


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize(("after", "distance"), [(0, 5), (2, 256), (0, -1)])
def test_one_byte_that_is_written_beside_an_output_is_found(fixed: bool, slot: int, after: int, distance: int) -> None:
    """The outputs are filled first, so that only what lies between them counts."""
    buffers = Buffers(ODD, 3, fixed=fixed)
    outputs = buffers.slots[slot]["out"]
    for number in range(3):
        buffers.fill(number, [])
    for offset, tensor in zip(outputs, ODD.outputs, strict=True):
        buffers.output_area.view(offset, tensor)[...] = 0
    assert not numpy.concatenate([output.ravel() for output in buffers.written(slot)]).any()
    buffers.output_area.bytes[outputs[after] + distance] ^= 1
    with pytest.raises(WorkerError, match="wrote outside of its outputs"):
        buffers.written(slot)
    buffers.fill(slot, [])
    buffers.written(slot)
    buffers.close()


def test_a_gap_of_each_slot_follows_its_last_output() -> None:
    """Otherwise a write beyond the last output of an area would meet only memory that is not compared."""
    for _ in range(20):
        buffers = Buffers(SMALL, 3, areas=lambda in_size, out_size: (Area(in_size, True), Area(out_size, False)))
        ends = [slot["out"][0] + 256 for slot in buffers.slots]
        starts = [slot["out"][0] for slot in buffers.slots[1:]]
        assert all(end + 256 <= start for end, start in zip(ends, [*starts, buffers.output_area.size], strict=True))
        buffers.close()


@pytest.mark.parametrize("fixed", [True, False])
def test_outputs_that_were_not_written_are_the_same_in_every_run_only_with_simulated_times(fixed: bool) -> None:
    """A verdict quotes a wrong value, so a random one would change the bytes of a stage."""
    left = []
    for _ in range(3):
        buffers = Buffers(SMALL, 3, fixed=fixed)
        for slot in range(3):
            buffers.fill(slot, [numpy.zeros((64, 100), "float32")])
        left.append(tuple(float(buffers.outputs(slot)[0][0]) for slot in range(3)))
        buffers.close()
    assert (len({value for values in left for value in values}) == 1) == fixed  # a slot is drawn at random
    assert all(value > 1e19 for values in left for value in values)
