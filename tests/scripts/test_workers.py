"""`--workers`: the verbs play in other processes and write the same episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from turngym.agents.executor.worker_count import AutoWorkers
from turngym.agents.executor.workers import open_workers
from turngym.agents.playing.rollout import rollout
from turngym.core.episode import Episode
from turngym.core.trace import read_trace
from turngym.scripts import eval as eval_verb
from turngym.scripts import rollout as rollout_verb


def played(path: Path) -> list[Episode]:
    # the settings say how many workers played
    episodes = [replace(episode, timings={}, spec="") for episode in read_trace(path)[0]]
    return sorted(episodes, key=lambda episode: (episode.task.task_id, episode.sample))


def test_rollout_and_eval_with_workers_write_the_same_episodes(tmp_path: Path, capsys: Any) -> None:
    words = ["--tasks", "6", "--samples", "2", "--noise", "0.3"]
    for name, more in (("here", ()), ("there", ("--workers", "2"))):
        assert rollout_verb.main([*words, "--out", str(tmp_path / f"{name}.jsonl"), *more]) == 0
        limits = ["--panel", "alfworld-generated-eval", "--limit", "3", "--samples", "1", "--no-verify"]
        assert eval_verb.main([*limits, "--out", str(tmp_path / name), *more]) == 0
    assert len(played(tmp_path / "there.jsonl")) == 12
    assert played(tmp_path / "there.jsonl") == played(tmp_path / "here.jsonl")
    assert played(tmp_path / "there" / "trace.jsonl") == played(tmp_path / "here" / "trace.jsonl")


def test_without_work_this_process_plays() -> None:
    with open_workers(AutoWorkers()) as play:
        assert play.func is rollout  # type: ignore[attr-defined]
