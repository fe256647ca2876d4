"""The table of packed results: rows, paired differences, what is not compared; the page holds every episode."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate
from turngym.agents.evaluation.packed import packed
from turngym.agents.evaluation.packed_file import PackedResult
from turngym.agents.evaluation.scores import compare
from turngym.scripts.main import main
from turngym.scripts.result_table import grouped


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PackedResult]:
    """Expert and noisy expert in one panel, the expert with fewer turns in the same, and one of another panel."""
    folder = tmp_path_factory.mktemp("runs")
    plays: dict[str, tuple[str, dict[str, Any]]] = {
        "expert": ("alfworld-quickstart", {}),
        "team/noisy": ("alfworld-quickstart", {"noise": 0.7, "samples": 2}),
        "hasty": ("alfworld-quickstart", {"max_turns": 3}),
        "shop": ("webshop-quickstart", {}),
    }
    made = {}
    for name, (panel, more) in plays.items():
        given = {"samples": 1, "limit": 4, "workers": 0, "progress": False, **more}
        evaluate(panel, "expert", out=folder / name, **given)
        made[name] = packed(folder / name)
    return made


@pytest.fixture(scope="module")
def folder(results: dict[str, PackedResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    for name, result in results.items():
        result.write(folder / f"{name}.result.xz")
    return folder


def test_results_stand_by_panel_the_best_first(results: dict[str, PackedResult]) -> None:
    household, shop = grouped(results)
    assert (household.title, shop.title) == ("alfworld-quickstart-v1", "webshop-quickstart-v1")
    assert next(iter(household.results)) == "expert"
    header, rows = household.table()
    row = dict(zip(header, rows[0], strict=True))
    assert (row["result"], row["samples"], row["tasks"], row["errors"]) == ("expert", "1", "4", "0")
    assert row["success % [95 %]"] == "100.0 [39.8, 100.0]"
    preset = replace(results["shop"], settings={**results["shop"].settings, "preset": "turnopd"})
    assert [group.title for group in grouped({"shop": results["shop"], "other": preset})] == [
        "webshop-quickstart-v1",
        "webshop-quickstart-v1, preset turnopd",
    ]


def test_differences_are_paired_where_tasks_and_settings_are_the_same(results: dict[str, PackedResult]) -> None:
    found = grouped(results)[0].paired()
    assert found is not None
    (header, rows), notes = found
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    known = compare(results["expert"].episodes, results["team/noisy"].episodes)
    shown = f"{100 * known.mean:+.1f} [{100 * known.low:+.1f}, {100 * known.high:+.1f}]"
    assert cells["team/noisy"]["expert"] == shown
    assert known.mean < 0
    assert cells["expert"]["team/noisy"].startswith(f"{-100 * known.mean:+.1f}")
    assert cells["expert"]["hasty"] == "-"
    assert "expert and hasty were played otherwise: make.max_turns 24 and 3" in notes
    assert grouped(results)[1].paired() is None


def test_page_csv_and_markdown(
    folder: Path, results: dict[str, PackedResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["result", "table", str(folder), "--out", str(tmp_path), "--title", "Ours <3"]) == 0
    assert "| team/noisy |" in capsys.readouterr().out
    assert "## webshop-quickstart-v1" in (tmp_path / "results.md").read_text()
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["result"] for row in rows if row["panel"] == "webshop-quickstart-v1"] == ["shop"]
    assert {row["success"] for row in rows if row["result"] == "expert"} == {"1.0"}
    html = (tmp_path / "index.html").read_text()
    assert "<title>Ours &lt;3</title>" in html
    assert not re.search(r'(src|href)="https?:', html)
    held = dict(re.findall(r'<script type="application/octet-stream" data-result="([^"]+)">([^<]+)', html))
    assert held.keys() == results.keys()
    data = json.loads(gzip.decompress(base64.b64decode(held["team/noisy"])))
    first = results["team/noisy"].episodes[0]
    task, sample, category, status, won, score, turns, final = data["episodes"][0]
    assert (task, sample, category, status) == (first.task.task_id, 0, first.task.category, first.status.value)
    assert (won, score, data["texts"][final]) == (first.success, first.score, first.final_observation)
    said = [(data["texts"][seen], data["texts"][response]) for seen, response, *_ in turns]
    assert said == [(turn.observation, turn.response) for turn in first.turns]


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "table", str(tmp_path)]) == 2
    assert "holds no packed results (*.result.xz)" in capsys.readouterr().err
