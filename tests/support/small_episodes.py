"""Small episodes by hand: spans follow from the pieces, so a test shows what it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.core.episode import Episode, Status, Turn
from turngym.core.task import Task, Verdict


def build_episode(
    pieces: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    number: int = 0,
    status: Status = Status.COMPLETED,
    success: bool = False,
    episode_return: float | None = None,
    group: int = 0,
    segments: Sequence[int] | None = None,
    logprobs: Sequence[Sequence[float] | None] | None = None,
    origins: Sequence[str] | None = None,
    tail: Sequence[int] = (),
) -> Episode:
    """An episode whose turn t adds prompt `pieces[t][0]` and response `pieces[t][1]` to segment `segments[t]`."""
    segments = segments or [0] * len(pieces)
    rows: list[list[int]] = [[] for _ in range(max(segments, default=0) + 1)]
    turns = []
    for index, (prompt, response) in enumerate(pieces):
        row = rows[segments[index]]
        start, middle = len(row), len(row) + len(prompt)
        row += [*prompt, *response]
        logp = logprobs[index] if logprobs else None
        more: dict[str, Any] = {"origin": origins[index]} if origins else {}
        turns.append(
            Turn(
                index=index,
                observation="",
                admissible=None,
                response="",
                action="look",
                verdict=Verdict.OK,
                reward=0.0,
                segment=segments[index],
                prompt_span=(start, middle),
                response_span=(middle, len(row)),
                logprobs=None if logp is None else np.array(logp, np.float32),
                **more,
            )
        )
    rows[-1] += list(tail)
    return Episode(
        task=Task(env_id="fake-v0", task_id=f"task/{number}", sha256="0" * 64, split="train", category="place"),
        seed=0,
        sample=0,
        group=group,
        segments=tuple(np.array(row, np.int32) for row in rows),
        turns=tuple(turns),
        status=status,
        success=success,
        episode_return=float(success) if episode_return is None else episode_return,
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`student` and `teacher`, untrained, and `other` with another vocabulary."""
    from tiny_runs import save_tiny  # torch and transformers, which most of these tests do without

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(folder / name, seed=seed)
    save_tiny(folder / "other", seed=2, words=("go to shelf 1", "<action>"))
    return folder


@pytest.fixture(scope="session")
def make_episode() -> Callable[..., Episode]:
    return build_episode


@pytest.fixture
def ragged() -> list[Episode]:
    """Two episodes: A with turns of 2 and 1 tokens (and ids after the last), B with one turn of 2 tokens."""
    a = build_episode(
        [([1, 2, 3], [10, 11]), ([4], [12])], number=0, group=7, logprobs=[[-0.5, -1.0], [-2.0]], tail=[9]
    )
    b = build_episode([([5, 6], [20, 21])], number=1, group=8, success=True)
    return [a, b]


@pytest.fixture(scope="session")
def pair() -> list[Episode]:
    """One group: A with labels 10, 11 | 12, which failed with return 0.5, and B with 20, 21, a success worth 2.5."""
    a = build_episode([([1, 2, 3], [10, 11]), ([4], [12])], number=0, group=7, episode_return=0.5)
    return [a, build_episode([([5, 6], [20, 21])], number=1, group=7, success=True, episode_return=2.5)]
