"""Measures over the episodes of a trace: what reads traces, and an evaluation that goes on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.task import Task, Verdict
from turngym.envs.core.trace import episode_to_json
from turngym.scripts.bench.growth.measure import Measure, Work

SAMPLES, TURNS, IDS = 4, 4, 8
"""Of each task, of each episode, of each response."""
KINDS = ("place", "look", "clean", "heat", "cool", "two")
AGENT, TEMPERATURE = "made-up", 0.85
TRACE = "trace.jsonl"


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


def make_trace(folder: Path, size: int) -> None:
    """`size` episodes (whole tasks) as an evaluation writes them."""
    with (folder / TRACE).open("w", encoding="ascii") as file:
        for number, task in enumerate(tasks(size)):
            for sample in range(SAMPLES):
                file.write(episode_to_json(episode(task, number, sample)) + "\n")


def _quietly(verb: Callable[[Sequence[str]], int], *words: str) -> Work:
    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert verb(words) == 0, words

    return work


def _warm(folder: Path) -> Path:
    """A few episodes, with which what is imported late is imported before it is measured."""
    warm = folder / "warm"
    warm.mkdir(exist_ok=True)
    make_trace(warm, SAMPLES)
    return warm


def open_report(folder: Path, size: int) -> Work:
    from turngym.scripts import report

    _quietly(report.main, str(_warm(folder) / TRACE))()
    return _quietly(report.main, str(folder / TRACE))


def open_trace(folder: Path, size: int, *words: str) -> Work:
    """`turngym trace` with `words`, into a new file."""
    from turngym.scripts import trace

    out = folder / "out"

    def work(folder: Path) -> None:
        written = ("--out", str(out)) if words[0] != "verify" else ()
        _quietly(trace.main, words[0], str(folder / TRACE), *written, *words[1:])()
        out.unlink(missing_ok=True)

    out.unlink(missing_ok=True)
    work(_warm(folder))
    return lambda: work(folder)


def open_view(folder: Path, size: int) -> Work:
    """The index, a page of the list sorted otherwise, and one episode."""
    from turngym.scripts.trace_pages import create_app, index_trace

    def work(folder: Path) -> None:
        client = create_app({"run": index_trace(folder / TRACE)}).test_client()
        for address in ("rows?sort=turns&count=100", "episode?at=0"):
            assert client.get(f"/api/{address}").status_code == 200

    work(_warm(folder))
    return lambda: work(folder)


class _Nobody:
    """Who would play what is missing."""

    name = AGENT

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("nothing is missing")


def open_resume(folder: Path, size: int) -> Work:
    """An evaluation whose episodes are all there, and its results file."""
    from turngym.agents.evaluation.play_panel import evaluate_tasks

    def work(folder: Path, size: int) -> None:
        agent: Any = _Nobody()
        result = evaluate_tasks(
            tasks(size), agent, agent, samples=SAMPLES, temperature=TEMPERATURE, trace=folder / TRACE
        )
        assert result.resumed == len(result.outcomes) == SAMPLES * max(size // SAMPLES, 1)
        result.write(folder / "results.json")
        (folder / "results.json").unlink()

    work(_warm(folder), SAMPLES)
    return lambda: work(folder, size)


def open_rescore(folder: Path, size: int) -> Work:
    from turngym.agents.evaluation.compare import rescore

    return lambda: rescore(folder / TRACE)


EPISODES: dict[str, Any] = {
    "per": "episodes",
    "sizes": (1000, 10_000),
    "full": (1000, 10_000, 100_000),
    "make": make_trace,
    "shared": "trace",
}
ROW = "how each one ended"
"""200 to 300 bytes, ids of tasks included; an episode has 3,100 in its file."""
MEASURES = (
    Measure(name="report", open=open_report, needs="torch", holds=ROW, **EPISODES),
    Measure(name="trace html", open=lambda folder, size: open_trace(folder, size, "html"), **EPISODES),
    Measure(name="trace view", open=open_view, needs="flask", holds=ROW, **EPISODES),
    Measure(
        name="trace parquet", open=lambda folder, size: open_trace(folder, size, "parquet"), needs="pyarrow", **EPISODES
    ),
    Measure(
        name="trace parquet of trajectories",
        open=lambda folder, size: open_trace(folder, size, "parquet", "--rows", "trajectories"),
        needs="pyarrow",
        **EPISODES,
    ),
    Measure(name="trace verify", open=lambda folder, size: open_trace(folder, size, "verify"), **EPISODES),
    Measure(name="eval resumed", open=open_resume, holds=ROW, **EPISODES),
    Measure(name="eval rescored", open=open_rescore, holds=ROW, **EPISODES),
)
