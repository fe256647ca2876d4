"""A packed result is small, comes out the same when it is played again, and no change of it goes unnoticed."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forged import forge
from late import late

from turngym.agents import evaluate, play_episodes
from turngym.agents.evaluation import packed_file
from turngym.agents.evaluation.compare import compare_recorded, differences_of, rescore
from turngym.agents.evaluation.packed import check_result, first_difference, pack_result, packed, play_again
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result
from turngym.agents.evaluation.scores import EvaluationError, score
from turngym.agents.play_spec import Compute, Whole
from turngym.core.episode import Episode, Status, Turn
from turngym.core.task import Verdict
from turngym.scripts.main import main

PANEL = "alfworld-quickstart"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the expert's turns are random actions, so that some of its 10 episodes fail."""
    out = tmp_path_factory.mktemp("run")
    evaluate(
        PANEL,
        "expert",
        noise=0.6,
        samples=2,
        limit=5,
        spread=False,
        seed=3,
        max_turns=9,
        workers=0,
        out=out,
        progress=False,
    )
    return out


@pytest.fixture(scope="module")
def result(run: Path) -> PackedResult:
    made = packed(run)
    outcomes = [(episode.success, episode.status) for episode in made.episodes]
    assert {(True, Status.COMPLETED), (False, Status.TRUNCATED_TURNS)} <= set(outcomes)
    return made


