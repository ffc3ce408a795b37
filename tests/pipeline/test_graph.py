"""The graph's variants: which stages they have, what those start from, and which cache keys they share."""

from typing import get_args

import pytest

from cuda_agent.cluster import pod
from cuda_agent.cluster.submit import views
from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.pipeline import manifest
from cuda_agent.pipeline.graph import GRAPHS, ROWS, Stage, check, stages_of, without
from cuda_agent.pipeline.schedule import derived

TABLE = (
    Stage("one", "m", outputs=("x",)),
    Stage("two", "m", inputs={"x": "one.x"}, outputs=("x",)),
    Stage("three", "m", inputs={"x": "two.x | one.x", "extra": "two.x?"}, outputs=("y",)),
)


def inputs_of(graph, name):
    return next(stage.inputs for stage in GRAPHS[graph] if stage.name == name)


def test_an_input_comes_from_the_first_source_that_is_made():
    full, less = without(TABLE, ()), without(TABLE, ["two"])
    assert full[2].inputs == {"x": "two.x", "extra": "two.x"} and full[2].upstream == ("two",)
    assert [stage.name for stage in less] == ["one", "three"] and less[1].inputs == {"x": "one.x"}
    assert TABLE[2].upstream == ("two", "one"), "of every graph"


def test_a_graph_without_something_necessary_is_refused():
    with pytest.raises(ValueError, match=r"stage two: no stage of this graph makes one\.x"):
        without(TABLE, ["one"])
    with pytest.raises(ValueError, match="there is no stage four"):
        without(TABLE, ["four"])


def test_every_value_of_the_key_is_a_sound_graph():
    assert set(GRAPHS) == set(get_args(Config.model_fields["graph"].annotation))
    check(ROWS)
    for name, graph in GRAPHS.items():
        check(graph)
        assert all("|" not in source and "?" not in source for stage in graph for source in stage.inputs.values())
        assert graph[-1].name == "report" and stages_of(Config(graph=name)) == graph


def test_every_row_is_in_a_graph_and_the_report_reads_every_evaluation():
    assert {row.name for row in ROWS} == {stage.name for graph in GRAPHS.values() for stage in graph}
    for graph in GRAPHS.values():
        scored = {stage.name.removeprefix("evaluate-") for stage in graph if stage.name.startswith("evaluate-")}
        assert {f"scores-{policy}" for policy in scored} == {i for i in graph[-1].inputs if i.startswith("scores-")}
        assert all(stage.about for stage in graph if stage.name.startswith("evaluate-"))


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_schedule_has_the_stages_of_the_run_and_no_other(graph):
    config = Config(graph=graph)
    wanted = [stage.name for stage in stages_of(config) if stage.name != "report"]
    assert list(derived(config)["stages"]) == wanted


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_stage_that_two_graphs_share_has_one_cache_key(graph, monkeypatch):
    monkeypatch.setattr(manifest, "_device", lambda stage, config: "here")
    full = {stage.name: stage for stage in GRAPHS["full"]}
    for stage in GRAPHS[graph]:
        if stage.name in full and stage.name != "report":
            digests = dict.fromkeys(stage.inputs, "digest")
            key = manifest.identify(stage, Config(graph=graph), digests).key
            same = stage.inputs == full[stage.name].inputs
            other = manifest.identify(full[stage.name], Config(), dict.fromkeys(full[stage.name].inputs, "digest")).key
            assert key == other or not same


def test_other_contents_of_a_task_set_make_another_cache_key(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_device", lambda stage, config: "here")
    (stage,) = [row for row in GRAPHS["full"] if row.name == "synthesis"]
    given, unlike = tmp_path / "tasks.parquet", tmp_path / "KernelBench"
    (unlike / "level1").mkdir(parents=True)

    def key() -> str:
        sets = Config().synthesis.model_copy(update={"tasks": str(given), "evaluation_set": str(unlike)})
        return manifest.identify(stage, Config(synthesis=sets), {}).key

    keys = [key()]
    given.write_bytes(b"one")
    keys.append(key())
    assert key() == keys[-1]
    given.write_bytes(b"two")
    keys.append(key())
    (unlike / "level1" / "1_relu.py").write_text("pass")
    keys.append(key())
    assert len(set(keys)) == 4


def test_a_workflow_shows_the_stages_of_its_own_graph():
    parameters = [{"name": row.name, "value": "absent" if row.name in ("rft", "critic") else "run"} for row in ROWS]
    node = {"displayName": "prepare", "type": "Pod", "phase": "Succeeded", "outputs": {"parameters": parameters}}
    shown = [view.name for view in views({"status": {"nodes": {"p": node}}})]
    assert shown == ["prepare", *(row.name for row in ROWS if row.name not in ("rft", "critic")), "finish"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_clusters_plan_names_every_row_and_leaves_out_what_the_graph_does(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_AGENT_WEBHOOK", raising=False)
    text, sha256 = freeze(Config(graph=graph))
    (tmp_path / "config.json").write_text(text)
    here = pod.PodEnvironment(str(tmp_path / "store"), "off", tmp_path / "config.json", tmp_path / "plan", tmp_path)
    plan = pod.prepare(here, "a", sha256, "a", None, [])
    there = {stage.name for stage in GRAPHS[graph]}
    assert {row.name: plan[row.name] for row in ROWS} == {
        row.name: "run" if row.name in there else "absent" for row in ROWS
    }
    assert (here.plan / "evaluate-one-shot").read_text() == ("run" if graph == "one_shot" else "absent")
