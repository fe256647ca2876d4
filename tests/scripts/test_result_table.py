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
import web_browser
from forged import forge

from turngym.agents import evaluate
from turngym.agents.evaluation.packed import packed
from turngym.agents.evaluation.packed_file import PackedResult, read_result
from turngym.agents.evaluation.scores import score, task_means
from turngym.agents.evaluation.seeds import rise
from turngym.agents.play_spec import EvalSpec
from turngym.core.episode import Episode
from turngym.core.nested import put
from turngym.core.spec import read, to_table
from turngym.scripts.main import main
from turngym.scripts.result_table import grouped, write_table


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
    preset = with_settings(results["shop"], {"preset": "turnopd"})
    assert [group.title for group in grouped({"shop": results["shop"], "other": preset})] == [
        "webshop-quickstart-v1",
        "webshop-quickstart-v1, preset turnopd",
    ]


def test_differences_are_paired_where_tasks_and_settings_are_the_same(results: dict[str, PackedResult]) -> None:
    found = grouped(results)[0].paired()
    assert found is not None
    (header, rows), notes = found
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    known = rise([task_means(results["expert"].episodes)], [task_means(results["team/noisy"].episodes)])
    shown = f"{100 * known.mean:+.1f} [{100 * known.low:+.1f}, {100 * known.high:+.1f}]"
    # scripted players have no training seeds, so that one run of each is all there is
    assert cells["team/noisy"]["expert"] == shown
    assert known.mean < 0
    assert cells["expert"]["team/noisy"].startswith(f"{-100 * known.mean:+.1f}")
    assert cells["expert"]["hasty"] == "-"
    assert "expert and hasty: played otherwise: max_turns 3 and 24" in notes
    assert grouped(results)[1].paired() is None


def test_tasks_that_both_played_are_compared(results: dict[str, PackedResult]) -> None:
    expert, noisy = results["expert"], results["team/noisy"]
    few = replace(expert, episodes=expert.episodes[:3])
    found = grouped({"few": few, "noisy": noisy})[0].paired()
    assert found is not None
    tasks = {one.task.task_id for one in few.episodes}
    both = few.episodes, [one for one in noisy.episodes if one.task.task_id in tasks]
    known = rise(*([task_means(played)] for played in both))
    assert found[0][1][1][1] == f"{100 * known.mean:+.1f} [{100 * known.low:+.1f}, {100 * known.high:+.1f}]"
    parts = grouped({"few": few, "noisy": noisy})[0].parts()
    assert parts is not None
    assert dict(zip(*[parts[0], parts[1][0]], strict=True))["tasks"] == "3"


def played(results: dict[str, PackedResult], *wins: bool) -> PackedResult:
    """The expert's result with other outcomes, one for each of its four tasks."""
    one = results["expert"]

    def with_turns(episode: Episode, won: bool) -> Episode:
        # runs that say the same to the letter are one run
        first, *others = episode.turns
        return replace(episode, success=won, turns=(replace(first, response=f"{first.response} {wins}"), *others))

    episodes = tuple(with_turns(episode, won) for episode, won in zip(one.episodes, wins, strict=True))
    return replace(one, episodes=episodes, scores=json.loads(json.dumps(score(episodes).to_json())))


