"""What reads traces and metrics holds a little of each episode, whatever was said in it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_evaluation import toy_spec

from turngym.agents.evaluation.compare import rescore as rescored
from turngym.agents.evaluation.open_play import record_of
from turngym.agents.evaluation.play_panel import EvalResult, RecordedEpisodes, TaskEvaluation
from turngym.agents.evaluation.scores import score
from turngym.agents.play_spec import EvalSpec, Own
from turngym.agents.playing.agent import ResponseWriter
from turngym.core import trace as traces
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.task import Task, Verdict
from turngym.core.trace import (
    TraceEpisodes,
    TraceWriter,
    digits_of,
    episode_to_json,
    header_line,
    iter_places,
    read_trace,
)
from turngym.core.whole_files import write_json
from turngym.scripts import report, trace
from turngym.trainers.metrics import MetricsLog, iter_metrics, read_metrics

FEW, MANY = 200, 2200
MOST = 1000
"""Bytes of an episode that may stay in memory; its line has 3,100."""
SAMPLES, TURNS, IDS = 4, 4, 8
"""Of each task, of each episode, of each response."""
KINDS = ("place", "look", "clean", "heat", "cool", "two")
AGENT, TEMPERATURE = "made-up", 0.85


def tasks(size: int) -> list[Task]:
    """The tasks that `size` made-up episodes play."""
    return [
        Task(env_id="bench/Text-v0", task_id=f"bench/{n}", sha256=f"{n:064x}", split="eval", category=KINDS[n % 6])
        for n in range(max(size // SAMPLES, 1))
    ]


def episode(task: Task, number: int, sample: int) -> Episode:
    """A short episode with ids and log-probabilities; what happens in it depends on `number`."""
    rng, prompt = np.random.default_rng((number, sample)), 24
    step = prompt + IDS
    turns = tuple(
        Turn(
            index=t,
            observation=f"You arrive at shelf {number % 97}. On the shelf {number % 97}, you see a cup {t}.",
            admissible=("look", f"go to shelf {t}", f"take cup {t} from shelf {number % 97}", "inventory"),
            response=f"<action>take cup {t} from shelf {number % 97}</action>",
            action=f"take cup {t} from shelf {number % 97}",
            verdict=Verdict.OK,
            reward=0.0,
            prompt_span=(t * step, t * step + prompt),
            response_span=(t * step + prompt, (t + 1) * step),
            logprobs=rng.normal(-1, 0.5, IDS).astype(np.float32),
        )
        for t in range(TURNS)
    )
    won = number % 3 == 0
    return Episode(
        task=task,
        seed=0,
        sample=sample,
        group=number,
        segments=(rng.integers(0, 600, TURNS * step).astype(np.int32),),
        turns=turns,
        status=Status.COMPLETED if won else Status.TRUNCATED_TURNS,
        success=won,
        episode_return=float(won),
        score=float(won),
        system="Interact with a household to solve a task.",
        final_observation="You won." if won else "",
        timings={"env": 0.001, "elapsed": 0.01 * number},
        meta={"agent": AGENT, "temperature": TEMPERATURE, "goal_rate": float(won)},
    )


def spec(size: int) -> EvalSpec:
    return toy_spec(tasks(size), Own(name=AGENT, temperature=TEMPERATURE), samples=SAMPLES)


def make_trace(folder: Path, size: int) -> None:
    """`size` episodes (whole tasks) as an evaluation writes them."""
    record = record_of(spec(size))
    digits = digits_of(record)
    with (folder / "trace.jsonl").open("w", encoding="ascii") as file:
        file.write(header_line(record).decode())
        for number, task in enumerate(tasks(size)):
            for sample in range(SAMPLES):
                file.write(episode_to_json(replace(episode(task, number, sample), spec=digits)) + "\n")


class Nobody:
    """Who would play what is missing."""

    name = AGENT
    writer = ResponseWriter()

    def respond(self, waiting: Any) -> Any:
        raise AssertionError("nothing is missing")

    def __call__(self, *spec: Any) -> Any:
        raise AssertionError("nothing is missing")


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
            make_trace(folder / str(size), size)
        return folder / str(size) / "trace.jsonl"

    for size in (FEW // 10, FEW, MANY):
        of(size)
    return of


def resumed(path: Path, size: int) -> EvalResult:
    agent: Any = Nobody()
    return TaskEvaluation(spec=spec(size), tasks=tasks(size), make_env=agent, agent=agent, trace=path).run()


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


@pytest.mark.long
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


def test_an_error_never_takes_the_place_of_what_was_played() -> None:
    played = [episode(task, number, sample) for number, task in enumerate(tasks(40)) for sample in range(4)]
    failed = replace(played[0], status=Status.ERROR_ENV, success=False)
    recorded = RecordedEpisodes()
    for one in (failed, *played, failed):
        recorded.add(one, None)
    chosen = recorded.outcomes()
    assert score(chosen) == score(played)
    assert score([failed, *played, failed]).errors == 2
    first = [(one.task.task_id, one.sample, one.turns, one.response_tokens) for one in chosen if one.sample == 0]
    assert first == [
        (e.task.task_id, 0, e.depth, sum(turn.response_length for turn in e.turns)) for e in played if e.sample == 0
    ]


@pytest.mark.long
def test_metrics_are_cut_and_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(size: int) -> None:
        with (tmp_path / "metrics.jsonl").open("w", encoding="ascii") as file:
            for step in range(1, size + 1):
                by_turn = {name: [0.5] * 30 for name in ("turn/kl", "turn/survivors", "turn/tokens")}
                file.write(json.dumps({"step": step, "kind": "train", "loss": 0.1, **by_turn}) + "\n")
        MetricsLog(tmp_path).truncate(size - 1, size)
        assert sum(row["kind"] == "train" for row in iter_metrics(tmp_path)) == size - 1
        assert next(iter_metrics(tmp_path))["step"] == 1

    assert growth_of(work) < MOST
    work(30)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 30))
