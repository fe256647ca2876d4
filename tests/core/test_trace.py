"""Traces: exact round trips, torn and damaged lines, nothing ever lost."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_disk import small_disk

from turngym.core.episode import Episode, EpisodeError, Status, TopK, Turn
from turngym.core.task import Task, Verdict
from turngym.core.trace import (
    SCHEMA,
    TraceError,
    TraceProblem,
    TraceWriter,
    episode_from_json,
    episode_to_json,
    iter_trace,
    read_episodes,
    read_specs,
    read_trace,
)

TASK = Task(env_id="toy", task_id="corridor/3", sha256="0" * 64, split="toy", category="corridor")


def turn(index: int = 0, **kwargs: Any) -> Turn:
    facts = {
        "observation": "o",
        "admissible": ("a",),
        "response": "r",
        "action": "a",
        "verdict": Verdict.OK,
        "reward": 0.0,
    }
    return Turn(index=index, **{**facts, **kwargs})


def episode(*turns: Turn, **kwargs: Any) -> Episode:
    facts: dict[str, Any] = {"seed": 1, "sample": 2, "group": 3, "segments": (), "status": Status.COMPLETED}
    return Episode(task=TASK, turns=turns, **{**facts, "success": True, "episode_return": 1.0, **kwargs})


FLOATS = st.floats(-1e18, 1e18)
FLOAT32 = hnp.arrays(np.float32, st.integers(1, 6), elements=st.floats(width=32, allow_nan=False))


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    turns, ids, text = [], [], st.text(max_size=8)
    for index in range(draw(st.integers(0, 3))):
        logprobs = draw(FLOAT32)
        start, size = len(ids) + draw(st.integers(0, 2)), len(logprobs)
        k = draw(st.integers(1, 3))
        logp = draw(hnp.arrays(np.float32, (size, k), elements=st.floats(width=32, allow_nan=False)))
        tail = draw(st.none() | hnp.arrays(np.float32, size, elements=st.floats(width=32, allow_nan=False)))
        teacher = TopK(ids=np.arange(size * k, dtype=np.int32).reshape(size, k), logp=logp, tail=tail)
        span = (start, start + size)
        prompt, ids = (len(ids), start), [*ids, *range(start + size - len(ids))]
        turns.append(
            Turn(
                index=index,
                observation=draw(text),
                admissible=draw(st.none() | st.lists(text, max_size=3).map(tuple)),
                response=draw(text),
                action=draw(st.none() | text),
                verdict=draw(st.sampled_from(list(Verdict))),
                reward=draw(FLOATS),
                prompt_span=prompt,
                response_span=span,
                logprobs=draw(st.sampled_from([None, logprobs])),
                finish=draw(st.sampled_from(["stop", "length"])),
                policy_version=draw(st.integers(0, 10**12)),
                origin=draw(st.sampled_from(["policy", "demonstration", "noise"])),
                judge_scores=draw(st.none() | st.lists(FLOATS, max_size=3).map(tuple)),
                hint=draw(st.none() | text),
                teacher=draw(st.sampled_from([None, teacher])),
            )
        )
    return episode(
        *turns,
        segments=(np.array(ids, dtype=np.int32),),
        status=draw(st.sampled_from(list(Status))),
        success=draw(st.booleans()),
        episode_return=draw(FLOATS),
        score=draw(st.floats(0, 1)),
        system=draw(text),
        final_observation=draw(text),
        timings=draw(st.dictionaries(text, st.floats(0, 10), max_size=2)),
        meta=draw(st.dictionaries(text, st.none() | text | st.integers() | st.lists(text, max_size=2), max_size=3)),
    )


def assert_same(left: Any, right: Any) -> None:
    """Equal values and equal types, arrays included."""
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    elif isinstance(left, (Episode, Turn, TopK)):
        for name in type(left).__dataclass_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, tuple):
        assert type(right) is tuple
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert type(left) is type(right)
        assert left == right


@given(episodes())
def test_round_trip_is_exact(original: Episode) -> None:
    line = episode_to_json(original)
    assert line.isascii()
    assert "\n" not in line
    assert_same(original, episode_from_json(line))
    assert episode_to_json(episode_from_json(line)) == line


def test_float32_is_short_and_exact_and_infinities_are_strict_json() -> None:
    values = np.array([-0.1, -1e-8, -np.inf, np.nan, -0.0], dtype=np.float32)
    original = episode(turn(logprobs=values, response_span=(0, 5)), segments=(np.zeros(5, dtype=np.int32),))
    line = episode_to_json(original)
    assert '"logprobs":[-0.1,-1e-08,"-inf","nan",-0.0]' in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert episode_from_json(line).turns[0].logprobs.tobytes() == values.tobytes()


def test_numpy_scalars_and_lone_surrogates_are_written() -> None:
    original = episode(
        turn(response="\ud800"), seed=np.int64(4), success=np.bool_(True), episode_return=np.float32(0.5)
    )
    back = episode_from_json(episode_to_json(original))
    assert (back.seed, back.success, back.episode_return, back.turns[0].response) == (4, True, 0.5, "\ud800")


def test_a_torn_line_is_reported_and_later_episodes_survive(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [episode_to_json(episode(sample=sample)) for sample in range(3)]
    before = lines[0] + "\n" + lines[1][:-20]
    path.write_text(before)
    read, problems = read_trace(path)
    assert [item.sample for item in read] == [0]
    assert [problem.line for problem in problems] == [2]
    assert str(problems[0]).startswith("line 2: torn: the file ends inside this line; not valid JSON")
    with TraceWriter(path) as writer:
        writer.write(episode(sample=2))
        writer.write(episode(sample=3))
    assert path.read_text().startswith(before + "\n"), "what was there must stay"
    read, problems = read_trace(path)
    assert [item.sample for item in read] == [0, 2, 3]
    assert [problem.line for problem in problems] == [2]


@given(cut=st.integers(0, 2000))
def test_wherever_the_file_is_cut_whole_lines_survive(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    line = episode_to_json(episode(turn())).encode() + b"\n"
    data = (line * 4)[: cut % (4 * len(line) + 1)]
    path.write_bytes(data)
    read, problems = read_trace(path)
    whole, rest = divmod(len(data), len(line))
    complete = rest == len(line) - 1  # only the newline is missing
    assert len(read) == whole + complete
    assert len(problems) == (1 if rest and not complete else 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record.pop("turns"), "`turns`"),
        (lambda record: record.pop("schema"), '"schema"'),
        *((lambda record, value=value: record.update(schema=value), repr(value)) for value in ("x", 1, 0, True)),
        (lambda record: record["task"].pop("split"), "`split`"),
        (lambda record: record["task"].update(cluster=["x"]), "$.task.cluster"),
        *(
            (lambda record, name=name, value=value: record.update({name: value}), f"$.{key or name}")
            for name, value, key in (
                ("task", ["x"], ""),
                ("status", "done", ""),
                ("success", "false", ""),
                ("success", 1, ""),
                ("seed", "5", ""),
                ("sample", True, ""),
                ("group", 2**70, ""),
                ("score", "5", ""),
                ("ret", None, "episode_return"),
                ("segments", [[1.7, 2]], "segments[0]"),
                ("turns", [3], "turns[0]"),
                ("final_observation", 5, ""),
                ("timings", {"env": "x"}, "timings[...]"),
            )
        ),
        *(
            (lambda record, name=name, value=value: record["turns"][0].update({name: value}), f"$.turns[0].{name}")
            for name, value in (
                ("verdict", "fine"),
                ("response_span", [0]),
                ("observation", 5),
                ("response", None),
                ("reward", None),
                ("admissible", [5]),
                ("finish", [1]),
                ("policy_version", "x"),
                ("origin", "noisy"),
                ("logprobs", ["x"]),
            )
        ),
        (lambda record: record["turns"][0].update(index=4), "turns must count 0, 1, 2"),
        (lambda record: record["turns"][0].update(response_span=[0, 9], segment=3), "segment 3"),
        (lambda record: record["turns"][0].update(teacher={"k": 1.0}), "$.k"),
        (lambda record: record["turns"][0].pop("action"), "`action`"),
        (lambda record: record.pop("score"), "score"),
    ],
)
def test_damaged_lines_are_reported(change: Any, reason: str, tmp_path: Path) -> None:
    record = json.loads(episode_to_json(episode(turn())))
    change(record)
    good = episode_to_json(episode())
    (tmp_path / "t.jsonl").write_text(f"{good}\n{json.dumps(record)}\n\n{good}\n")
    read, problems = read_trace(tmp_path / "t.jsonl")
    assert len(read) == 2
    assert [problem.line for problem in problems] == [2]
    assert reason in problems[0].reason
    assert "torn" not in problems[0].reason


def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) in a value of JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from leaves(item)


ODD = [None, True, 0, -1, 1.5, 2**70, 10**400, math.nan, "", "x", "5", "\ud800", [], [None], [1.5], {}, {"a": 1}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:8])
def test_a_line_with_any_odd_value_is_an_episode_that_can_be_written_or_damaged(odd: Any) -> None:
    full = turn(
        logprobs=np.array([-0.5], np.float32),
        response_span=(0, 1),
        judge_scores=(1.0,),
        judge_votes=("good", None),
        hint="h",
        hint_prompt_ids=np.array([3], np.int32),
        version_spans=((2, 0, 1),),
        progress=0.5,
        teacher=TopK(ids=np.array([[4]], np.int32), logp=np.zeros((1, 1), np.float32), tail=np.zeros(1, np.float32)),
    )
    line = episode_to_json(episode(full, segments=(np.array([4], np.int32),), timings={"env": 1.0}, meta={"a": 1}))
    record = json.loads(line.rpartition(',"crc"')[0] + "}")
    for holder, key in list(leaves(record)):
        was, holder[key] = holder[key], odd
        with contextlib.suppress(ValueError, TraceError):
            read = episode_from_json(json.dumps(record))
            assert type(read.success) is bool
            assert type(read.turns) is tuple
            # a number in `meta` that JSON cannot hold is a TraceError
            again = episode_to_json(read)
            assert episode_to_json(episode_from_json(again)) == again
        holder[key] = was


def test_what_a_task_shares_with_others_is_kept_and_no_part_of_it() -> None:
    alone = episode()
    shared = replace(alone, task=replace(TASK, cluster="scene 308"))
    assert '"cluster"' not in episode_to_json(alone)
    assert episode_from_json(episode_to_json(shared)).task.cluster == "scene 308"
    # records from before have none, and are of the same task
    assert shared.task == alone.task


@pytest.mark.parametrize("junk", [b"\xff\xfe\n", b"[]\n", b"3\n", b"null\n", b"[" * 100_000 + b"\n", b"{}\n"])
def test_junk_is_reported(junk: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(junk + episode_to_json(episode()).encode() + b"\n")
    first, second = iter_trace(tmp_path / "t.jsonl")
    assert isinstance(first, TraceProblem)
    assert isinstance(second, Episode)


def test_a_newer_schema_is_an_error_not_a_skip(tmp_path: Path) -> None:
    record = json.loads(episode_to_json(episode())) | {"schema": SCHEMA + 1}
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: schema version 3.*upgrade turngym"):
        read_trace(tmp_path / "t.jsonl")


FIRST, SECOND = {"play": {"seed": 1}}, {"play": {"seed": 2}}
"""Settings of two evaluations."""


def test_a_trace_begins_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert read_specs(path) == {}
    for spec in (FIRST, FIRST, SECOND):
        with TraceWriter(path, spec) as writer:
            writer.write(episode(turn()))
    specs = read_specs(path)
    assert list(specs.values()) == [FIRST, SECOND]
    # each episode names those with which it was played, and lines of settings are no episodes
    first, second = specs
    assert [one.spec for one in read_trace(path)[0]] == [first, first, second]
    assert len(path.read_bytes().splitlines()) == 5
    # without settings an episode keeps those that it names
    with TraceWriter(tmp_path / "copy.jsonl") as writer:
        writer.write(read_trace(path)[0][2])
    assert (read_trace(tmp_path / "copy.jsonl")[0][0].spec, read_specs(tmp_path / "copy.jsonl")) == (second, {})


def test_settings_that_another_program_wrote_anew_are_settings(tmp_path: Path) -> None:
    """With blanks, in UTF-8, and without checksums, as an editor of JSON writes lines."""
    path = tmp_path / "t.jsonl"
    spec = {"play": {"system": "Küche"}}
    with TraceWriter(path, spec) as writer:
        writer.write(episode(turn()))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({k: v for k, v in row.items() if k != "crc"}, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert list(read_specs(path).values()) == [spec]
    episodes, problems = read_trace(path)
    assert ([one.spec for one in episodes], problems) == (list(read_specs(path)), [])


def test_settings_that_were_torn_or_changed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, FIRST) as writer:
        writer.write(episode(turn()))
    head, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head[:-9])
    assert read_specs(path) == {}
    with TraceWriter(path, FIRST) as writer:
        writer.write(episode(turn()))
    assert list(read_specs(path).values()) == [FIRST]
    assert len(read_trace(path)[0]) == 1
    path.write_bytes(head.replace(b'"seed":1', b'"seed":3') + line)
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1"):
        read_specs(path)


def flipped(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_changed_bit_becomes_another_episode(place: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("flip") / "t.jsonl"
    original = episode(
        turn(logprobs=np.array([-0.5], np.float32), response_span=(0, 1)), segments=(np.ones(1, np.int32),)
    )
    with TraceWriter(path) as writer:
        for _ in range(3):
            writer.write(original)
    flipped(path, place % path.stat().st_size, bit)
    try:
        read, problems = read_trace(path)
    except TraceError:  # the version of the schema
        return
    line = episode_to_json(original)
    assert all(episode_to_json(item) == line for item in read)
    # what is changed in the name of the checksum or in the last newline is no change of an episode
    assert len(read) == 3 or problems


def test_a_line_with_another_checksum_says_what_to_do_and_one_without_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = episode_to_json(episode(turn()))
    assert line.endswith('"}')
    old = line[: line.index(',"crc":"')] + "}"
    edited = line.replace('"observation":"o"', '"observation":"p"')
    path.write_text("\n".join([line, edited, old, old.replace('"observation":"o"', '"observation":"q"'), ""]))
    read, problems = read_trace(path)
    assert [item.turns[0].observation for item in read] == ["o", "o", "q"]
    assert [problem.line for problem in problems] == [2]
    assert 'checksum differs); a line that was edited on purpose is read without its field "crc"' in str(problems[0])
    with pytest.warns(UserWarning, match=r"t\.jsonl: 1 of 4 lines .*: line 2: it was changed"):
        assert len(read_episodes(path)) == 3


def test_a_torn_last_line_alone_is_no_reason_to_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "t.jsonl").write_text(episode_to_json(episode()) + "\n" + episode_to_json(episode())[:-40])
    assert len(read_episodes(tmp_path / "t.jsonl")) == 1
    assert not list(recwarn)


def test_a_full_disk_leaves_whole_lines_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(episode(sample=0))
        before = path.read_bytes()
        with small_disk(len(before) + 50):
            for _ in range(2):
                with pytest.raises(TraceError, match=r"t\.jsonl cannot be written: no room left"):
                    writer.write(episode(sample=1))
                assert path.read_bytes() == before
        writer.write(episode(sample=2))
    read, problems = read_trace(path)
    assert ([item.sample for item in read], problems) == ([0, 2], [])


def test_two_writers_share_a_file_and_each_sees_what_the_other_tore(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as one, TraceWriter(path) as two:
        one.write(episode(sample=0))
        two.write(episode(sample=1))
        with path.open("ab") as killed:
            killed.write(b'{"schema":2,"ta')
        one.write(episode(sample=2))
        two.write(episode(sample=3))
    read, problems = read_trace(path)
    assert [item.sample for item in read] == [0, 1, 2, 3]
    assert [problem.line for problem in problems] == [3]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"t\.jsonl cannot be written: .*; nothing was written"):
        TraceWriter(tmp_path / "file" / "t.jsonl")
    with pytest.raises(TraceError, match=r"cannot be written: Is a directory"):
        TraceWriter(tmp_path)


def test_missing_files_and_bad_meta_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace file"):
        read_trace(tmp_path / "none.jsonl")
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(episode())
        with pytest.raises(TraceError, match=r"task corridor/3, sample 2.*cannot be written"):
            writer.write(episode(meta={"model": object()}))
        with pytest.raises(TraceError, match="cannot be written"):
            writer.write(episode(meta={"loss": math.nan}))
        with pytest.raises(EpisodeError, match="its timing 'env' is inf"):
            episode(timings={"env": math.inf})
        with pytest.raises(TraceError, match=r"task corridor/3, sample 2.*turns\[0\]\.admissible"):
            writer.write(episode(turn(admissible=(1,))))
    assert len(read_trace(tmp_path / "t.jsonl")[0]) == 1
