"""Tables on a terminal: whatever its width, no number and no header is cut, and every column is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turngym.agents import evaluate
from turngym.core.errors import TurngymError
from turngym.core.tables import csv_text, filled, latex, lines_of, print_table, stacked
from turngym.scripts import plan
from turngym.scripts.main import main
from turngym.trainers.model_shapes import SHAPES, config_of

WIDE = (
    ["run", *(f"column number {n}" for n in range(9))],
    [[f"run {r}", *(f"{r}{n},234.5" for n in range(9))] for r in (1, 2)],
)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_no_cell_is_cut(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(WIDE, "A title that is longer than the table is no reason to fold it to the width of the table, is it?")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "\u2026" not in text
    assert all(cell in text for row in WIDE[1] for cell in row)
    assert text.splitlines()[0].startswith("A title that is longer than the table is no reason to fold it to")


def test_a_table_that_is_too_wide_is_printed_in_parts_that_begin_alike() -> None:
    parts = stacked((["a b", "long name", "x"], [["1", "22", "333"]]), 20)
    assert parts == [(["a\nb", "long\nname", "x"], [["1", "22", "333"]])]
    parts = stacked((["a b", "long name", "x"], [["1", "22", "333"]]), 14)
    assert parts == [(["a\nb", "long\nname"], [["1", "22"]]), (["a\nb", "x"], [["1", "333"]])]
    whole = (["a b", "long name", "x"], [["1", "22", "333"]])
    assert stacked(whole, 25) == [whole]


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table((["run", "Avg [bold]"], [["[red]x", "1.0 [0.5, 1.5]"]]))
    text = capsys.readouterr().out
    assert "[red]x" in text
    assert "Avg [bold]" in text
    assert "1.0 [0.5, 1.5]" in text


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("x;=cmd|' /C calc'!A0", "x;'=cmd|' /C calc'!A0"),
        ("\uff1d1", "'\uff1d1"),
        ("-1.5e-3", "-1.5e-3"),
        ("+1.0 [-0.5, +2.5] *", '"+1.0 [-0.5, +2.5] *"'),
        ("a\t=1", "a\\t=1"),
    ],
)
def test_a_cell_is_no_formula_in_a_spreadsheet(cell: str, written: str) -> None:
    assert csv_text([["a"], [cell]]) == f"a\n{written}\n"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("see `a_b*`, [x](y)", "see `a_b*`, [x]\\(y)"),
        ("```<b>`", "\\`\\`\\`&lt;b&gt;\\`"),
        ("`<b>``", "\\`&lt;b&gt;\\`\\`"),
        ("- a\n- # b", "- a\n- \\# b"),
    ],
)
def test_sentences_hold_code_and_no_other_markup(text: str, written: str) -> None:
    assert lines_of(text) == written


def test_a_label_is_a_name() -> None:
    assert r"\label{tab:a-input-b}" in latex((["x"], [["1"]]), "c", r"a}\input{b")


def test_a_value_of_a_page_holds_no_marks() -> None:
    assert filled("__A__-__B__", {"__A__": "__B__ \\1", "__B__": "x"}) == "__B__ \\1-x"


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize(
    "words", ["plan --gpus 1 32", "eval --panel alfworld-quickstart --limit 1 --samples 1 --no-verify"]
)
def test_verbs_print_whole_tables(
    words: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(words.split()) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "\u250f\u2503\u2521\u2502\u2514"]
    assert drawn
    assert max(map(len, drawn)) <= int(columns)
    assert not any("\u2026" in line for line in drawn)


def test_plan_knows_consumer_cards_and_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for chip in ("3090", "4090", "5090", "cpu"):
        words = ["plan", "--student", "tiny", "--teacher", "none", "--chip", chip, "--eval-episodes", "0"]
        assert main(words) == 0
    assert "taught by nobody on CPU (" in capsys.readouterr().out
    assert main(["plan", "--student", "8B", "--teacher", "none", "--chip", "4090", "--gpus", "1"]) == 1
    with pytest.raises(TurngymError, match=r"chip '4080' is unknown; .*Did you mean '4090'"):
        plan.plan_table(plan.PlanOptions(chip="4080"))


def test_plan_names_no_teacher_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for teacher, named in (("8B", True), ("none", False)):
        assert main(["plan", "--teacher", teacher, "--gpus", "8"]) == 0
        said = capsys.readouterr().out
        assert ("sharded over all GPUs; the float32 teacher, whole on every GPU. update" in said) is named
        assert ("sharded over all GPUs. update" in said) is not named


def test_plan_takes_what_a_run_is_configured_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"student": "tiny", "episodes": 6, "max_turns": 7, "max_new_tokens": 8, "slots": 9, "autocast": "off"}
    table |= {"gradient_checkpointing": False, "panel": "alfworld-quickstart", "eval_limit": 5, "eval_samples": 3}
    table |= {"lora": {"rank": 4}}
    asked = plan.of_run(table)
    assert (asked.student, asked.teacher, asked.work.precision, asked.work.checkpointing) == (
        "tiny",
        None,
        "float32",
        False,
    )
    assert (asked.work.episodes, asked.work.turns, asked.work.response, asked.work.slots) == (6, 7, 8, 9)
    assert (asked.work.eval_episodes, asked.work.lora_rank) == (15, 4)
    run = plan.of_run(table | {"steps": 30, "eval_every": 7})
    assert (run.steps, run.eval_every) == (30, 7)
    # of a preset: its turns, responses and samples, each unless it was given beside it
    left = {name: table[name] for name in ("student", "panel", "eval_limit")} | {"preset": "verl-agent"}
    work = plan.of_run(left).work
    assert (work.turns, work.response, work.eval_episodes) == (50, 512, 5)
    assert (work.memory, work.checkpointing, work.precision, work.engine) == ("verl-agent:2", False, "float32", "local")
    work = plan.of_run({**left, "max_turns": 7, "eval_samples": 3}).work
    assert (work.turns, work.response, work.eval_episodes) == (7, 512, 15)
    (tmp_path / "config.toml").write_text('student = "tiny"\nepisodes = 6\n[optimizer]\nlr = 1.0\n')
    words = ["plan", "--config", str(tmp_path / "config.toml"), "--turns", "3", "--gpus", "1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "tiny taught by nobody" in text
    assert "6 episodes of 1 row and 750 tokens" in text
    assert main([*words, "--batch-size", "3"]) == 2
    assert "there is no option --batch-size. Did you mean '--episodes'" in capsys.readouterr().err


def test_plan_reads_a_run_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for table, said in (
        ({"optimizer": 3}, "optimizer is 3"),
        ({"steps": "x"}, "steps is 'x'"),
        ({"episodes": "64"}, "episodes is '64'"),
        ({"panel": 3}, "panel is 3"),
        ({"rollout_dtype": "float8"}, "rollout_dtype is 'float8'"),
        ({"panel": "alfworld-quickstart", "eval_limit": -5}, "eval_limit is -5"),
        ({"autocast": "nope"}, "autocast is 'nope'"),
        ({"nonsense": 3}, "no setting 'nonsense'"),
    ):
        with pytest.raises(TurngymError, match=said):
            plan.of_run(table)
    none = dict.fromkeys(("max_turns", "eval_limit", "rollout_dtype", "teacher"), "none")
    asked = plan.of_run(none | {"panel": "alfworld-quickstart"})
    assert (asked.teacher, asked.work.turns, asked.work.eval_episodes) == (None, 50, 400)
    more = {"panel": "alfworld-quickstart", "also": ["turngym/WebShop-v0,panel=webshop-quickstart"], "eval_limit": 5}
    assert plan.of_run(more).work.eval_episodes == 2 * 5 * 4
    (tmp_path / "config.toml").write_text("optimizer = 3\n")
    assert main(["plan", "--config", str(tmp_path / "config.toml")]) == 2
    assert "config.toml: optimizer is 3" in capsys.readouterr().err


def test_plan_knows_models_by_their_names_and_says_what_a_whole_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--teacher", "none", "--gpus", "1", "--student"]
    totals = []
    for steps in ("100", "200"):
        assert main([*words, "Qwen/Qwen2.5-1.5B-Instruct", "--steps", steps, "--eval-every", "50"]) == 0
        said = capsys.readouterr().out.replace("\n", " ")
        totals.append(
            float(said.partition(" evaluations take, in hours by GPUs, 1: ")[2].split(".  ")[0].split()[0][:-1])
        )
        assert f"{steps} steps and {1 + int(steps) // 50} evaluations" in said
    assert totals[0] < totals[1] < 2.01 * totals[0]
    assert main([*words, "Qwen/Qwen2.5-7B-Instruct@main", "--chip", "3090"]) == 1
    said = capsys.readouterr().out
    assert "where it does not fit: --lora-rank 16, --rollout-dtype bfloat16, a smaller --micro-tokens" in said
    assert "--teacher-dtype" not in said.partition("where it does not fit")[2].partition(".")[0]


def test_sizes_are_those_that_the_models_publish() -> None:
    from turngym.trainers.model_shapes import shape_named

    published = {"Qwen2.5-0.5B": 0.49, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.61, "Qwen3-1.7B": 1.72}
    for name, billions in published.items():
        assert shape_named(f"Qwen/{name}").parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_plan_takes_an_adapter_for_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    config_of(SHAPES["0.6B"]).save_pretrained(base)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    named, found = (plan.PlanOptions(student=name, teacher=None, gpus=(1,)) for name in ("0.6B", str(adapter)))
    assert plan.plan_table(found) == plan.plan_table(named)


def test_the_table_of_a_result_reads_the_same_in_python_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = evaluate("alfworld-quickstart", "expert", samples=1, limit=1, verify=False, progress=False)
    wide = str(result)
    monkeypatch.setenv("COLUMNS", "40")
    assert str(result) == wide