def test_training_seeds_of_a_method_stand_together(results: dict[str, PackedResult]) -> None:
    named = {
        "a-seed0": played(results, True, True, False, False),
        "a-seed1": played(results, True, True, True, True),
        "b-seed1": played(results, True, False, False, False),
        "b-seed0": played(results, False, False, True, False),
        "expert": results["expert"],
        "c-seed7": played(results, False, False, False, False),
        "c-seed8": played(results, False, False, False, True),
    }
    (group,) = grouped(named)
    table = group.by_method()
    assert table is not None
    rows = {row[0]: row[1:] for row in table[1]}
    assert list(rows) == ["expert", "a", "b", "c"]
    # a: 50 and 100 %: variance .125, less that of chance, (8 / 16) / 3 over four tasks
    assert rows["a"][0] == "2"
    assert rows["a"][1].startswith("75.0 [")
    assert rows["a"][2:6] == ["28.9", "50.0", "100.0", "4"]
    assert rows["expert"][0] == "1"
    assert rows["expert"][2] == "-"
    found = group.paired()
    assert found is not None
    cells = {row[0]: dict(zip(found[0][0][1:], row[1:], strict=True)) for row in found[0][1]}
    # b minus a: 25 - 50 and 25 - 100
    runs = [[[1, 1, 0, 0], [1, 1, 1, 1]], [[0, 0, 1, 0], [1, 0, 0, 0]]]
    known = rise(*([dict(zip("abcd", map(float, seed), strict=True)) for seed in side] for side in runs))
    assert cells["b"]["a"] == f"-50.0 [{100 * known.low:+.1f}, {100 * known.high:+.1f}]"
    assert cells["a"]["expert"].startswith("-25.0 [")
    # no training seed in common: all count, and nothing is paired
    assert cells["c"]["a"].startswith("-62.5 [")
    assert any("family of 6 comparisons" in note for note in found[1])
    assert grouped({"a-seed0": named["a-seed0"], "expert": named["expert"]})[0].by_method() is None


def with_settings(result: PackedResult, settings: dict[str, Any]) -> PackedResult:
    """The result with other values at some paths of its settings."""
    table = to_table(result.spec)
    for path, value in settings.items():
        put(table, path, None)
        put(table, path, value)
    return replace(result, spec=read(EvalSpec, table, "test"))


def model(weights: str, **chat: Any) -> dict[str, Any]:
    """Settings of a model that plays."""
    return {"agent": {"kind": "model", "folder": "m", "weights": weights, "chat": chat}}


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        (("m", "m-seed0"), ({}, {}), "m has no training seed in its name, and m-seed0 has one"),
        (("m-seed0", "m-seed00"), ({}, {}), "m-seed0 and m-seed00 are both of training seed 0"),
        (("m-seed0", "m-seed1"), (model("ab"), model("ab")), r"of the same model \(files ab\)"),
        (("m-seed0", "m-seed1"), ({}, {"play.env.max_turns": 10**9}), "max_turns 24 and 1000000000"),
        (("m-seed0", "m-seed1"), (model("a", system="x"), model("b", system="y")), "system 'x' and 'y'"),
        (("m-seed0", "m-seed1"), ({}, {"agent": {"kind": "random"}}), "kind 'player' and 'random'"),
    ],
)
def test_files_that_are_no_seeds_of_one_method_stand_alone(
    names: tuple[str, ...], settings: tuple[dict[str, Any], ...], said: str, results: dict[str, PackedResult]
) -> None:
    wins = (True, True, True, False), (True, False, False, False)
    named = {
        name: with_settings(played(results, *won), more) for name, won, more in zip(names, wins, settings, strict=True)
    }
    (group,) = grouped(named)
    assert {name: [*runs.values()] for name, runs in group.methods.items()} == {n: [r] for n, r in named.items()}
    assert re.search(said, "\n".join(group.lines()))
    assert group.by_method() is None


def test_files_without_a_common_task_stand_alone(results: dict[str, PackedResult]) -> None:
    one = results["expert"]
    named = {f"m-seed{n}": replace(one, seal=f"{n}", episodes=one.episodes[2 * n : 2 * n + 2]) for n in range(2)}
    (group,) = grouped(named)
    assert group.apart() == {"m": "m-seed0, m-seed1 have no task in common"}
    assert [*group.methods] == ["m-seed0", "m-seed1"]


def test_one_sealed_file_is_one_seed_and_models_of_their_own_are_several(results: dict[str, PackedResult]) -> None:
    one, other = (
        with_settings(played(results, True, True, True, seed == 0), {**model(weights), "play.seed": seed})
        for seed, weights in enumerate("ab")
    )
    assert not grouped({"m-seed0": one, "m-seed1": other})[0].apart()
    copied = replace(one, seal="c0ffee")
    (group,) = grouped({f"m-seed{seed}": copied for seed in range(3)})
    assert "m-seed0 and m-seed1 are one run: 4 of 4 episodes are the same" in group.apart()["m"]
    assert len(group.methods) == 3


