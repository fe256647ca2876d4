"""`turngym trace` keeps the settings that a trace begins with: filtered, joined and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.agents import evaluate
from turngym.agents.evaluation.compare import rescore
from turngym.agents.play_spec import Listed
from turngym.core.trace import read_specs, read_trace
from turngym.scripts import trace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    evaluate("alfworld-quickstart", "random", samples=2, limit=3, max_turns=3, out=folder, progress=False)
    return folder / "trace.jsonl"


def test_what_is_left_is_listed_and_scored(run: Path, tmp_path: Path) -> None:
    episodes = read_trace(run)[0]
    kept = [one for one in episodes if one.task == episodes[0].task]
    out = tmp_path / "left.jsonl"
    assert trace.main(["filter", str(run), "--task", kept[0].task.task_id, "--out", str(out)]) == 0
    result = rescore(out)
    assert result.spec.play.tasks == Listed(task=(kept[0].task.task_id,))
    assert (result.spec.play.samples, len(result.outcomes), result.missing) == (2, 2, 0)
    assert [one.turns for one in read_trace(out)[0]] == [one.turns for one in kept]
    assert trace.main(["filter", str(run), "--limit", "3", "--out", str(tmp_path / "first.jsonl")]) == 0
    assert rescore(tmp_path / "first.jsonl").spec.play.samples == 1


def test_joined_files_keep_the_settings_of_each(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("alfworld-quickstart", "expert", samples=1, limit=1, out=tmp_path / "other", progress=False)
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(run.read_bytes() + (tmp_path / "other" / "trace.jsonl").read_bytes())
    assert trace.main(["filter", str(joined), "--out", str(tmp_path / "left.jsonl")]) == 0
    for path in (joined, tmp_path / "left.jsonl"):
        episodes, problems = read_trace(path)
        assert (len(episodes), problems, len(read_specs(path))) == (7, [], 2)
        assert {one.spec for one in episodes} == read_specs(path).keys()
        capsys.readouterr()
        assert trace.main(["verify", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: 9 lines are whole\n"


def test_damaged_settings_are_a_damaged_line(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(run.read_bytes().replace(b'"samples":2', b'"samples":3', 1))
    assert trace.main(["verify", str(path)]) == 1
    episodes, problems = read_trace(path)
    assert (len(episodes), [problem.line for problem in problems]) == (6, [1])
