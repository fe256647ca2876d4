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

from turngym.envs.core.errors import TurngymError
from turngym.scripts.main import main
from turngym.scripts.study.grid import Cost, Record
from turngym.scripts.study.results import Study, merge_studies
from turngym.scripts.study.turnopd import read_study, write_study

WORDS = "--env E --env-kwargs '{\"a b\": 1}' --steps 20"


def cell(
    method: str, seed: int, group: str = "main", folder: str = "/here", words: str = WORDS, **changes: Any
) -> Record:
    """Two evaluations of two tasks."""
    costs = [Cost(seconds=t, cpu=t, turns=t, tokens=t) for t in (0.0, 1.0 + seed)]
    models = f"--student {folder}/loops/student --teacher {folder}/loops/teacher"
    command = f"turngym train --algorithm {method} {models} {words} --seed {seed} --out {folder}/{method}"
    curve = [{"a": 0.5, "b": 0.25 * n} for n in range(2)]
    given = {"world": "alfworld-loops", "group": group, "command": command, **changes}
    return study_records.record(method, seed, costs, curve, every=20, **given)


def study(*records: Record, started: str = "2026-01-01") -> Study:
    return Study(records=records, made_by=[{"command": "turngym study turnopd", "started": started}])


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
        merged = merge_studies(dict(files))
        assert names(merged.records) == [
            *("opd:0", "turnopd:0", "depth-only:0", "partial:0", "grpo-opd:0", "fixed-6:0", "fixed-24:0", "p0.4-all:0"),
            *("opd:1", "turnopd:1", "fixed-24:1"),
        ]
        assert [made["started"] for made in merged.made_by] == ["2026-01-01", "2026-01-02"]


def test_one_file_is_left_as_it_is() -> None:
    mixed = study(cell("turnopd", 1), cell("opd", 0, words="--steps 7"))
    assert merge_studies({"one": mixed}) == mixed


def test_a_cell_with_other_numbers_is_refused() -> None:
    first = OLD.records[3]
    other = study(replace(first, total=replace(first.total, cpu=7.0)))
    with pytest.raises(TurngymError, match=r"^old and new both have alfworld-loops/opd/seed1, with other numbers"):
        merge_studies({"old": OLD, "new": other})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (cell("tcod", 0, words=WORDS.replace("20", "40")), "tcod/seed0 of new has --steps 40"),
        (cell("tcod", 0, words="--env E --steps 20"), "tcod/seed0 of new has --env-kwargs nothing"),
        (cell("tcod", 0, words=f"{WORDS} --lr 1"), "seed0 of old has --lr nothing, .* of new has --lr 1"),
        (cell("tcod", 0, words=f"{WORDS} --no-tensorboard"), "of old has --no-tensorboard nothing"),
        (cell("tcod", 0, folder="/other/pair"), ""),
        (cell("tcod", 0, words=f"{WORDS} --checkpoint-every 10 --keep-checkpoints 4"), ""),
        (replace(cell("tcod", 0), command=cell("tcod", 0).command.replace("loops/", "x/")), "has --student x/student"),
        (cell("tcod", 0, samples=2), "has samples 2"),
        (cell("tcod", 0, categories={"a": "place"}), "opd/seed0 of old has tasks a b, .* of new has tasks a"),
        (replace(cell("tcod", 0), evaluations=cell("tcod", 0).evaluations[1:]), "has evaluations after steps 20"),
        (cell("turnopd", 1, "ablation"), "has group ablation"),
        (
            replace(cell("turnopd", 1), command=cell("turnopd", 1).command.replace("turnopd", "turnopd --p 1", 1)),
            "turnopd/seed0 of old has method's options --algorithm turnopd, .*has method's options .* turnopd --p 1",
        ),
        (replace(cell("turnopd", 1), world="alfworld", command="turngym train"), ""),
    ],
)
def test_cells_of_other_settings_are_refused(other: Record, said: str) -> None:
    files = {"old": OLD, "new": study(other)}
    if not said:
        assert len(merge_studies(files).records) == 5
        return
    with pytest.raises(TurngymError, match=f"^not cells of one study: .*{said}") as error:
        merge_studies(files)
    assert "\n" not in str(error.value)


def test_a_long_value_is_cut() -> None:
    other = cell("tcod", 0, categories={f"task {n}": "place" for n in range(100)})
    with pytest.raises(TurngymError, match=r"has tasks task 0 task 1 .*\.\.\.$"):
        merge_studies({"old": OLD, "new": study(other)})


def test_the_command_merges_files_and_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {"old": OLD, "new": NEW}.items():
        write_study(content, tmp_path / name)
    old, new = (tmp_path / name / "study.json" for name in ("old", "new"))
    packed = tmp_path / "old.json.gz"
    packed.write_bytes(gzip.compress(old.read_bytes()))
    for out, files in {"a": [old, new], "b": [new, packed]}.items():
        assert main(["study", "turnopd", "--data", *map(str, files), "--out", str(tmp_path / out)]) == 0
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / out / "tables").iterdir()} for out in "ab")
    assert a == b
    assert len(read_study(tmp_path / "a" / "tables" / "study.json").records) == 10
    assert "| fixed-24 | 2 |" in capsys.readouterr().out
    assert main(["study", "turnopd", "--data", str(old), str(tmp_path / "no"), "--out", str(tmp_path / "c")]) == 2
    assert not (tmp_path / "c").exists()
