import json
import random
from itertools import combinations

import pytest

from cuda_agent.agent.prompt import parse_answer
from cuda_agent.agent.tools import TOOLS
from cuda_agent.config import Bootstrap
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.model import train_tokenizer
from cuda_agent.rl.dialogues import REFUSED, careless, corpus, encode, episode, one_shot, texts
from cuda_agent.synthesis.teacher.cpu_kernels import KERNEL, PLAN
from cuda_agent.synthesis.teacher.family import combination, sample_task


@pytest.fixture(scope="module")
def dialogues():
    return corpus(Bootstrap(examples=300), 0, set())


@pytest.fixture(scope="module")
def chat(dialogues):
    return Chat(train_tokenizer(texts(dialogues), 1024), "compact")


def _assistant(dialogue):
    return [message for message in dialogue if message["role"] == "assistant"]


def _calls(dialogue):
    """The calls of every assistant's turn, each with its result."""
    results = iter([message["content"] for message in dialogue if message["role"] == "tool"])
    return [[(call, next(results)) for call in turn.get("tool_calls", ())] for turn in _assistant(dialogue)]


def _replayed(dialogue):
    """The files as the tools would leave them, after every turn."""
    files, states, best = {}, [], {}
    for turn in _calls(dialogue):
        for call, result in turn:
            arguments = call["arguments"]
            if arguments.get("command") == "profile" and result.endswith(", best"):
                best = dict(files)
            if arguments.get("command") == "restore":
                assert result == "restore: ok" and best
                files = dict(best)
            if call["name"] == "Write":
                files[arguments["path"]] = arguments["content"]
            elif call["name"] == "Edit":
                assert files[arguments["path"]].count(arguments["old_string"]) == 1
                text = files[arguments["path"]].replace(arguments["old_string"], arguments["new_string"])
                files[arguments["path"]] = text
        states.append(dict(files))
    return states


def test_the_corpus_has_the_size_and_shares_that_were_asked_for(dialogues):
    assert len(dialogues) == 300
    agents = [dialogue for dialogue in dialogues if dialogue[0]["content"] == "agent"]
    assert 0.3 < len(agents) / 300 < 0.5
    spoilt = sum(any(turn.get("spoilt") for turn in _assistant(dialogue)) for dialogue in agents)
    assert 0 < spoilt < len(agents) / 2


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(dialogues):
    assert corpus(Bootstrap(examples=20), 0, set()) == dialogues[:20]
    assert corpus(Bootstrap(examples=20), 1, set()) != dialogues[:20]


def test_held_out_combinations_never_occur():
    rng = random.Random(0)
    excluded = {combination(sample_task(rng)) for _ in range(3000)}
    seen = set()

    def spy(write):
        def written(task, rng, *rest):
            seen.add(combination(task))
            return write(task, rng, *rest)

        return written

    with pytest.MonkeyPatch.context() as patch:
        for write in (one_shot, careless, episode):
            patch.setattr(f"cuda_agent.rl.dialogues.{write.__name__}", spy(write))
        corpus(Bootstrap(examples=300), 0, excluded)
    assert seen and not seen & excluded


def test_a_one_shot_answer_holds_both_files():
    rng = random.Random(1)
    for _ in range(20):
        assert set(parse_answer(one_shot(sample_task(rng), rng)[-1]["content"])) == {KERNEL, PLAN}


def test_episodes_call_tools_that_exist_and_every_call_has_a_result():
    rng = random.Random(2)
    for repair in (False, True) * 20:
        dialogue = episode(sample_task(rng), rng, repair)
        for position, message in enumerate(dialogue):
            calls = message.get("tool_calls", ())
            assert {call["name"] for call in calls} <= {tool["function"]["name"] for tool in TOOLS}
            following = dialogue[position + 1 : position + 2 + len(calls)]
            assert not calls or [m["role"] for m in following] == ["tool"] * len(calls) + ["assistant"]
        assert dialogue[-1] == {"role": "assistant", "content": "done"}


def test_a_mistake_is_reported_mended_and_not_imitated(chat):
    rng = random.Random(3)
    for _ in range(20):
        dialogue = episode(sample_task(rng), rng, repair=True)
        first, second = _replayed(dialogue)[:2]
        assert first != second
        if not any(turn.get("spoilt") for turn in _assistant(dialogue)):
            continue  # the design is wrong already
        reports = [message["content"] for message in dialogue if message["role"] == "tool"]
        assert reports[2].startswith(("verify: wrong", "build error: kernels/fused.cpp:"))
        assert "verify: ok" in reports[3:]
        ids, mask = encode(dialogue, chat)
        learnt = chat.tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one])
        assert "Edit" in learnt and first[KERNEL] not in learnt


def test_a_mistake_may_survive_other_designs_before_it_is_repaired_and_only_the_repair_is_imitated(chat):
    rng = random.Random(4)
    lengths = set()
    for number in range(200):
        device = ("cpu", "cuda")[number % 2]
        dialogue = episode(sample_task(rng, device), rng, True, device)
        turns, states = _assistant(dialogue), _replayed(dialogue)
        spoilt = [bool(turn.get("spoilt")) for turn in turns]
        count = sum(spoilt)
        if not count:
            continue
        assert spoilt == [True] * count + [False] * (len(turns) - count) and count <= REFUSED
        said = [turn[-1][1] for turn in _calls(dialogue)[: count + 1]]
        assert said[-1] == "verify: ok" and len(set(said[:-1])) == 1 and said[0] != "verify: ok"
        assert [call["name"] for call, _ in _calls(dialogue)[count]] == ["Edit", "Bash"]
        assert len({json.dumps(files) for files in states[: count + 1]}) == count + 1
        lengths.add(count)
        ids, mask = encode(dialogue, chat)
        learnt = chat.tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one])
        path = turns[count]["tool_calls"][0]["arguments"]["path"]
        assert "Edit" in learnt and not any(files[path] in learnt for files in states[:count])
    assert lengths == {1, 2, 3}


