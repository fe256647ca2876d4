"""What reads traces and metrics holds a little of each episode, whatever was said in it; and the bench that says so."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import growth as bench
import growth_measures as made
import pytest
from growth import Cell, Measure, growth, slope, verdicts

from turngym.agents.evaluation.compare import rescore as rescored
from turngym.agents.evaluation.play_panel import EvalResult, evaluate_tasks
from turngym.agents.evaluation.scores import Outcomes, score
from turngym.envs.core import trace as traces
from turngym.envs.core.episode import Episode, Status
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import write_json
from turngym.envs.core.trace import TraceEpisodes, TraceWriter, episode_to_json, iter_places, read_trace
from turngym.scripts import report, trace
from turngym.trainers.metrics import MetricsLog, iter_metrics, read_metrics, table

FEW, MANY = 200, 2200
MOST = 400
"""Bytes of an episode that may stay in memory; its line has 3,100."""


def growth_of(work: Callable[[int], object]) -> float:
    """Bytes by which the peak of `work(episodes)` grows for each episode more."""
    peaks = []
    for size in (FEW, MANY):
        work(FEW // 10)  # what is made once
        tracemalloc.start()
        try:
            work(size)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return (peaks[1] - peaks[0]) / (MANY - FEW)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("traces")

    def of(size: int) -> Path:
        if not (folder / str(size)).exists():
            (folder / str(size)).mkdir()
            made.make_trace(folder / str(size), size)
        return folder / str(size) / made.TRACE

    for size in (FEW // 10, FEW, MANY):
        of(size)
    return of


def resumed(path: Path, size: int) -> EvalResult:
    agent: Any = made._Nobody()
    return evaluate_tasks(
        made.tasks(size), agent, agent, samples=made.SAMPLES, temperature=made.TEMPERATURE, trace=path
    )


@pytest.mark.long
def test_reading_holds_little_of_each_episode(recorded: Callable[[int], Path], tmp_path: Path) -> None:
    def html(size: int) -> None:
        assert trace.main(["html", str(recorded(size)), "--out", str(tmp_path / "page.html"), "--overwrite"]) == 0

    def evaluation(size: int) -> None:
        result = resumed(recorded(size), size)
        assert len(result.outcomes) == result.resumed == size
        result.write(tmp_path / "results.json")

    works: dict[str, Callable[[int], object]] = {
        "report": lambda size: report.main([str(recorded(size))]),
        "html": html,
        "evaluation": evaluation,
        "rescored": lambda size: rescored(recorded(size)),
    }
    grown = {name: growth_of(work) for name, work in works.items()}
    assert all(each < MOST for each in grown.values()), grown


@pytest.mark.long
def test_a_whole_list_would_be_noticed(recorded: Callable[[int], Path]) -> None:
    assert growth_of(lambda size: read_trace(recorded(size))) > 5 * MOST


def test_each_line_is_read_once(recorded: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def counting(line: str) -> Episode:
        lines.append(line)
        return parse(line)

    parse = traces.episode_from_json
    monkeypatch.setattr(traces, "episode_from_json", counting)
    for work in (lambda: resumed(recorded(FEW), FEW), lambda: rescored(recorded(FEW))):
        lines.clear()
        result = work()
        str(result)
        assert len(lines) == FEW
        assert [episode.sample for episode in result.episodes][:: FEW // 4] == [0, 1, 2, 3]
        assert len(lines) == 2 * FEW


def test_results_are_written_as_before(recorded: Callable[[int], Path], tmp_path: Path) -> None:
    result = resumed(recorded(FEW), FEW)
    head = {**result.to_json(), "date": ""}
    result.write(tmp_path / "streamed.json")
    streamed = json.loads((tmp_path / "streamed.json").read_text())
    assert {**streamed, "date": ""} == json.loads(json.dumps(head))
    write_json(tmp_path / "whole.json", {**head, "date": streamed["date"]})
    assert (tmp_path / "streamed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert [row["task_id"] for row in streamed["episodes"]] == [e.task.task_id for e in result.episodes]


def test_episodes_are_found_again(recorded: Callable[[int], Path], tmp_path: Path) -> None:
    path = recorded(FEW // 10)
    places = [place for place, _ in iter_places(path)]
    episodes = TraceEpisodes(path, places)
    whole = [episode_to_json(episode) for episode in read_trace(path)[0]]
    assert [episode_to_json(episode) for episode in episodes] == whole
    assert episode_to_json(episodes[-1]) == whole[-1]
    assert [episode_to_json(episode) for episode in episodes[2:4]] == whole[2:4]
    copy = tmp_path / "trace.jsonl"
    copy.write_bytes(path.read_bytes() + b'{"torn')
    with TraceWriter(copy) as writer:
        place = writer.write(episodes[3])
    assert episode_to_json(TraceEpisodes(copy, [place])[0]) == whole[3]
    copy.write_bytes(b"")
    with pytest.raises(TurngymError, match="has changed since"):
        TraceEpisodes(copy, [place])[0]


def test_outcomes_keep_what_scores_need() -> None:
    played = [made.episode(task, number, sample) for number, task in enumerate(made.tasks(40)) for sample in range(4)]
    failed = replace(played[0], status=Status.ERROR_ENV, success=False)
    every = Outcomes.of([failed, *played, failed])
    assert every.latest().tolist().count(1) == 1, "an error never takes the place of what was played"
    chosen = every.take(every.latest())
    assert score(chosen) == score(played)
    assert score(every).errors == 2
    assert [(o.task, o.sample, o.depth, o.response_tokens) for o in chosen] == [
        (e.task, e.sample, e.depth, sum(turn.response_length for turn in e.turns)) for e in played
    ]
    assert sum(map(len, chosen.categories().values())) == len(played)
    assert {chosen[place].task.category for place in chosen.categories()["heat"].tolist()} == {"heat"}
    (first,) = chosen.played()
    assert first == (0, 0, {"agent": made.AGENT, "temperature": made.TEMPERATURE})


@pytest.mark.long
def test_metrics_are_cut_and_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(size: int) -> None:
        made.make_run(tmp_path, size)
        MetricsLog(tmp_path).truncate(size - 1, size)
        assert len(table(tmp_path, "train", ("step", "loss"))) == size - 1
        assert next(iter_metrics(tmp_path))["step"] == 1

    assert growth_of(work) < MOST
    work(30)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 30))


def cells(*points: tuple[int, float, float]) -> list[Cell]:
    return [Cell(size=size, cpu_s=cpu, peak_mb=mb, added_mb=0.0) for size, cpu, mb in points]


def measure(**more: Any) -> Measure:
    return Measure(name="m", per="things", sizes=(1, 2), full=(1, 2), open=lambda folder, size: lambda: None, **more)


def test_squares_are_called_so() -> None:
    square = growth(measure(), cells((10, 1.0, 50), (100, 100.0, 50), (1000, 10_000.0, 50)))
    assert square.exponent == pytest.approx(2.0)
    assert verdicts(measure(), square) == ("NOT linear", "flat")
    late = growth(measure(), cells((10, 1.0, 50), (100, 1.0, 50), (1000, 100.0, 60)))
    assert late.exponent < 1.2 < late.last, "what fixed costs hide in the fit shows at the end"
    assert not late.time_ok
    assert growth(measure(power=2.0), cells((10, 1.0, 50), (100, 100.0, 50))).time_ok
    assert not growth(measure(power=0.0), cells((10, 1.0, 50), (100, 3.0, 50))).time_ok
    assert slope(cells((1, 2.0, 0), (10, 20.0, 0))) == pytest.approx(1.0)


def test_memory_is_flat_or_held_or_neither() -> None:
    grown = cells((10, 1.0, 50), (100, 10.0, 60), (1000, 100.0, 160))
    found = growth(measure(), grown)
    assert verdicts(measure(), found) == ("linear", "NOT flat: 1.1e+02 kB each")
    assert verdicts(measure(holds="rows"), growth(measure(holds="rows"), grown))[1] == "linear: rows"
    square = cells((10, 1.0, 50), (100, 10.0, 60), (1000, 100.0, 1050))
    assert verdicts(measure(holds="rows"), growth(measure(holds="rows"), square))[1] == "NOT linear"


@pytest.mark.long
def test_the_bench_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--only", "trace verify", "panel read", "--sizes", "20", "200", "--json", str(tmp_path / "g.json")]
    assert bench.main(argv) in (0, 1)
    assert "200 episodes" in capsys.readouterr().out
    found = json.loads((tmp_path / "g.json").read_text())
    assert [cell["size"] for cell in found["trace verify"]["cells"]] == [20, 200]
    assert found["trace verify"]["cells"][0]["peak_mb"] > 10
    with pytest.raises(TurngymError, match="Did you mean 'report'"):
        bench.main(["--only", "reprot"])
