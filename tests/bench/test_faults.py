"""The fault benches find the faults that they look for, and find none in this package."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import damaged_files
import faults
import killed_soak
import killed_work
import numpy as np
import pytest
from damaged_files import Reading, Target, flip_target, judge

from turngym.agents.proxy.turn_records import TurnRecorder, read_records
from turngym.core.errors import TurngymError
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.guard import ActionGuard


def test_outcomes_of_a_changed_byte() -> None:
    whole = Reading(items={"a": b"1", "b": b"2"})
    assert judge(whole, Reading(items={"a": b"1", "b": b"2"})) == "harmless"
    assert judge(whole, Reading(items={"a": b"1"}, problems=1)) == "named"
    assert judge(whole, Reading(items={"a": b"1"})) == "taken quietly"
    assert judge(whole, Reading(items={"a": b"1", "b": b"3"}, problems=1)) == "taken quietly"
    assert judge(whole, Reading(items={"a": b"1", "b": b"2", "c": b"3"})) == "taken quietly"
    assert judge(whole, TurngymError("x")) == "refused"
    assert judge(whole, KeyError("x")) == "traceback"


def test_a_reader_without_checksums_is_found_out(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "digits").write_text("0123456789" * 20)

    def read(folder: Path) -> Reading:
        return Reading(items={str(n): bytes([one]) for n, one in enumerate((folder / "digits").read_bytes())})

    write(tmp_path)
    tally = flip_target(Target(name="digits", write=write, read=read), tmp_path, 15, np.random.default_rng(0))
    assert (tally.tries, tally.outcomes["taken quietly"]) == (15, 15)
    assert all(note.startswith("bit flip: digits: taken quietly: ") for note in tally.notes)


@pytest.mark.long
def test_no_changed_byte_is_taken_quietly(tmp_path: Path) -> None:
    found = list(damaged_files.flip_all(tmp_path, 6, seed=3))
    assert [one.what for one in found] == [f"bit flip: {target.name}" for target in damaged_files.TARGETS]
    assert all(one.tries == 6 for one in found)
    assert [one.notes for one in found if one.failures] == []


@pytest.mark.long
def test_senseless_actions_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(faults.fuzz_all(60, seed=0))
    assert [one.tries for one in found] == [60, 60, 60]
    assert [one.notes for one in found if one.failures] == []

    def broken(self: ActionGuard, action: str) -> None:
        raise ValueError(action)

    monkeypatch.setattr(ActionGuard, "step", broken)
    tally = next(iter(faults.fuzz_all(5, seed=0)))
    assert tally.outcomes == {"raised": 5}


@pytest.mark.long
def test_a_killed_writer_of_records_and_a_lost_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    assert killed_work.KILLS["proxy records"](tmp_path / "a", 0.2) == ("whole", "")
    # says what it has not written
    monkeypatch.setattr(killed_work, "RECORDS", killed_work.RECORDS.replace('"step": number', '"step": number // 2'))
    (tmp_path / "b").mkdir()
    assert killed_work.KILLS["proxy records"](tmp_path / "b", 0.2)[0] == "lost"


@pytest.mark.long
def test_a_trace_that_a_kill_cost_an_episode_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed_work, "_kill", lambda argv, begun, moment: killed_work._run(argv))
    assert killed_work.KILLS["trace"](tmp_path, 0.0) == ("whole", "")
    episodes = read_trace(tmp_path / "t.jsonl")[0]

    def lose(argv: list[str]) -> object:
        (tmp_path / "t.jsonl").unlink()
        with TraceWriter(tmp_path / "t.jsonl") as writer:
            for one in episodes[1:]:
                writer.write(one)
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(killed_work, "_kill", lambda argv, begun, moment: None)
    monkeypatch.setattr(killed_work, "_run", lose)
    assert killed_work.KILLS["trace"](tmp_path, 0.0)[0] == "lost"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trace", "evaluation", "index", "training"])
def test_work_that_is_started_twice_or_killed_loses_nothing(kind: str, tmp_path: Path) -> None:
    (tmp_path / "twice").mkdir()
    assert killed_work.SECOND_STARTS[kind](tmp_path / "twice") == ("turned away", "")
    (tmp_path / "killed").mkdir()
    assert killed_work.KILLS[kind](tmp_path / "killed", 0.2) == ("whole", "")


@pytest.mark.long
def test_a_trainer_a_server_and_its_client_are_killed_while_all_work(tmp_path: Path) -> None:
    (tally,) = killed_soak.soak(tmp_path, 4, seed=1)
    assert tally.outcomes == {"killed": 4, "training equal": 1, "client equal": 1, "records whole": 2}, tally.notes


@pytest.mark.long
def test_a_proxy_that_learns_is_killed_and_keeps_its_promises(tmp_path: Path) -> None:
    """And promises that are broken afterwards, by hand, are found out."""
    broken, _ = killed_soak.learning_round(tmp_path, 3, 4.0, np.random.default_rng(5))
    assert broken == []
    server, client = tmp_path / "server", tmp_path / "eval" / "trace.jsonl"
    records = list(read_records(server))
    last = max(place for place, one in enumerate(records) if one["kind"] == "trained")
    answer = read_trace(client)[0][-1].turns[-1].response
    told = [place for place, one in enumerate(records) if one["kind"] == "turn" and one["text"] == answer]

    later = next(one for one in records if one["kind"] == "turn" and one["main"] and one["kept"])

    def said(*, without: Sequence[int] = (), again: Sequence[int] = (), more: Sequence[dict[str, Any]] = ()) -> str:
        """What is broken once some records are missing, stand there again, or came along."""
        shutil.copytree(tmp_path, other := tmp_path.with_name("other"))
        (other / "server" / "records.jsonl").unlink()
        recorder = TurnRecorder(other / "server")
        for place, one in enumerate(records):
            for _ in range((place not in without) + (place in again)):
                recorder.write(one)
        for one in more:
            recorder.write(one)
        recorder.close()
        found = killed_soak.broken_promises(other)
        shutil.rmtree(other)
        return "; ".join(found)

    assert said() == ""
    # a session whose first turn is lost: the next start cannot go on with it, nor with any other that still waits
    with pytest.warns(UserWarning, match="does not fit"):
        assert re.search(r"wrong: \[.*'stranger-999'\]", said(more=[{**later, "session": "stranger-999"}]))
    assert "is used at steps" in said(again=[last])
    assert "saved" in said(without=[last])
    assert "not in the records: {" in said(without=told)


@pytest.mark.long
def test_a_second_writer_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    assert killed_work.SECOND_STARTS["proxy records"](tmp_path / "a") == ("turned away", "")
    monkeypatch.setattr("turngym.agents.proxy.turn_records.locked_file", lambda path: nullcontext())
    (tmp_path / "b").mkdir()
    assert killed_work.SECOND_STARTS["proxy records"](tmp_path / "b") == ("both wrote", "")


@pytest.mark.long
def test_hostile_servers_and_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    import outside_faults

    found = [*outside_faults.hostile_answers(1), *outside_faults.hostile_environments(1)]
    assert [one.notes for one in found if one.failures] == []
    assert [one.tries for one in found] == [len(outside_faults.MISCHIEF)] * 4 + [len(outside_faults.FAILING)] * 2
    # a client that takes everything is found out
    monkeypatch.setattr(outside_faults, "CALLS", {"gullible": lambda url, loop, seconds: ""})
    (gullible,) = outside_faults.hostile_answers(1)
    assert gullible.outcomes == {"taken": 15}


@pytest.mark.long
def test_the_command_counts_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(["--only", "actions", "--actions", "20"]) == 0
    said = capsys.readouterr().out
    assert "| senseless actions: turngym/Search-v0 | 20 | 0 |" in said
    assert said.rstrip().endswith("tries")
    bad = faults.Tally(what="x", bad=("lost",), outcomes=Counter(lost=2, whole=1))
    monkeypatch.setattr(faults, "_parts", lambda options, scratch: iter([bad]))
    assert faults.main(["--only", "files"]) == 1
    assert "| x | 3 | 2 | lost 2, whole 1 |" in capsys.readouterr().out
