"""The fault benches find the faults that they look for, and find none in this package."""

from __future__ import annotations

from collections import Counter
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
from killed_work import Done, Started

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.trace import TraceWriter, read_trace
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
    assert tally.outcomes == {"killed": 4, "training equal": 1, "client equal": 1, "records whole": 1}, tally.notes


def test_what_a_soak_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm: dict[str, Any] = {"training": [[[1, 0.5]], "abc"], "client": [["a", [True, ["look"]]]], "server": []}
    well, ill = Done(0, ""), Done(2, "no checkpoint")
    rounds = iter(
        [
            ({"training": well, "client": well}, calm, 60.0),
            ({"training": well, "client": well}, {**calm, "training": [[[1, 0.5]], "abd"]}, 60.0),
            ({"training": ill, "client": well}, {**calm, "training": [], "server": ["line 3"]}, 60.0),
        ]
    )
    asked: list[tuple[str, int, float]] = []

    def run_round(place: Path, kills: int, pause: float, rng: np.random.Generator) -> object:
        place.mkdir(parents=True)
        asked.append((place.name, kills, pause))
        return next(rounds)

    monkeypatch.setattr(killed_soak, "run_round", run_round)
    (tally,) = killed_soak.soak(tmp_path, 10, seed=0)
    assert asked == [("calm", 0, 0.0), ("round_0", 8, 7.5), ("round_1", 2, 7.5)]
    expected = {"killed": 10, "differs": 1, "client equal": 2, "records whole": 1, "cannot go on": 1, "damaged": 1}
    assert (tally.outcomes, tally.failures) == (expected, 3)
    assert "round 0, training" in tally.notes[0]
    assert "no checkpoint" in tally.notes[1]


def test_a_killed_run_goes_on_or_begins_anew(tmp_path: Path) -> None:
    argv = ["train", "opd", "--out", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    assert killed_soak.again(argv) == argv
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)
    assert killed_soak.again(argv) == [*argv, "--resume"]


def test_a_second_writer_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    assert killed_work.SECOND_STARTS["proxy records"](tmp_path / "a") == ("turned away", "")
    monkeypatch.setattr("turngym.agents.proxy.turn_records.locked_file", lambda path: nullcontext())
    (tmp_path / "b").mkdir()
    assert killed_work.SECOND_STARTS["proxy records"](tmp_path / "b") == ("both wrote", "")


@pytest.mark.parametrize(
    ("stopped", "done", "wrote", "outcome"),
    [
        (True, Done(2, "t.jsonl is in use by process 7 on here"), False, "turned away"),
        (True, Done(2, "t.jsonl is in use by process 7 on here"), True, "touched"),
        (True, Done(0, ""), True, "both wrote"),
        (True, Done(1, "Traceback (most recent call last): is in use by process 7"), False, "traceback"),
        (False, Done(0, ""), True, "had ended"),
    ],
)
def test_outcomes_of_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, done: Done, wrote: bool, outcome: str
) -> None:
    seen: list[list[str]] = []

    class Fake:
        def __init__(self, argv: list[str]) -> None:
            seen.append(argv)

        def over(self) -> bool:
            return True

        def stop(self) -> bool:
            return stopped

        def end(self, seconds: float) -> Done:
            if wrote:
                (tmp_path / "more").write_text("x")
            return done

        def kill(self) -> None:
            seen.append(["killed"])

    monkeypatch.setattr(killed_work, "Started", Fake)
    found, note = killed_work.SECOND_STARTS["trace"](tmp_path)
    assert found == outcome
    assert ("more" in note) == (outcome == "touched")
    assert seen[-1] == ["killed"]
    assert [argv[-1] for argv in seen[1:-1]] == ["--append"] * stopped


@pytest.mark.long
def test_a_process_is_stopped_and_killed(tmp_path: Path) -> None:
    """And what it writes to standard error is told."""
    process = Started(["serve", "webshop", "--profile", "embedded-small", "--port", "0", "--out", str(tmp_path / "o")])
    assert process.stop()
    process.kill()
    assert process.over()
    assert not process.stop()
    done = Started(["panel", "show", "nothing-like-it"]).end(120)
    assert done.returncode == 2
    assert "nothing-like-it" in done.stderr


@pytest.mark.long
def test_hostile_servers_and_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    import outside_faults

    found = [*outside_faults.hostile_answers(1), *outside_faults.hostile_environments(1)]
    assert [one.notes for one in found if one.failures] == []
    assert [one.tries for one in found] == [15] * 4 + [14] * 2
    # a client that takes everything is found out
    monkeypatch.setattr(outside_faults, "CALLS", {"gullible": lambda url, loop, seconds: ""})
    (gullible,) = outside_faults.hostile_answers(1)
    assert gullible.outcomes == {"taken": 15}


def test_the_command_counts_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--only", "actions", "coverage", "--actions", "20", "--evaluations", "40"]
    assert faults.main(argv) == 0
    said = capsys.readouterr().out
    assert "| senseless actions: turngym/Search-v0 | 20 | 0 |" in said
    assert "| interval coverage | " in said
    assert said.rstrip().endswith("tries")
    bad = faults.Tally(what="x", bad=("lost",), outcomes=Counter(lost=2, whole=1))
    monkeypatch.setattr(faults, "_parts", lambda options, scratch: iter([bad]))
    assert faults.main(["--only", "files"]) == 1
    assert "| x | 3 | 2 | lost 2, whole 1 |" in capsys.readouterr().out
