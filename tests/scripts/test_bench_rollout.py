"""`turngym bench rollout` on a toy size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from turngym.scripts.bench_rollout import HEADER, main, played_row


@pytest.mark.long
def test_whole_rollouts_by_environments_turns_engine_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--episodes", "3", "--slots", "1", "3", "--depths", "1", "3", "--repeats", "1", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 episodes have the ids of this process's" in out
    for line in (
        *("kept keys and values, 3 environments, 3 turns", "kept keys and values, 1 environments, 3 turns"),
        *("kept keys and values, 3 environments, 1 turns", "recompute, 3", "expert (no model), 3", "1 processes, 3"),
    ):
        assert line in out
    assert "1.00x" in out


def test_a_row_by_hand() -> None:
    """Two episodes of 2 and 1 turns with 2 ids each; histories of 6 and 1 ids; 0.5 s in environments of 2 workers."""
    turns = [SimpleNamespace(response_length=2, prompt_span=(0, end)) for end in (1, 6, 1)]
    played: list[Any] = [SimpleNamespace(turns=turns[:2], timings={"env": 0.5})]
    played.append(SimpleNamespace(turns=turns[2:], timings={}))
    base, speed = played_row("a", 4, 9, 2.0, played, None)
    assert (base, speed) == (["a", "4", "9", "4", "3", "2", "25 %", "1.00x"], 1.5)
    assert len(base) == len(HEADER)
    assert played_row("b", 4, 9, 0.5, played, speed, workers=2)[0][4:] == ["12", "6", "50 %", "4.00x"]
    assert played_row("c", 4, 9, 1.0, [], 1.5)[0][3:5] == ["-", "-"]
