"""Weights that are broadcast to another process: its engine serves them, and whoever does not get them is found out."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch
from broadcast_cases import PROMPTS, serve
from vllm_cases import reference, write_policy

from cuda_agent.policy.engines.broadcast import Member, Rendezvous, TransferError, common_device, forms_of
from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.lora import adapters, attach, merged_parameters
from cuda_agent.policy.model import load_model

DEVICES = [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu)]
HERE = "127.0.0.1"


class Other:
    """The process that receives."""

    def __init__(self, folder, device):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, folder, device), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, method, *arguments):
        self.pipe.send((method, arguments))

    def answer(self):
        assert self.pipe.poll(240), "it says nothing"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __call__(self, method, *arguments):
        self.begin(method, *arguments)
        return self.answer()

    def close(self):
        self.pipe.close()
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Two policies of one shape."""
    made = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(made):
        write_policy(folder, tokenizer, seed)
    return made


@pytest.fixture(scope="module", params=DEVICES)
def devices(request):
    """Of the trainer and of the other process."""
    if "cuda:1" in request.param and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture(scope="module")
def process(devices, folders):
    other = Other(folders[0], devices[1])
    yield other
    other.close()


@pytest.fixture
def other(process):
    """Serves the first policy."""
    assert process("reset") == "serving"
    return process


@pytest.fixture
def model(devices, folders):
    """The trainer's: the second policy."""
    return load_model(folders[1]).to(devices[0])


@pytest.fixture
def meeting():
    meeting = Rendezvous(HERE)
    yield meeting
    meeting.end()


def meet(meeting, model, other) -> Member:
    other.begin("join", HERE, meeting.port, 1, 2)
    member = Member(HERE, meeting.port, 0, 2, str(model.device))
    assert other.answer() == "joined"
    return member


def difference(model, completions):
    """Mean difference of the sampled tokens' log-probabilities from the model's own."""
    wanted = [reference(model, p, c.ids) for p, c in zip(PROMPTS, completions, strict=True)]
    return np.abs(np.concatenate([c.logprobs for c in completions]) - np.concatenate(wanted)).mean()


def test_an_engine_serves_what_it_was_sent_and_its_samples_prove_it(model, other, meeting):
    member = meet(meeting, model, other)
    assert difference(model, other("play")) > 0.05, "it serves other weights at first"
    for _ in range(2):
        other.begin("receive", forms_of(model))
        member.send(merged_parameters(model))
        assert other.answer() == "received"
        assert other("take", digest(merged_parameters(model))) == "serving"
        assert difference(model, other("play")) < 1e-4
        with torch.no_grad():  # a step of training
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_weights_that_were_not_sent_are_found_out(model, other):
    """By their digest, and by what is sampled with them where nobody looks at that."""
    other("skip")
    with pytest.raises(EngineError, match="arrived with digest"):
        other("take", digest(merged_parameters(model)))
    other("skip")
    assert other("take", None) == "serving"
    assert difference(model, other("play")) > 0.05


@pytest.mark.nightly
def test_a_member_that_dies_takes_nobody_along(model, other, devices, folders, meeting):
    """The sender hears that the meeting has ended, lives on, and reaches another in a new one."""
    doomed, first = Other(folders[0], devices[1]), Rendezvous(HERE)
    member = meet(first, model, doomed)
    os.kill(doomed.process.pid, signal.SIGSTOP)
    threading.Timer(0.5, lambda: os.kill(doomed.process.pid, signal.SIGKILL)).start()
    threading.Timer(2.0, first.end).start()
    with pytest.raises(TransferError):
        for _ in range(1_000_000):  # what lies in a socket's buffer counts as sent
            member.send(merged_parameters(model))
    doomed.close()
    member = meet(meeting, model, other)
    other.begin("receive", forms_of(model))
    member.send(merged_parameters(model))
    assert other.answer() == "received" and other("take", digest(merged_parameters(model))) == "serving"


def test_nobody_waits_longer_for_the_others_than_the_meeting_lasts():
    meeting = Rendezvous(HERE)
    threading.Timer(0.5, meeting.end).start()
    with pytest.raises(TransferError):
        Member(HERE, meeting.port, 0, 2, "cpu")
    with pytest.raises(TransferError, match="no meeting"):
        Member(HERE, meeting.port, 0, 2, "cpu")


def test_who_waits_for_weights_that_nobody_sends_is_told_and_can_meet_again(model, other, meeting):
    ended = Rendezvous(HERE)
    meet(ended, model, other)
    other.begin("receive", forms_of(model))
    threading.Timer(0.5, ended.end).start()
    with pytest.raises(TransferError):
        other.answer()
    member = meet(meeting, model, other)
    other.begin("receive", forms_of(model))
    member.send(merged_parameters(model))
    assert other.answer() == "received" and other("take", digest(merged_parameters(model))) == "serving"


def test_adapters_travel_merged(folders):
    model, plain = load_model(folders[0]), load_model(folders[1])
    attach(model, 2, 8.0, ["q_proj", "down_proj"])
    with torch.no_grad():
        for layer in adapters(model).values():
            layer.up.normal_()
    assert [name for name, _, _ in forms_of(model)] == [name for name, _ in plain.named_parameters()]


def test_gpus_are_used_only_where_each_member_has_one_of_its_own():
    assert common_device(["cuda a", "cuda b", "cuda c"]) == "cuda"
    assert (
        common_device(["cuda a", "cuda a"])
        == common_device(["cuda a", "cpu"])
        == common_device(["cpu", "cpu"])
        == "cpu"
    )


def test_a_digest_tells_weights_apart_that_sum_up_to_the_same():
    one = torch.tensor([1.0, 2.0])
    assert digest([("w", one)]) != digest([("w", torch.tensor([1.5, 1.5]))])
    assert digest([("w", one)]) == digest([("w", one.clone())]) != digest([("v", one)])
    many = torch.arange(64.0)
    assert digest([("w", many)]) != digest(
        [("w", many[torch.randperm(64, generator=torch.Generator().manual_seed(0))])]
    )
    assert digest([("w", many.to(torch.bfloat16))]) != digest([("w", many.to(torch.bfloat16) + 1)])