def test_runs_that_share_nearly_all_episodes_are_one_run(results: dict[str, PackedResult]) -> None:
    one = results["expert"]
    turns = {f"{task} {sample}": f"look {task} {sample}" for task in range(5) for sample in range(2)}

    def run(seed: int, others: int) -> PackedResult:
        """Ten episodes, of which so many are others than in every other run."""
        first = one.episodes[0]
        played = [
            replace(
                first,
                task=replace(first.task, task_id=key.split()[0]),
                sample=int(key[-1]),
                turns=(replace(first.turns[0], response=f" {said}  {seed if place < others else ''}\n"),),
            )
            for place, (key, said) in enumerate(turns.items())
        ]
        return with_settings(replace(one, episodes=tuple(played)), {**model(f"{seed:016x}"), "play.seed": seed})

    for others, why in ((1, "9 of 10 episodes are the same"), (2, "")):
        (group,) = grouped({f"m-seed{seed}": run(seed, others) for seed in range(2)})
        assert group.apart() == ({"m": f"m-seed0 and m-seed1 are one run: {why}"} if why else {})


def test_a_file_that_cannot_be_read_is_named_and_the_others_make_the_table(
    results: dict[str, PackedResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = replace(results["shop"], date=3)  # type: ignore[arg-type]
    forge(bad, tmp_path / "in" / "bad.result.xz")
    table = ["result", "table", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(table) == 2
    assert re.search("bad.result.xz is not a packed result: .*date", capsys.readouterr().err)
    results["shop"].write(tmp_path / "in" / "shop.result.xz")
    assert main(table) == 1
    said = capsys.readouterr()
    assert "| shop |" in said.out
    assert "bad.result.xz" in said.err


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
    files = re.findall(r'href="([^"]+)" download>(\w+)<', html)
    assert sorted((tmp_path / file).resolve().relative_to(folder.resolve()).as_posix() for file, _ in files) == sorted(
        f"{name}.result.xz" for name in results
    )
    assert all(read_result(tmp_path / file).seal.startswith(seal) for file, seal in files)
    held = dict(re.findall(r'<script type="application/octet-stream" data-result="([^"]+)">([^<]+)', html))
    assert held.keys() == results.keys()
    data = json.loads(gzip.decompress(base64.b64decode(held["team/noisy"])))
    first = results["team/noisy"].episodes[0]
    task, sample, category, status, won, score, turns, final = data["episodes"][0]
    assert (task, sample, category, status) == (first.task.task_id, 0, first.task.category, first.status.value)
    assert (won, score, data["texts"][final]) == (first.success, first.score, first.final_observation)
    said = [(data["texts"][seen], data["texts"][response]) for seen, response, *_ in turns]
    assert said == [(turn.observation, turn.response) for turn in first.turns]


def test_the_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """It sorts by a heading, lists a result's episodes and shows one turn by turn."""
    path = web_browser.find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome is installed")
    write_table(folder, tmp_path, "Ours")
    with web_browser.Browser(path) as browser:
        browser.open((tmp_path / "index.html").as_uri())
        names = "[...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
        assert browser.value(names) == ["expert", "team/noisy", "hasty"]
        browser.value("document.querySelectorAll('th')[5].click()")  # turns, most first
        assert browser.value(names)[0] == "team/noisy"
        browser.value("document.querySelectorAll('th')[5].click()")
        assert browser.value(names) == ["hasty", "expert", "team/noisy"]
        browser.click("a[href='#team%2Fnoisy']", navigates=False)  # a result in a folder of its own
        browser.wait_for("document.querySelectorAll('#view tbody tr').length == 8")
        assert "of 8 episodes won" in browser.text("#view .soft")
        browser.click("#view tbody a", navigates=False)
        browser.wait_for("document.querySelectorAll('.turn').length > 1")
        assert "Your task is to" in browser.text(".turn pre")
        assert browser.text(".turn .action")


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "table", str(tmp_path)]) == 2
    assert "holds no packed results (*.result.xz)" in capsys.readouterr().err