def test_without_mistakes_the_mask_is_the_chats(chat, dialogues):
    for dialogue in dialogues[:60]:
        if not any(turn.get("spoilt") for turn in _assistant(dialogue)):
            assert encode(dialogue, chat) == chat.encode_dialogue(dialogue)


def test_answers_and_episodes_are_short(chat, dialogues):
    for dialogue in dialogues:
        ids, mask = encode(dialogue, chat)
        assert len(ids) <= 600
        if dialogue[0]["content"] == "answer":
            assert sum(mask) <= 150


def test_on_a_gpu_results_are_true_of_the_files_and_episodes_end_correct_and_short():
    rng = random.Random(9)
    dialogues = [episode(sample_task(rng, "cuda"), rng, number % 2 == 0, "cuda", 4) for number in range(300)]
    chat = Chat(train_tokenizer(texts(dialogues), 4096), "compact")
    refused = 0
    for dialogue in dialogues:
        reports = [m["content"] for m in dialogue if m["role"] == "tool" and m["content"] != "ok"]
        verified = reports[: reports.index("verify: ok") + 1]
        right = [files for files, said in _profiles(dialogue) if said.endswith((", best", ", slower"))]
        assert _replayed(dialogue)[-1] in right
        wrong = [report for report in verified if report != "verify: ok"]
        refused += bool(wrong)
        assert len(wrong) <= REFUSED + 1
        assert len(encode(dialogue, chat)[0]) <= 2048
    assert refused > 100, "designs are drawn without regard to the shape"


def test_a_careless_agent_ends_after_its_first_solution_right_or_wrong_verified_or_not():
    rng = random.Random(11)
    ends = set()
    for device in ("cpu", "cuda"):
        for _ in range(60):
            dialogue = careless(sample_task(rng, device), rng, device)
            first, last = _assistant(dialogue)
            assert last == {"role": "assistant", "content": "done"} and len(_replayed(dialogue)[0]) == 2
            assert {call["name"] for call in first["tool_calls"]} <= {"Write", "Bash"}
            ends.add(dialogue[-2]["content"])
    assert {"ok", "verify: ok", "verify: wrong"} <= ends


def test_a_mistake_share_spoils_right_first_solutions_that_then_stay_and_are_imitated(chat):
    rng = random.Random(13)
    for device in ("cpu", "cuda"):
        ends, answers = [], []
        for _ in range(60):
            task = sample_task(rng, device)
            dialogue = careless(task, rng, device, 1)
            assert len(_assistant(dialogue)) == 2 and not any(turn.get("spoilt") for turn in dialogue)
            assert sum(encode(dialogue, chat)[1]) > 0
            ends.append(dialogue[-2]["content"].splitlines()[0])
            state = rng.getstate()
            right = parse_answer(one_shot(task, rng, device)[-1]["content"])
            rng.setstate(state)
            answers.append(parse_answer(one_shot(task, rng, device, 1)[-1]["content"]) != right)
        assert "verify: ok" not in ends and "verify: wrong" in ends
        assert any(end.startswith("build error") for end in ends)
        assert 0.4 < sum(answers) / len(answers) < 1  # a design that does not fit is wrong already


def _profiles(dialogue):
    """Each profile of a dialogue: the files that it finds, and what it says."""
    return [
        (files, result)
        for files, turn in zip(_replayed(dialogue), _calls(dialogue), strict=True)
        for call, result in turn
        if call["arguments"].get("command") == "profile"
    ]


def test_an_agent_profiles_as_many_designs_as_the_setting_says_and_none_twice():
    rng = random.Random(12)
    seen = [_profiles(episode(sample_task(rng, "cuda"), rng, False, "cuda", 4)) for _ in range(200)]
    assert {len(profiles) for profiles in seen} == {1, 2, 3, 4}
    for profiles in seen:
        assert all(one[0] != two[0] for one, two in combinations(profiles, 2))
        assert not profiles or profiles[0][1].endswith(", best")


def test_an_agent_mostly_restores_the_best_solution_if_the_last_one_is_slower_and_always_if_it_is_wrong():
    rng = random.Random(12)
    back, stayed, wrong = 0, 0, 0
    for _ in range(300):
        dialogue = episode(sample_task(rng, "cuda"), rng, False, "cuda", 4)
        profiles, final = _profiles(dialogue), _replayed(dialogue)[-1]
        best = [files for files, said in profiles if said.endswith(", best")]
        if profiles and profiles[-1][1].endswith(", slower"):
            assert final in (best[-1], profiles[-1][0])
            back, stayed = back + (final == best[-1]), stayed + (final != best[-1])
        elif profiles:
            wrong += not profiles[-1][1].endswith(", best")
            assert final == best[-1]
    assert back > 2 * stayed > 0
    assert wrong > 20, "changes are drawn without regard to the shape"


def test_a_refused_design_is_followed_by_another_one():
    rng = random.Random(10)
    seen = set()
    while len(seen) < 2:
        dialogue = episode(sample_task(rng, "cuda"), rng, False, "cuda")
        for position, message in enumerate(dialogue):
            if message["content"].startswith(("verify: wrong", "build error")):
                seen.add(message["content"][:11])
                (first, *_) = dialogue[position + 1]["tool_calls"]
                assert first["name"] == "Write"
