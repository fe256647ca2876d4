"""Data files of one study as one: whatever the order of the files; other numbers and other settings are refused."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import study_records

from turngym.core.errors import TurngymError
from turngym.core.resolve import merged
from turngym.scripts.main import main
from turngym.trainers.study.merge import merge_records
from turngym.trainers.study.records import Cost, Record, Records, read_records, write_records

PLAY: dict[str, Any] = {"env": "E", "env_kwargs": {"a b": 1}}
GAME: dict[str, Any] = {"env": {"max_turns": 24}, "tasks": {"sha256": "a"}, "temperature": 0.85}


def cell(
    method: str, seed: int, group: str = "main", folder: str = "/here", more: Any = None, **changes: Any
) -> Record:
    """Two evaluations of two tasks."""
    costs = [Cost(seconds=t, cpu=t, turns=t, tokens=t) for t in (0.0, 1.0 + seed)]
    teacher = {"teacher": {"teacher": f"{folder}/loops/teacher"}}
    models = {"models": {"student": f"{folder}/loops/student"}, "method": teacher}
    run = {"steps": 20, "seed": seed}
    settings = merged([{"algorithm": method, **models, "play": PLAY, "run": run}, more or {}])
    curve = [{"a": 0.5, "b": 0.25 * n} for n in range(2)]
    given = {"world": "alfworld-loops", "group": group, "settings": settings, "game": GAME, **changes}
    return study_records.record(method, seed, costs, curve, every=20, **given)


def study(*records: Record, started: str = "2026-01-01") -> Records:
    made = [{"command": "turngym study run", "started": started}]
    return Records(title="t", baseline="opd", records=records, made_by=made)


OLD = study(cell("opd", 0), cell("turnopd", 0), cell("fixed-24", 0, "fixed"), cell("opd", 1), started="2026-01-02")
NEW = study(
    *(
        cell("fixed-6", 0, "fixed", "/there"),
        cell("fixed-24", 1, "fixed", "/there"),
        cell("turnopd", 1, folder="/there"),
    ),
    *(cell("partial", 0, "ablation", "/there"), cell("depth-only", 0, "ablation"), cell("p0.4-all", 0, "sweep")),
)
LAST = study(cell("opd", 0), cell("grpo-opd", 0, "family"))


def names(records: Sequence[Record]) -> list[str]:
    return [f"{record.method}:{record.seed}" for record in records]


def test_cells_stand_as_a_study_runs_them_whatever_the_order_of_the_files() -> None:
    for files in itertools.permutations({"old": OLD, "new": NEW, "last": LAST}.items()):
        joined = merge_records(dict(files))
        # by group and name, then by seed
        assert names(joined.records) == [
            *("depth-only:0", "partial:0", "grpo-opd:0", "fixed-24:0", "fixed-24:1", "fixed-6:0"),
            *("opd:0", "opd:1", "turnopd:0", "turnopd:1", "p0.4-all:0"),
        ]
        assert [made["started"] for made in joined.made_by] == ["2026-01-01", "2026-01-02"]


def test_one_file_is_left_as_it_is() -> None:
    mixed = study(cell("turnopd", 1), cell("opd", 0, more={"run": {"steps": 7}}))
    assert merge_records({"one": mixed}) == mixed


def test_a_cell_with_other_numbers_is_refused() -> None:
    first = OLD.records[3]
    other = study(replace(first, total=replace(first.total, cpu=7.0)))
    with pytest.raises(TurngymError, match=r"^old and new both have alfworld-loops/opd/seed1"):
        merge_records({"old": OLD, "new": other})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (cell("tcod", 0, more={"run": {"steps": 40}}), "tcod/seed0 of new has run.steps 40"),
        (
            cell("tcod", 0, game=merged([GAME, {"env": {"max_turns": 7}}])),
            "env.max_turns 24, .*new has env.max_turns 7",
        ),
        (cell("tcod", 0, game=GAME | {"tasks": {"sha256": "b"}}), "of new has tasks.sha256 'b'"),
        (
            cell("turnopd", 1, more={"optimizer": {"lr": 1}}),
            "of old has optimizer.lr None, .* of new has optimizer.lr 1",
        ),
        (cell("tcod", 0, more={"optimizer": {"lr": 1}}), ""),
        (cell("tcod", 0, folder="/other/pair"), ""),
        (cell("opd", 2, more={"models": {"device": "cuda"}, "workers": {"kind": "local", "processes": 4}}), ""),
        (cell("opd", 2, more={"models": {"student": "/here/x/student"}}), "has models.student 'x/student'"),
        (cell("tcod", 0, categories={"a": "place"}), r"has tasks played \['a', 'b'\], .* of new has tasks played"),
        (replace(cell("tcod", 0), evaluations=cell("tcod", 0).evaluations[1:]), r"has evaluations after steps \[20\]"),
        (cell("turnopd", 1, more={"method": {"turnopd": {"weight": "turn"}}}), "has method.turnopd.weight 'turn'"),
        (replace(cell("turnopd", 1), world="alfworld"), ""),
    ],
)
def test_cells_of_other_settings_are_refused(other: Record, said: str) -> None:
    files = {"old": OLD, "new": study(other)}
    if not said:
        assert len(merge_records(files).records) == 5
        return
    with pytest.raises(TurngymError, match=f"^not cells of one study: .*{said}") as error:
        merge_records(files)
    assert "\n" not in str(error.value)


def player(name: str, **game: Any) -> Record:
    """An agent of the same world that was evaluated and not trained."""
    one = cell(name, 0, settings={"agent": {"kind": "player", "name": name}}, game=merged([GAME, game]))
    return replace(one, evaluations=one.evaluations[:1])


@pytest.mark.parametrize(
    ("setting", "other"),
    [("play.env.id", "turnopd"), ("evaluation.panel", "opd"), ("algorithm", "opd"), ("judge", "opd")],
)
def test_files_and_code_of_ones_own_must_be_the_same(setting: str, other: str) -> None:
    """An environment in all cells of a world, the rest in those of a method."""
    files = [study(cell("opd", 0, contents={setting: "a"}))]
    files += [study(cell(other, 1, contents={setting: content})) for content in "ab"]
    assert len(merge_records({"one": files[0], "two": files[1]}).records) == 2
    with pytest.raises(TurngymError, match=f"has content of {setting} 'a', .* has content of {setting} 'b'"):
        merge_records({"one": files[0], "two": files[2]})


def test_agents_share_the_game_and_nothing_of_training() -> None:
    expert = study(cell("opd", 0), player("expert"))
    assert names(merge_records({"one": expert, "again": expert}).records) == ["expert:0", "opd:0"]
    assert len(merge_records({"old": OLD, "new": study(player("expert"))}).records) == 5
    # who follows a script has no temperature
    assert merge_records({"old": OLD, "new": study(player("expert", temperature=None))})
    with pytest.raises(TurngymError, match=r"of old has env.max_turns 24, .*expert/seed0 of new has env.max_turns 3"):
        merge_records({"old": OLD, "new": study(player("expert", env={"max_turns": 3}))})


def test_a_long_value_is_cut() -> None:
    other = cell("tcod", 0, categories={f"task {n}": "place" for n in range(100)})
    with pytest.raises(TurngymError, match="has tasks played") as error:
        merge_records({"old": OLD, "new": study(other)})
    assert len(str(error.value)) < 300


def test_studies_with_other_baselines_are_not_one() -> None:
    with pytest.raises(TurngymError, match="new compares with grpo, old with opd"):
        merge_records({"old": OLD, "new": replace(NEW, baseline="grpo")})


@pytest.mark.long
def test_the_command_merges_files_and_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {"old": OLD, "new": NEW}.items():
        (tmp_path / name).mkdir()
        write_records(content, tmp_path / name / "study.json")
    old, new = (tmp_path / name / "study.json" for name in ("old", "new"))
    packed = tmp_path / "old.json.gz"
    packed.write_bytes(gzip.compress(old.read_bytes()))
    for out, files in {"a": [old, new], "b": [new, packed]}.items():
        assert main(["study", "show", *map(str, files), "--out", str(tmp_path / out)]) == 0
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / out).glob("*.csv")} for out in "ab")
    assert a == b
    assert len(read_records(tmp_path / "a").records) == 10
    assert "fixed-24" in capsys.readouterr().out
    assert main(["study", "show", str(old), str(tmp_path / "no"), "--out", str(tmp_path / "c")]) == 2
    assert not (tmp_path / "c").exists()
