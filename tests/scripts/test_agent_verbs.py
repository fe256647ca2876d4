"""The verbs eval, rollout, play and report, run in this process on generated games."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.agents import evaluate
from turngym.core.trace import read_trace
from turngym.envs.panels import collect_tasks, make_panel, write_panel
from turngym.scripts import eval as eval_verb
from turngym.scripts import play, report, rollout
from turngym.scripts.main import main


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> str:
    kwargs = {"split": "generated", "part": "eval"}
    env = gym.make("turngym.envs:turngym/ALFWorld-v0", **kwargs)
    tasks = collect_tasks(env, list(env.unwrapped.task_ids())[:6])
    folder = tmp_path_factory.mktemp("panels")
    return str(write_panel(make_panel("six", 1, "turngym/ALFWorld-v0", kwargs, tasks), folder))


def test_eval_writes_results_and_resumes(panel: str, tmp_path: Path, capsys: Any) -> None:
    argv = ["--panel", panel, "--agent", "expert", "--samples", "2", "--out", str(tmp_path)]
    assert eval_verb.main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["scores"]["overall"]["avg"]["mean"] == 1.0
    played = results["spec"]["play"]
    assert (played["tasks"]["panel"], played["tasks"]["size"], played["samples"]) == (panel, 6, 2)
    assert len(read_trace(tmp_path / "trace.jsonl")[0]) == 12
    assert "100.0 [54.1, 100.0]" in capsys.readouterr().out
    assert eval_verb.main(argv) == 0
    assert len(read_trace(tmp_path / "trace.jsonl")[0]) == 12
    assert main(["eval", *argv, "--max-turns", "7"]) == 2
    assert "play.env.max_turns 50, this evaluation has 7" in capsys.readouterr().err
    # more samples or fewer tasks are another evaluation, and it needs a folder of its own
    for words in (["--samples", "3"], ["--samples", "2", "--limit", "2"]):
        assert main(["eval", *argv[:4], *argv[6:], *words]) == 2
        assert "write to another folder" in capsys.readouterr().err


def test_the_command_and_the_function_write_the_same_results(panel: str, tmp_path: Path) -> None:
    words = ["--agent", "expert", "--noise", "0.4", "--samples", "2", "--seed", "3", "--limit", "4"]
    words += ["--max-turns", "20"]
    eval_verb.main(["--panel", panel, *words, "--slots", "3", "--out", str(tmp_path / "verb")])
    options: dict[str, Any] = {"noise": 0.4, "samples": 2, "seed": 3, "limit": 4, "max_turns": 20}
    evaluate(panel, "expert", **options, slots=3, out=tmp_path / "function", progress=False)
    written = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("verb", "function")]
    assert all(one.pop("seconds") > 0 and one.pop("date") for one in written)
    assert written[0] == written[1]
    traces = [read_trace(tmp_path / name / "trace.jsonl")[0] for name in ("verb", "function")]
    assert [e.turns for e in traces[0]] == [e.turns for e in traces[1]]
    assert [e.meta for e in traces[0]] == [e.meta for e in traces[1]]


def test_eval_refuses_what_is_not_the_panel(panel: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["eval", "--panel", "no-such-panel"]) == 2
    assert "there is no panel 'no-such-panel'" in capsys.readouterr().err
    manifest = json.loads(Path(panel).read_text())
    tasks = [{"sha": row[1]} for row in manifest["tasks"]]
    assert len(tasks) == 6
    Path(tmp_path / "six-v1.json").write_text(Path(panel).read_text().replace(tasks[0]["sha"], "f" * 64))
    assert main(["eval", "--panel", str(tmp_path / "six-v1.json")]) == 2
    assert "it was changed" in capsys.readouterr().err


def test_unknown_agents_environments_and_folders(tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "t.jsonl")]
    for argv, words in (
        (["--agent", "expart"], "unknown agent 'expart'"),
        (["--agent", f"model:{tmp_path}"], "holds no model: config.json, model.safetensors"),
        (["--agent", "replay:none.jsonl"], "none.jsonl"),
        (["--env", "turngym/ALFWord-v0"], "turngym/ALFWorld-v0"),
        (["--env-kwargs", "[1]"], "--env-kwargs '[1]' must be a JSON object"),
        (["--env-kwargs", '{"channel": "tool"}'], "env_kwargs has channel"),
        (["--env-kwargs", '{"env_id": "x"}'], "takes no argument 'env_id'"),
        (["--env-kwargs", '{"env_class": "this:s"}'], "env_class is no argument"),
        (["--env-kwargs", '{"max_episode_steps": 3}'], "valid: max_turns"),
        (
            ["--env-kwargs", '{"split": "generated"}', "--split", "generated_unseen"],
            "split is given by itself and among env_kwargs",
        ),
        (["--env-kwargs", '{"show_admissible": "off"}'], "show_admissible is 'off'; valid: true or false"),
        (["--tasks", "0"], "count is 0; valid: a whole number of at least 1"),
    ):
        assert main(["rollout", *out, *argv]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max-turns", "3", "--env-kwargs", '{"max_turns": 5}'], "max_turns is given by itself and among env_kwargs"),
        (["--env-kwargs", '{"channel": "text"}'], "--channel"),
    ],
)
def test_an_evaluation_is_told_nothing_twice(given: list[str], words: str, capsys: Any) -> None:
    assert main(["eval", "--panel", "alfworld-quickstart", "--agent", "random", "--limit", "1", *given]) == 2
    assert words in capsys.readouterr().err


def test_rollout_appends_only_when_asked(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.jsonl"
    argv = ["--out", str(out), "--agent", "random", "--tasks", "2", "--max-turns", "5"]
    assert rollout.main(argv) == 0
    assert main(["rollout", *argv]) == 2
    assert "add to it with --append" in capsys.readouterr().err
    assert rollout.main([*argv, "--append", "--samples", "2"]) == 0
    assert sorted((e.task.task_id[-1], e.sample) for e in read_trace(out)[0]) == [
        ("0", 0),
        ("0", 1),
        ("1", 0),
        ("1", 1),
    ]
    again = tmp_path / "again.jsonl"
    assert rollout.main(["--agent", f"replay:{out}", "--out", str(again), *argv[4:]]) == 0
    assert [e.turns for e in read_trace(again)[0]] == [e.turns for e in read_trace(out)[0][:2]]


def test_play_records_what_was_played(tmp_path: Path, capsys: Any) -> None:
    lines = iter(["?", "look", "q"])
    assert play.main(["--out", str(tmp_path / "mine.jsonl"), "--seed", "3"], ask=lambda: next(lines)) == 0
    (episode,) = read_trace(tmp_path / "mine.jsonl")[0]
    assert [t.action for t in episode.turns] == ["look"]
    assert "not solved (the player quit) in 1 turns, 0 of them invalid" in capsys.readouterr().out


@pytest.mark.long
def test_report_compares_runs_and_draws(tmp_path: Path, capsys: Any) -> None:
    for agent in ("expert", "random"):
        argv = ["--agent", agent, "--tasks", "6", "--samples", "2", "--max-turns", "30"]
        assert rollout.main([*argv, "--out", str(tmp_path / f"{agent}.jsonl")]) == 0
    metrics = tmp_path / "training"
    metrics.mkdir()
    rows = [{"step": 0, "kind": "eval", "eval/avg": 0.2, "eval/low": 0.1, "eval/high": 0.3}]
    for step in range(1, 7):
        rows.append({"step": step, "kind": "train", "time/train_s": 2.0 * step, "depth/cap": 9, "depth/hbar": 8.5})
        rows.append({"step": step, "kind": "eval", "eval/avg": 0.2 + step / 10, "eval/low": 0.1, "eval/high": 0.9})
    (metrics / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (metrics / "eval").mkdir()
    for step in (4, 6):
        source = tmp_path / ("random.jsonl" if step == 4 else "expert.jsonl")
        shutil.copy(source, metrics / "eval" / f"step_{step:06d}.jsonl")
    capsys.readouterr()
    runs = [f"random={tmp_path / 'random.jsonl'}", str(tmp_path / "expert.jsonl"), str(metrics)]
    assert report.main([*runs, "--out", str(tmp_path / "rep")]) == 0
    text = (tmp_path / "rep" / "report.md").read_text()
    assert [line.split(" | ")[0] for line in text.split("\n") if "100.0 [54.1" in line] == ["| expert", "| training"]
    assert "| training | 1 | 6 | 12 | 20.0 | 100.0 | 100.0 of 7 |" in text
    assert (tmp_path / "rep" / "report.png").stat().st_size > 10_000
    assert main(["report", *runs, runs[0]]) == 2
    assert "two runs are called 'random'" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "no trace.jsonl (an evaluation) and no metrics.jsonl" in capsys.readouterr().err
