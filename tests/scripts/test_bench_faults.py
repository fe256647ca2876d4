"""`turngym bench faults`: it finds what it looks for, and finds nothing in this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turngym.envs.core import TurngymError
from turngym.envs.guard import ActionGuard
from turngym.envs.trace import TraceWriter, read_trace
from turngym.scripts.bench.faults import actions, files, kills, main, older, targets
from turngym.scripts.bench.faults.files import Reading, Target, flip_target, judge


def test_outcomes_of_a_changed_byte() -> None:
    whole = Reading(items={"a": b"1", "b": b"2"})
    assert judge(whole, Reading(items={"a": b"1", "b": b"2"})) == "harmless"
    assert judge(whole, Reading(items={"a": b"1"}, problems=1)) == "named"
    assert judge(whole, Reading(items={"a": b"1"})) == "taken quietly"
    assert judge(whole, Reading(items={"a": b"1", "b": b"3"}, problems=1)) == "taken quietly"
    assert judge(whole, Reading(items={"a": b"1", "b": b"2", "c": b"3"})) == "taken quietly"
    assert judge(whole, TurngymError("x")) == "refused"
    assert judge(whole, KeyError("x")) == "traceback"


@pytest.mark.parametrize("name", ["trace", "proxy records", "index", "model folder", "checkpoint"])
def test_what_older_versions_wrote_is_taken_quietly(tmp_path: Path, name: str) -> None:
    """What the flips are there to find."""
    write, read = older.OLDER[name]
    write(tmp_path)
    tally = flip_target(Target(name=name, write=write, read=read), tmp_path, 15, np.random.default_rng(0))
    assert tally.tries == 15
    assert tally.failures >= tally.outcomes["taken quietly"] > 2
    assert any(note.startswith(f"bit flip: {name}: taken quietly: ") for note in tally.notes)


def test_no_changed_byte_is_taken_quietly(tmp_path: Path) -> None:
    found = list(files.flips(tmp_path, 6, seed=3))
    assert [one.what for one in found] == [f"bit flip: {name}" for name, _, _ in targets.TARGETS]
    assert all(one.tries == 6 for one in found)
    assert [one.notes for one in found if one.failures] == []


def test_senseless_actions_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(actions.fuzzed(60, seed=0))
    assert [one.tries for one in found] == [60, 60, 60]
    assert [one.notes for one in found if one.failures] == []

    def broken(self: ActionGuard, action: str) -> None:
        raise ValueError(action)

    monkeypatch.setattr(ActionGuard, "step", broken)
    tally = next(iter(actions.fuzzed(5, seed=0)))
    assert tally.outcomes == {"raised": 5}


def test_a_killed_writer_of_records_and_a_lost_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    assert kills.KINDS["proxy records"](tmp_path / "a", 0.2) == ("whole", "")
    # says what it has not written
    monkeypatch.setattr(kills, "RECORDS", kills.RECORDS.replace('"step": number', '"step": number // 2'))
    (tmp_path / "b").mkdir()
    assert kills.KINDS["proxy records"](tmp_path / "b", 0.2)[0] == "lost"


def test_a_trace_that_a_kill_cost_an_episode_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "_kill", lambda words, begun, moment: kills._run(words))
    assert kills.KINDS["trace"](tmp_path, 0.0) == ("whole", "")
    episodes = read_trace(tmp_path / "t.jsonl")[0]

    def lose(words: list[str]) -> object:
        (tmp_path / "t.jsonl").unlink()
        with TraceWriter(tmp_path / "t.jsonl") as writer:
            for one in episodes[1:]:
                writer.write(one)
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(kills, "_kill", lambda words, begun, moment: None)
    monkeypatch.setattr(kills, "_run", lose)
    assert kills.KINDS["trace"](tmp_path, 0.0)[0] == "lost"


def test_the_command_counts_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "actions", "coverage", "--actions", "20", "--evaluations", "40"]
    assert main.main(words) == 0
    said = capsys.readouterr().out
    assert "| senseless actions: turngym/Search-v0 | 20 | 0 |" in said
    assert "| interval coverage | " in said
    assert said.rstrip().endswith("tries")
    bad = main.tally_of("x", ("lost",), {"lost": 2, "whole": 1})
    monkeypatch.setattr(main, "_parts", lambda options, scratch: iter([bad]))
    assert main.main(["--only", "files"]) == 1
    assert "| x | 3 | 2 | lost 2, whole 1 |" in capsys.readouterr().out
