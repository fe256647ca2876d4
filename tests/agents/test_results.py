"""Results files: one schema, made again from a trace alone, compared task by task."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import breaking
from toy_evaluation import toy_evaluation

from turngym.agents import evaluate, load_world
from turngym.agents.evaluation.compare import compare_recorded, read_evaluation, rescore
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.evaluation.statistics import ScoreError, difference_bounds
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.core.episode import Episode, Status
from turngym.core.provenance import loaded_versions
from turngym.core.task import Task
from turngym.core.trace import TraceWriter, read_episodes, read_specs, read_trace
from turngym.envs.panels import Panel, collect_tasks, make_panel
from turngym.scripts import eval as eval_verb
from turngym.scripts.main import main

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "results.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def tasks(make_doors: Any) -> tuple[Task, ...]:
    return collect_tasks(make_doors()(), [f"doors/{n}" for n in (1, 2, 3, 4)])


@pytest.fixture
def panel(tasks: tuple[Task, ...]) -> Panel:
    return make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)


def rewrite(trace: Path, episodes: Sequence[Episode]) -> None:
    """Replaces the episodes of a trace, whose settings stay."""
    (spec,) = read_specs(trace).values()
    trace.unlink()
    with TraceWriter(trace, spec) as writer:
        for one in episodes:
            writer.write(one)


def check(table: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra turngym[dev]")
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(table)))


def test_a_model_s_results_obey_the_schema_and_say_their_tokens(tmp_path: Path) -> None:
    model = f"model:{load_world('alfworld').checkpoint('student')}"
    options: dict[str, Any] = {"samples": 2, "limit": 3, "max_turns": 4, "progress": False}
    result = evaluate("alfworld-quickstart", model, out=tmp_path, **options)
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    check(written)
    play = written["spec"]["play"]
    assert (play["tasks"]["panel"], play["tasks"]["size"]) == ("alfworld-quickstart-v1", 100)
    assert play["tasks"]["sampling"] == {"kind": "part", "limit": 3, "spread": True}
    assert (play["env"]["id"], play["env"]["max_turns"]) == ("turngym/ALFWorld-v0", 4)
    assert written["spec"]["agent"]["temperature"] == 0.85
    assert {"python", "turngym", "torch", "transformers", "gymnasium"} <= set(written["versions"])
    sampled = sum(len(turn.logprobs) for e in result.episodes for turn in e.turns)  # type: ignore[arg-type]
    assert written["tokens"]["response"] == sampled
    assert written["tokens"]["prompt"] + sampled == sum(len(ids) for e in result.episodes for ids in e.segments)
    again = json.loads(json.dumps(rescore(tmp_path).to_json()))
    for clock in ("date", "seconds"):
        assert written.pop(clock)
        assert again.pop(clock)
    assert again == written


def test_scripted_agents_have_no_tokens(panel: Panel, make_doors: Any) -> None:
    table = toy_evaluation(panel, make_doors(), ExpertAgent(), samples=1).run().to_json()
    check(table)
    assert table["tokens"] is None
    assert [row["turns"] for row in table["episodes"]] == [1, 2, 3, 4]


def test_only_what_is_loaded_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch" not in loaded_versions()
    assert {"python", "turngym", "numpy"} <= set(loaded_versions())


def test_seconds_go_on_over_resumes(
    panel: Panel, make_doors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves by one at every look: what earlier calls took is in the trace, and is added to."""
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr("turngym.agents.evaluation.play_panel.time.perf_counter", lambda: float(next(ticks)))
    trace = tmp_path / "t.jsonl"
    half = toy_evaluation(panel, make_doors(), RandomAgent(), samples=2, trace=trace).run()
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:5]))
    spent = max(e.timings["elapsed"] for e in read_trace(trace)[0])
    whole = toy_evaluation(panel, make_doors(), RandomAgent(), samples=2, trace=trace).run()
    assert 0 < spent <= half.seconds
    later = [e.timings["elapsed"] for e in read_trace(trace)[0]][4:]
    assert min(later) > spent
    assert whole.seconds > max(later)
    assert rescore(trace).seconds == max(later)