def test_what_was_packed_is_read_and_checked(run: Path, result: PackedResult, tmp_path: Path) -> None:
    path = tmp_path / "a.result.xz"
    pack_result(run, path)
    read = read_result(path)
    assert check_result(path) == []
    assert (read.episodes, read.scores) == (result.episodes, result.scores)
    written = json.loads((run / "results.json").read_text())
    assert read.scores == written["scores"]
    assert read.versions == written["versions"]
    assert (read.agent, read.spec) == (result.agent, result.spec)
    assert read.agent == "expert (noise 0.6)"
    # who computed is nobody's business
    assert differences_of(read.spec, rescore(run).spec) == {}
    assert read.spec.compute == Compute()
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize(
    "about", ["[]", "5", "null", "{", '{"versions": 5}', '{"date": 1e999}', '{"versions": {"a": []}}']
)
def test_a_results_file_beside_the_trace_is_from_anyone(about: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes((run / "trace.jsonl").read_bytes())
    (tmp_path / "results.json").write_text(about)
    with pytest.raises(EvaluationError):
        packed(tmp_path).write(tmp_path / "a.result.xz")
    assert not (tmp_path / "a.result.xz").exists()


# --- Changes by somebody who seals the file anew: the environment, the panel or the table says otherwise


def episode_changed(number: int, **changes: Any) -> Callable[[PackedResult], PackedResult]:
    def change(result: PackedResult) -> PackedResult:
        episodes = list(result.episodes)
        episodes[number] = replace(episodes[number], **changes)
        return replace(result, episodes=tuple(episodes))

    return change


def turn_changed(make: Callable[[Turn], Turn]) -> Callable[[PackedResult], PackedResult]:
    """The second turn of the first episode becomes what `make` makes of it."""

    def change(result: PackedResult) -> PackedResult:
        turns = list(result.episodes[0].turns)
        turns[1] = make(turns[1])
        return episode_changed(0, turns=tuple(turns))(result)

    return change


def setting(path: str, value: Any) -> Callable[[PackedResult], PackedResult]:
    """The setting at a dotted path becomes `value`, valid or not."""

    def change(result: PackedResult) -> PackedResult:
        def put(spec: Any, names: list[str]) -> Any:
            first, *rest = names
            inner = put(getattr(spec, first), rest) if rest else value
            # not `changed`: a stranger's file may say anything
            return msgspec.structs.replace(spec, **{first: inner})

        return replace(result, spec=put(result.spec, path.split(".")))

    return change


def with_episodes(
    choose: Callable[[tuple[Episode, ...]], tuple[Episode, ...]],
) -> Callable[[PackedResult], PackedResult]:
    """Other episodes and the table that is really theirs."""

    def change(result: PackedResult) -> PackedResult:
        episodes = choose(result.episodes)
        return replace(
            result, episodes=episodes, scores=json.loads(json.dumps(score(episodes, result.spec.play).to_json()))
        )

    return change


def all_won(episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
    return tuple(replace(one, success=True, score=1.0, status=Status.COMPLETED) for one in episodes)


def best_twice(episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
    """Whoever won once is said to have won twice: the other sample is the same episode under another number."""
    won = {one.task.task_id: one for one in episodes if one.success}
    return tuple(replace(won.get(one.task.task_id, one), sample=one.sample) for one in episodes)


def table_digit(result: PackedResult) -> PackedResult:
    scores = json.loads(json.dumps(result.scores))
    scores["overall"]["avg"]["mean"] += 0.1
    return replace(result, scores=scores)


CHANGES = {
    "an observation": (turn_changed(lambda turn: replace(turn, observation="!")), "turn 1: observation is"),
    "a response": (turn_changed(lambda turn: replace(turn, response="inventory")), "turn 1: action is"),
    "an action": (turn_changed(lambda turn: replace(turn, action="inventory")), "turn 1: action is 'inventory' in"),
    "a verdict": (turn_changed(lambda turn: replace(turn, verdict=Verdict.MALFORMED)), "turn 1: verdict is"),
    "a reward": (turn_changed(lambda turn: replace(turn, reward=0.5)), "turn 1: reward is 0.5 in the file, 0.0"),
    "every success": (with_episodes(all_won), "success is True in the file, False when it is played"),
    "a status": (episode_changed(0, status=Status.TRUNCATED_TOKENS), "status is 'truncated_tokens' in the file"),
    "a return": (episode_changed(0, episode_return=7.0), "return is 7.0 in the file"),
    "the last observation": (episode_changed(0, final_observation="You win."), "final observation is 'You win.'"),
    "a digit of the table": (table_digit, "table: overall.avg.mean is"),
    "an episode left out": (with_episodes(lambda all_: all_[1:]), "sample 0: the episode is missing"),
    "an episode too many": (with_episodes(lambda all_: (*all_, all_[0])), "sample 0: one episode too many"),
    "tasks left out": (setting("play.tasks.sampling", Whole()), "/5 sample 0: the episode is missing"),
    "the panel's size": (setting("play.tasks.size", 5), "settings: size is 5"),
    "a task's hash": (
        lambda result: episode_changed(0, task=replace(result.episodes[0].task, sha256="0" * 64))(result),
        "its task has sha256 000000000000, the panel says",
    ),
    "the panel's hash": (setting("play.tasks.sha256", "0" * 64), "sha256"),
    "another panel": (setting("play.tasks.panel", "alfworld-generated-eval-v1"), "sha256"),
    "a setting of the environment": (setting("play.env.max_turns", 30), "in the file, 'unfinished'"),
    "the seed": (setting("play.seed", 4), "played with seed 3, the settings say 4"),
    "the number of samples": (setting("play.samples", 3), "sample 2: the episode is missing"),
}


@pytest.mark.parametrize("kind", late(CHANGES, *list(CHANGES)[::3]))
def test_a_change_is_found_even_if_the_file_is_sealed_anew(kind: str, result: PackedResult, tmp_path: Path) -> None:
    change, said = CHANGES[kind]
    found = check_result(change(result).write(tmp_path / "a.result.xz"))
    assert [line for line in found if said in line], found
    assert not [line for line in found if line.startswith("seal:")]


def test_an_untouched_file_has_no_differences(result: PackedResult, tmp_path: Path) -> None:
    assert check_result(result.write(tmp_path / "a.result.xz")) == []


# --- Changes by somebody who edits the file alone: its checksums name them


EDITS = {
    "the noise": ('"noise": 0.6', '"noise": 0.1', "spec.agent.noise"),
    "the agent": ('"agent": "expert', '"agent": "learned', "agent"),
    "a version": ('"python": "3', '"python": "4', "versions.python"),
    "a setting": ('"preset": null', '"preset": "turnopd"', "spec.preset"),
    "a setting taken out": ('"max_turns": 9, ', '"max_turns": 50, ', "spec.play.env.max_turns"),
    "the date": ('"date": "20', '"date": "19', "date"),
    "a digit": ('"errors": 0', '"errors": 1', "table"),
    "an episode": ('"finish":"', '"finish":"x', "{task} sample 0"),
    "the seal alone": ('"sha256": "{seal}', '"sha256": "0123', None),
}
"""Text in the file, what it becomes, and what is named; None: that something was changed, no more."""


@pytest.mark.parametrize("kind", EDITS)
def test_whatever_is_edited_is_named(kind: str, result: PackedResult, tmp_path: Path) -> None:
    old, new, name = EDITS[kind]
    path = result.write(tmp_path / "a.result.xz")
    text = lzma.decompress(path.read_bytes()).decode()
    old, task = old.format(seal=read_result(path).seal[:4]) if "{seal}" in old else old, result.episodes[0].task
    assert old in text
    path.write_bytes(lzma.compress(text.replace(old, new, 1).encode()))
    sealed = [line for line in check_result(path) if line.startswith("seal: ")]
    if name is None:
        assert sealed == ["seal: the content has another SHA-256 than the file states"]
    else:
        assert sealed == [f"seal: {name.format(task=task.task_id)} was changed after the file was packed"]


def test_a_setting_that_came_later_breaks_no_seal(result: PackedResult, tmp_path: Path) -> None:
    first, *lines = result.lines()
    head = json.loads(first)
    del head["spec"]["preset"], head["sha256"]
    rows = [(f"{one.task.task_id} sample {one.sample}", line) for one, line in zip(result.episodes, lines, strict=True)]
    head["checksums"] = packed_file._checksums({name: head[name] for name in packed_file.FACTS}, rows)
    head["sha256"] = packed_file._digest(head, rows)
    path = tmp_path / "a.result.xz"
    path.write_bytes(lzma.compress("\n".join([json.dumps(head, sort_keys=True), *lines]).encode()))
    assert check_result(path) == []


def test_a_damaged_file_is_refused_in_one_line(result: PackedResult, tmp_path: Path) -> None:
    path = result.write(tmp_path / "a.result.xz")
    whole = path.read_bytes()
    lines = lzma.decompress(whole).decode().split("\n")
    cases = {
        "flipped": whole[:900] + bytes([whole[900] ^ 1]) + whole[901:],
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "plain": b"{}",
        "other": lzma.compress(b'{"format": "other"}'),
        "newer": lzma.compress(lines[0].replace('"version": 3', '"version": 4').encode()),
        "line": lzma.compress("\n".join([lines[0], lines[1][:-9]]).encode()),
        "newer episode": lzma.compress(
            "\n".join([lines[0], re.sub(r'"schema":\d+', '"schema":99', lines[1])]).encode()
        ),
    }
    for data in cases.values():
        path.write_bytes(data)
        with pytest.raises(EvaluationError, match=r"a\.result\.xz is not a packed result: .+"):
            read_result(path)
    for name, value in {"samples": "x", "seed": None, "env_kwargs": 5, "tasks.panel": ("x",)}.items():
        forge(setting(f"play.{name}", value)(result), path)
        with pytest.raises(EvaluationError, match=rf"its spec: (play\.)?{re.escape(name.rpartition('.')[2])} is "):
            read_result(path)
    seconds = [{"seconds": value} for value in ("x", float("nan"), 10**400, -5.0)]
    others = [
        {"date": None},
        {"versions": {"turngym": 3}},
        {"versions": ["turngym"]},
        {"agent": ["a"]},
        {"tokens": [1]},
    ]
    for changes in (*seconds, *others, {"episodes": ()}):
        forge(replace(result, **changes), path)
        with pytest.raises(EvaluationError, match=r"a\.result\.xz is not a packed result: .*" + next(iter(changes))):
            read_result(path)
    many = check_result(setting("play.samples", 10**6)(result).write(path))
    assert f"{5 * 10**6 - 10} episodes are missing" in many
    with pytest.raises(EvaluationError, match="No such file"):
        read_result(tmp_path / "none.result.xz")


def test_what_could_not_be_read_is_not_written(
    result: PackedResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(result.episodes[0], final_observation="x" * 50_000)
    monkeypatch.setattr(packed_file, "MOST_LINE", 50_000)
    with pytest.raises(
        EvaluationError, match="not written, for nobody could read it: line 2 has more than 50,000 bytes"
    ):
        replace(result, episodes=(long,)).write(tmp_path / f"long{SUFFIX}")
    assert not [*tmp_path.iterdir()]


def test_who_has_the_player_can_tell_whether_it_played(result: PackedResult) -> None:
    assert play_again(result, "expert", noise=0.6, workers=0, progress=False) == []
    other = play_again(result, "expert", tasks=2, workers=0, progress=False)
    assert len(other) == 4
    assert re.search(r"sample 0, turn \d+: response is '.+' in the file, '.+' when it is played", other[0])
    copied = with_episodes(best_twice)(result)
    assert play_again(copied, "expert", noise=0.6, workers=0, progress=False)
    assert first_difference(result.episodes[0].turns, result.episodes[0].turns[:-1]) is not None
    left_out = result.episodes[0]
    fewer = with_episodes(lambda episodes: episodes[1:])(result)
    lacks = f"{left_out.task.task_id} sample {left_out.sample}: it is not in the file"
    assert play_again(fewer, "expert", noise=0.6, workers=0, progress=False) == [lacks]


def test_what_cannot_be_packed(run: Path, tmp_path: Path) -> None:
    head, *lines = (run / "trace.jsonl").read_text().splitlines()
    (tmp_path / "trace.jsonl").write_text("\n".join([head, *lines[:-1]]) + "\n")
    with pytest.raises(EvaluationError, match="lacks 1 episodes"):
        packed(tmp_path)
    play_episodes(tasks=1, out=tmp_path / "t.jsonl", progress=False)
    with pytest.raises(EvaluationError, match="not played on a panel"):
        packed(tmp_path / "t.jsonl")
    changed = [
        line.replace("You are in the middle", "You are at the edge") for line in map(json.dumps, map(json.loads, lines))
    ]
    bare = [re.sub(r', "crc": "\w+"', "", line) for line in changed]
    (tmp_path / "trace.jsonl").write_text("\n".join([head, *bare]) + "\n")
    with pytest.raises(EvaluationError, match="turn 0: observation is"):
        pack_result(tmp_path, tmp_path / "a.result.xz")
    assert not (tmp_path / "a.result.xz").exists()


def test_the_command(run: Path, result: PackedResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.result.xz", tmp_path / "bad.result.xz"
    assert main(["result", "pack", str(run), "--out", str(good)]) == 0
    assert re.search(r"good\.result\.xz: 10 episodes in [\d,]+ bytes, checked", capsys.readouterr().out)
    table_digit(result).write(bad)
    assert main(["result", "check", str(good)]) == 0
    assert main(["result", "check", str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "good.result.xz: as recorded, " in out
    assert "bad.result.xz: 1 differences (10 episodes" in out
    assert "\n  table: overall.avg.mean is" in out
    assert main(["result", "pack", str(run), "--out", str(tmp_path / "x.json")]) == 2
    assert "ends in .result.xz" in capsys.readouterr().err


def test_packed_results_are_compared_as_their_folders_are(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    evaluate(
        PANEL, "expert", samples=2, limit=5, spread=False, seed=3, max_turns=9, workers=0, out=other, progress=False
    )
    files = [tmp_path / "a.result.xz", tmp_path / "b.result.xz"]
    for folder, file in zip((run, other), files, strict=True):
        pack_result(folder, file)
    whole, few, mixed = (compare_recorded(*pair) for pair in ((run, other), files, (run, files[1])))
    assert whole.rows == few.rows == mixed.rows
    assert few.rows[-1].difference.mean > 0
    assert few.differ == whole.differ
    assert compare_recorded(files[0], files[0]).alike
    (tmp_path / "c.result.xz").write_bytes(b"x")
    with pytest.raises(EvaluationError, match="is not a packed result"):
        compare_recorded(files[0], tmp_path / "c.result.xz")
