"""What `turngym bench live` makes of records and times; the run itself is a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the proxy trains")

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.served.live import BenchLive, Measured, older_weights, pooled, report
from turngym.scripts.bench.served.live_server import slow
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithms.prm_rl import PrmRlConfig
from turngym.trainers.algorithms.prm_rl import build as prm_rl
from turngym.trainers.config import RunConfig


def measured(name: str, seconds: list[float], **health: Any) -> Measured:
    return Measured(name=name, seconds=seconds, sessions=2, refused=1, problems=[], health=[health])


def test_the_report_compares_both_runs() -> None:
    plain = measured("served", [0.1] * 99 + [0.2, 9.0])
    health: dict[str, Any] = {"training": {"step": 3}, "engine": {"broken_off": 2}}
    serving = {"from": "process", "longest_pause_s": 0.5}
    trained = measured("trained", [0.15] * 99 + [0.3, 8.0], serving=serving, **health)
    lines = report(BenchLive(), plain, trained)
    assert "101 turns of 2 sessions, 1 refusals; seconds per turn: median 0.100, 99 % 0.200, worst 9.000" in lines[1]
    assert lines[3] == (
        "trained  3 updates of 30 s while clients talked, served from process, longest pause 0.500 s, "
        "2 answers continued by newer weights"
    )
    assert lines[4] == "with training / without: median 1.50x, 99 % 1.50x"


def test_runs_of_a_kind_are_one() -> None:
    first = measured("trained", [0.1, 0.4], training={"step": 2}, serving={"from": "copy", "longest_pause_s": 0.2})
    second = measured("trained", [0.2, 0.3], training={"step": 1}, serving={"from": "copy", "longest_pause_s": 0.1})
    both = pooled([first, measured("served", [9.0]), second], "trained")
    assert both.seconds == [0.1, 0.2, 0.3, 0.4]
    assert (both.sessions, both.refused, both.name) == (4, 2, "trained")
    line = report(BenchLive(update=5.0), measured("served", [0.1]), both)[3]
    assert line.startswith("trained  3 updates of 5 s while clients talked, served from copy, longest pause 0.200 s")


def test_rounds_and_updates_out_of_range_are_refused() -> None:
    with pytest.raises(TurngymError, match="--rounds is 0"):
        BenchLive(rounds=0)


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([("a", 0, []), ("b", 2, []), ("a", 1, [])], 0),
        ([("a", 1, []), ("a", 0, [])], 1),
        ([("a", 0, [[0, 0, 3], [2, 3, 5]]), ("a", 1, [])], 1),
        ([("a", 0, [[0, 0, 3], [2, 3, 5]]), ("a", 2, [])], 0),
    ],
)
def test_sessions_that_go_back_to_older_weights_are_found(tmp_path: Path, turns: Any, found: int) -> None:
    rows = [
        {"kind": "turn", "session": key, "version": version, **({"version_spans": spans} if spans else {})}
        for key, version, spans in turns
    ]
    lines = [json.dumps(row) for row in [*rows, {"kind": "end", "session": "a"}]]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert len(older_weights(tmp_path)) == found


def test_a_long_update_gives_the_targets_that_it_holds_up() -> None:
    asked: list[Any] = []

    def target_fn(batch: Any, episodes: Any, scorers: Any) -> Targets:
        asked.append((batch, episodes, scorers))
        return Targets(advantage_N=np.array([1.0, 2.0], np.float32))

    algorithm = prm_rl(PrmRlConfig(), RunConfig())
    training = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))
    training.trainer.algorithm = replace(algorithm, target_fn=target_fn)
    slow(training, 0.01)
    batch: Any = "batch"
    found = training.trainer.algorithm.target_fn(batch, ["e"], "s")
    assert found.advantage_N.tolist() == [1.0, 2.0]
    assert asked == [("batch", ["e"], "s")]