def test_a_trace_alone_gives_the_whole_table(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    played = toy_evaluation(
        panel, make_doors(), RandomAgent(), samples=3, limit=3, seed=5, trace=tmp_path / "trace.jsonl"
    ).run()
    again = rescore(tmp_path)
    assert again.table() == played.table()
    assert again.title == played.title == "doors-v1, first 3 tasks: 3 samples"
    assert again.spec == played.spec
    assert again.scores == played.scores
    assert [(e.task, e.sample) for e in again.episodes] == [(e.task, e.sample) for e in played.episodes]
    assert again.missing == 0
    lines = (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:40])
    cut = rescore(tmp_path / "cut.jsonl")
    assert (cut.missing, len(cut.problems), cut.scores.overall.episodes) == (1, 1, 8)


def test_of_an_episode_that_was_played_again_the_good_one_counts(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    trace, make, calls = tmp_path / "trace.jsonl", make_doors(), iter(range(1000))
    flaky = breaking(make, lambda env: next(calls) == 0)
    broken = toy_evaluation(panel, flaky, ExpertAgent(), samples=1, trace=trace).run()
    assert broken.scores.errors == 1
    check(broken.to_json())
    healed = toy_evaluation(panel, make, ExpertAgent(), samples=1, trace=trace).run()
    assert rescore(trace).scores == healed.scores
    assert rescore(trace).scores.errors == 0


def test_a_trace_of_two_evaluations_is_not_scored(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    for agent in (ExpertAgent(), RandomAgent()):
        toy_evaluation(panel, make_doors(), agent, samples=1, trace=tmp_path / f"{agent.name}.jsonl").run()
    lines = [(tmp_path / f"{name}.jsonl").read_bytes() for name in ("expert", "random")]
    (tmp_path / "both.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(EvaluationError, match=r"more than one evaluation \(.*name 'expert' and 'random'"):
        rescore(tmp_path / "both.jsonl")
    with pytest.raises(EvaluationError, match="there is no trace"):
        rescore(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(EvaluationError, match="does not begin with the settings"):
        rescore(tmp_path / "empty.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(lines[0].splitlines(keepends=True)[0])
    with pytest.raises(EvaluationError, match="holds no episodes"):
        rescore(tmp_path / "empty.jsonl")


def test_differences_are_paired_by_task(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    """Doors of even number are won in 2 and 4 turns; three turns let the expert fail at doors/4 alone."""
    for name, turns in (("short", 3), ("long", 10)):
        make = make_doors(max_turns=turns)
        result = toy_evaluation(
            panel, make, ExpertAgent(), samples=2, trace=tmp_path / name / "trace.jsonl", max_turns=turns
        ).run()
        (tmp_path / f"{name}.json").write_text(json.dumps(result.to_json()))
    with pytest.raises(ScoreError, match=r"max_turns 3 and 10\).*--different-settings"):
        compare_recorded(tmp_path / "short", tmp_path / "long")
    anyway = partial(compare_recorded, different_settings=True)
    found = anyway(tmp_path / "short", tmp_path / "long")
    rows = [(row.name, row.first.mean, row.second.mean, row.difference) for row in found.rows]
    assert [(*row[:3], row[3].mean, row[3].tasks) for row in rows] == [
        ("even", 0.5, 1.0, 0.5, 2),
        ("odd", 1.0, 1.0, 0.0, 2),
        ("all", 0.75, 1.0, 0.25, 4),
    ]
    assert found.rows[2].difference.low == difference_bounds([0.0, 0.0, 0.0, 1.0])[0]
    assert found.differ == {"play.env.max_turns": (3, 10)}
    assert "max_turns differs: 3 and 10" in str(found)
    # the expert says the same in both, but is cut off at doors/4
    assert found.notes()[-1] == "6 of 8 episodes are the same to the token"
    again = anyway(tmp_path / "short.json", tmp_path / "long" / "trace.jsonl")
    assert (again.rows, again.differ, again.shared) == (found.rows, found.differ, 0)
    assert compare_recorded(tmp_path / "long", tmp_path / "long").differ == {}


def test_a_comparison_says_that_episodes_are_there_twice(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    """Traces that were joined: which of two episodes counts changes the numbers."""
    trace = tmp_path / "trace.jsonl"
    toy_evaluation(panel, make_doors(), ExpertAgent(), samples=1, trace=trace).run()
    head, *lines = trace.read_text().splitlines(keepends=True)
    joined = tmp_path / "joined.jsonl"
    joined.write_text(head + "".join(lines) + lines[0])
    notes = compare_recorded(trace, joined).notes()
    assert [note for note in notes if note.startswith(("first", "second"))] == [
        f"second: {note}" for note in rescore(joined).notes() if "more than once" in note
    ]
    assert compare_recorded(trace, trace).notes() == ["4 of 4 episodes are the same to the token"]


def test_a_setting_that_changes_nothing_is_said(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    def play(name: str, turns: int, agent: Any) -> Path:
        trace = tmp_path / name / "trace.jsonl"
        toy_evaluation(panel, make_doors(max_turns=turns), agent, samples=2, trace=trace, max_turns=turns).run()
        return trace

    few, many, other = play("few", 10, ExpertAgent()), play("many", 20, ExpertAgent()), play("other", 20, RandomAgent())
    nothing = "yet all 8 episodes are the same to the token: what differs changed nothing"
    found = compare_recorded(few, many, different_settings=True)
    assert found.notes() == ["play.env.max_turns differs: 10 and 20", nothing]
    with pytest.raises(ScoreError, match=f"played otherwise.*{nothing}"):
        compare_recorded(few, many)
    with pytest.raises(ScoreError, match=r"played otherwise.*different_settings=True\)$"):
        compare_recorded(few, other)
    differing = compare_recorded(many, other)
    assert differing.same < differing.shared == 8


def test_other_tasks_are_not_compared(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    for limit in (3, 4):
        toy_evaluation(
            panel, make_doors(), ExpertAgent(), samples=1, limit=limit, trace=tmp_path / f"{limit}.jsonl"
        ).run()
    with pytest.raises(ScoreError, match=r"doors/4 \(play\.tasks\.sampling\.kind differs|doors/4 .*sampling"):
        compare_recorded(tmp_path / "3.jsonl", tmp_path / "4.jsonl")
    table = rescore(tmp_path / "4.jsonl").to_json()
    table["episodes"][0]["sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(table))
    with pytest.raises(ScoreError, match=r"doors/1 has sha256 .* 000000000000 in the second"):
        compare_recorded(tmp_path / "4.jsonl", tmp_path / "other.json")
    (tmp_path / "old.json").write_text('{"panel": "doors-v1"}')
    with pytest.raises(EvaluationError, match=r"old\.json is no results file of this turngym"):
        read_evaluation(tmp_path / "old.json")


@pytest.mark.parametrize(
    "broken",
    [
        *(lambda whole, part=part: whole | part for part in ({"spec": 3}, {"version": 2}, {"episodes": 3})),
        lambda whole: whole | {"episodes": [whole["episodes"][0] | {"success": 1}]},
    ],
)
def test_a_results_file_of_another_kind_is_refused_in_one_line(
    broken: Callable[[Any], Any], panel: Panel, make_doors: Any, tmp_path: Path
) -> None:
    whole = toy_evaluation(panel, make_doors(), ExpertAgent(), samples=1).run().to_json()
    (tmp_path / "a.json").write_text(json.dumps(broken(whole)))
    with pytest.raises(EvaluationError, match=r"a\.json [^\n]+$"):
        read_evaluation(tmp_path / "a.json")


def test_two_results_files_are_compared(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    whole = toy_evaluation(panel, make_doors(), ExpertAgent(), samples=1).run().to_json()
    whole["episodes"][0] |= {"turns": 4, "invalid": 1}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    found = read_evaluation(tmp_path / "a.json")
    assert (found.outcomes[0].turns, found.outcomes[0].invalid) == (4, 1)
    assert compare_recorded(tmp_path / "a.json", tmp_path / "a.json").rows[-1].difference.mean == 0


def test_the_verb_rescores_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--panel", "alfworld-quickstart", "--samples", "1", "--limit", "12"]
    assert eval_verb.main([*words, "--out", str(tmp_path / "a")]) == 0
    played = capsys.readouterr().out
    assert eval_verb.main([*words, "--max-turns", "2", "--out", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert eval_verb.main(["--rescore", str(tmp_path / "a"), "--out", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out == played
    check(json.loads((tmp_path / "c" / "results.json").read_text()))
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "were played otherwise (max_turns 24 and 2)" in capsys.readouterr().err
    assert eval_verb.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--different-settings"]) == 0
    out = capsys.readouterr().out
    assert "-100.0 [-100.0, " in out
    assert "play.env.max_turns differs: 24 and 2" in out
    for pair, worse in (("ab", 1), ("ba", 0), ("aa", 0)):
        folders = [str(tmp_path / name) for name in pair]
        words = ["--compare", *folders, "--different-settings", "--fail-if-worse", "0"]
        assert eval_verb.main(words) == worse
        assert f"the second is {'' if worse else 'not '}clearly worse" in capsys.readouterr().out
    assert main(["eval", "--rescore", str(tmp_path), "--panel", "alfworld-quickstart"]) == 2
    assert "--rescore plays nothing" in capsys.readouterr().err
    assert main(["eval"]) == 2
    assert "given is none" in capsys.readouterr().err


def test_errors_up_to_a_number_are_borne(
    panel: Panel, make_doors: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    toy_evaluation(panel, make_doors(), ExpertAgent(), samples=2, trace=trace).run()
    episodes = list(read_episodes(trace))
    broken = [replace(one, status=Status.ERROR_ENGINE) if place == 0 else one for place, one in enumerate(episodes)]
    rewrite(trace, broken)
    assert main(["eval", "--rescore", str(trace)]) == 1
    assert main(["eval", "--rescore", str(trace), "--max-errors", "1"]) == 0
    said = capsys.readouterr().out
    # the expert wins all; of the four tasks one has an episode of two less
    assert "errors lost, won %" in said
    assert "87.5, 100.0" in said
    assert main(["eval", "--rescore", str(trace), "--max-errors", "-1"]) == 2
    assert "--max-errors" in capsys.readouterr().err


def test_graded_scores_are_compared_too(panel: Panel, make_doors: Any, tmp_path: Path) -> None:
    for name, value in (("first", 0.25), ("second", 0.75)):
        trace = tmp_path / name / "trace.jsonl"
        result = toy_evaluation(panel, make_doors(), ExpertAgent(), samples=1, trace=trace).run()
        graded = [replace(one, score=value) for one in read_episodes(trace)]
        rewrite(trace, graded)
        table = result.to_json()
        for row in table["episodes"]:
            row["score"] = value
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    for suffix in ("", ".json"):
        found = compare_recorded(tmp_path / f"first{suffix}", tmp_path / f"second{suffix}").rows[-1]
        assert (found.name, found.difference.mean, found.first.mean) == ("score", 0.5, 0.25)
        # all are won in both: the score alone falls
        fallen = compare_recorded(tmp_path / f"second{suffix}", tmp_path / f"first{suffix}")
        (*others, last) = fallen.rows
        clear = replace(fallen, rows=(*others, replace(last, difference=replace(last.difference, high=-0.3))))
        assert clear.worse_by(29)
        assert not clear.worse_by(31)
