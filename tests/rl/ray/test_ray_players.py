"""Dealing episodes out to rollout workers: what is lost is played again, and nothing else.  No Ray runs."""

import asyncio
from importlib.util import find_spec

import pytest

from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import Episode, to_line
from cuda_agent.rl.ray.actors import RolloutWorker
from cuda_agent.rl.ray.players import EpisodeCollector, RayPlayers, ServedPolicy, WorkerLost
from cuda_agent.rl.rollouts import episode_settings, episodes_of
from cuda_agent.tasks.task import Task
from tests.rl.ray.ray_cases import config, context

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")
TASKS = [Task(name, "", (), "torch#1") for name in ("a", "b", "c")]


class Method:
    """``actor.method.remote(...)``, as Ray has it."""

    def __init__(self, call):
        self.remote = call

    def options(self, **options):
        return self


class Actor:
    """Plays what it is given, and is lost after ``plays`` episodes."""

    def __init__(self, plays=1000):
        self.plays, self.played, self.versions = plays, [], []
        self.open, self.stop, self.close = Method(self._nothing), Method(self._nothing), Method(self._nothing)
        self.play, self.serve = Method(self._play), Method(self._serve)

    async def _nothing(self):
        await asyncio.sleep(0)

    async def _serve(self, version, weights, digest):
        self.versions.append((version, weights))

    async def _play(self, jobs, kind):
        for task, name in jobs:
            await asyncio.sleep(0)
            if len(self.played) == self.plays:
                raise WorkerLost("its pod is gone")
            self.played.append(name)
            yield self._line(task, name)

    async def _line(self, task, name):
        return to_line(Episode(name, task.name, "agent", [1], [1], [0.0], [0], [0], 1.0, "answer"))


@pytest.fixture
def players(tmp_path, monkeypatch, inputs):
    """``players(actors)``: two places, in which these are put one after the other."""
    ray = pytest.importorskip("ray")

    def make(actors):
        left = iter(actors)
        monkeypatch.setattr(ray, "put", lambda thing: thing)
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        monkeypatch.setattr(ray, "remote", lambda kind: Method(lambda *arguments: next(left)))
        ctx = context(tmp_path, config(runtime="ray"), inputs)
        episodes = episode_settings(ctx.config, turns=1, context=64, temperature=1.0)
        return RayPlayers(ctx, episodes, None, 0), ctx

    return make


def run(players, *rounds):
    """The ids that each round gave, and those that were told on the way."""

    async def script():
        await players.open()
        told = []
        given = [[e.id for e in await players.play(jobs, "agent", lambda e: told.append(e.id))] for jobs in rounds]
        await players.close()
        return given, told

    return asyncio.run(script())


@pytest.mark.parametrize("plays", [0, 1, 2])
def test_what_a_lost_worker_had_not_given_back_is_played_by_others_and_the_rest_is_not(players, plays):
    actors = [Actor(plays), Actor(), Actor()]
    jobs = episodes_of(TASKS, 2, "s")
    made, ctx = players(actors)
    given, told = run(made, jobs, jobs)
    assert given == 2 * [[name for _, name in jobs]]
    assert sorted(told) == sorted(2 * [name for _, name in jobs])
    assert sum(len(actor.played) for actor in actors) == 12 and actors[2].played
    assert [note for note in ctx.tracker.notes() if note.startswith("rollout worker 0 was lost: its pod is gone")]


@pytest.mark.parametrize("living", [True, False])
def test_a_worker_is_lost_when_it_gives_no_sign_of_life_and_not_when_its_episodes_take_long(
    players, monkeypatch, living
):
    monkeypatch.setattr("cuda_agent.rl.ray.players.SILENCE_SECONDS", 0.4)

    class Slow(Actor):
        async def _play(self, jobs, kind):
            for _ in range(10):
                await asyncio.sleep(0.1)
                if living:
                    yield asyncio.sleep(0, "")
            async for line in super()._play(jobs, kind):
                yield line

    jobs = episodes_of(TASKS, 2, "s")
    made, ctx = players([Slow(), Actor(), Actor()])
    assert run(made, jobs)[0] == [[name for _, name in jobs]]
    assert ctx.tracker.notes() == ([] if living else ["rollout worker 0 was lost: it took too long"])


def test_a_worker_gives_a_sign_of_life_while_an_episode_takes_long(monkeypatch):
    monkeypatch.setattr("cuda_agent.rl.ray.actors.BEAT_SECONDS", 0.1)
    worker = object.__new__(RolloutWorker)
    worker._playing = set()

    class Slow:
        async def play(self, jobs, kind, on_done):
            await asyncio.sleep(0.35)
            on_done(Episode("s/a/0", "a", "agent", [1], [1], [0.0], [0], [0], 1.0, "answer"))

    worker._rollouts = Slow()

    async def script():
        return [bool(line) async for line in worker.play([], "agent")]

    lines = asyncio.run(script())
    assert lines == [False] * (len(lines) - 1) + [True] and len(lines) >= 3


def test_a_round_of_nothing_ends_at_once(players):
    assert run(players([Actor(), Actor()])[0], []) == ([[]], [])


def test_workers_that_are_lost_again_and_again_end_the_stage(players):
    made, _ = players(Actor(plays=0) for _ in range(100))
    with pytest.raises(
        TryAgain, match="7 rollout workers were lost one after the other, the last one: its pod is gone"
    ):
        run(made, episodes_of(TASKS, 2, "s"))


def test_what_goes_wrong_in_the_stage_itself_is_raised(players):
    made, _ = players([Actor(), Actor()])

    async def script():
        await made.open()
        try:
            await made.play(episodes_of(TASKS, 1, "s"), "agent", lambda episode: 1 / 0)
        finally:
            await made.close()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(script())


def test_a_worker_that_comes_late_is_given_the_newest_weights_before_it_plays(players):
    """New weights are served twice: before the worker is lost, and while another one opens."""
    opened, late = asyncio.Event(), Actor()
    late.open = Method(opened.wait)
    actors = [Actor(plays=0), Actor(), late]
    made, _ = players(actors)

    async def script():
        await made.open()
        await made.serve(ServedPolicy(1, "one", "first"))
        jobs = episodes_of(TASKS, 1, "s")
        collector = EpisodeCollector(jobs, 1)
        assert await made.collect(collector, jobs, "agent") == 1 and collector.full
        await made.serve(ServedPolicy(2, "two", "second"))
        assert len(made.living) == 1
        opened.set()
        while len(made.living) < 2:
            await asyncio.sleep(0)
        await made.close()

    asyncio.run(script())
    assert late.versions == [(2, "second")]
    assert actors[1].versions == [(1, "first"), (2, "second")]
