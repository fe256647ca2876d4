"""Recipes of the paper's runs: printed commands are such as our own verbs take, with the paper's settings in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro

from turngym.agents.model_server import ServePolicy
from turngym.envs.core.errors import TurngymError
from turngym.envs.panels import load_panel
from turngym.scripts import train
from turngym.scripts.eval import EvalOptions
from turngym.scripts.main import main
from turngym.scripts.report import Options as ReportOptions
from turngym.scripts.result import Pack, Table
from turngym.scripts.study import recipe as verb
from turngym.scripts.study.recipe import RECIPES, Step, paper_steps, render

SHELL = {"$PLAY": "http://a:1,http://b:2", "$SCORE": "http://a:1,http://b:2", "$JUDGES": "http://j:1/v1"}
"""What the script's head sets."""


def trained(step: Step) -> Any:
    """The settings that a step trains with; None for other steps."""
    if "train" not in step.words:
        return None
    words = list(step.words[step.words.index("train") + 1 :])
    return train.parse([SHELL.get(word, "text.txt" if word == "$TEXT" else word) for word in words])


CLUSTER = [name for name, run in RECIPES.items() if not run.seeds]


@pytest.mark.parametrize("name", CLUSTER)
def test_every_command_is_one_that_our_verbs_take(name: str) -> None:
    run, served, evaluated, algorithms = RECIPES[name], 0, 0, []
    for step in paper_steps(run, "out"):
        words = ["1" if word.startswith("$((") else word for word in step.words]
        if words[:3] == ["turngym", "serve", "policy"]:
            assert tyro.cli(ServePolicy, args=words[3:]).host == "0.0.0.0"
            served += 1
        elif words[:2] == ["turngym", "eval"]:
            given = tyro.cli(EvalOptions, args=words[2:])
            assert (given.samples, given.player.temperature, given.workers.workers) == (4, 0.85, 16)
            assert (given.max_turns, given.panel) == (run.place.max_turns, run.place.panel)
            assert (given.player.channel, given.player.thinking) == ("tool", "on")
            evaluated += 1
        elif (config := trained(step)) is not None:
            assert (config.rollouts.play.env, config.run.max_turns) == (run.place.env, run.place.max_turns)
            algorithms.append(config.algorithm)
        else:
            assert words[0] in ("hf", "cp")
    helpers = 2 if run.has_teacher else 1 if run.has_judge else 0
    assert (served, evaluated) == (2 * len(run.methods) + helpers, len(run.methods))
    assert algorithms == ["grpo"] * run.has_teacher + [method.algorithm for method in run.methods]
    assert load_panel(run.place.panel).env_id == run.place.env
    said = render(run, paper_steps(run, "out"))
    assert "# From the paper" in said
    assert "\n# Ours" in said
    # every name that a command leaves to the shell is set at the head
    for used in set(re.findall(r"\$([A-Z]+)\b", said)) - {"N"}:
        assert f"\n{used}=" in said
    for host in set(re.findall(r"\$([A-Z]+_HOST)\b", said)):
        assert host in next(line for line in said.splitlines() if line.startswith("# Set "))


def texts_of(config: Any) -> list[Path]:
    """What L_PT reads; algorithms without it have no such settings."""
    part = getattr(config, "lm_loss", None)
    return [] if part is None else [Path(file) for file in part.files]


def configs_of(name: str) -> dict[str, Any]:
    """Settings by method."""
    run = RECIPES[name]
    found = [config for step in paper_steps(run, "out") if (config := trained(step)) is not None]
    return dict(zip([method.name for method in run.methods], found[run.has_teacher :], strict=True))


def test_tcods_settings() -> None:
    for name, eta, most in (("tcod-alfworld", 6, 30), ("tcod-webshop", 4, 15)):
        found = configs_of(name)
        assert [found[way].tcod.direction for way in ("tcod-f2b", "tcod-b2f")] == ["f2b", "b2f"]
        for way in ("tcod-f2b", "tcod-b2f"):
            schedule = found[way].tcod.schedule
            assert (schedule.eta, schedule.k_start, schedule.k_max) == (eta, 1, most)
            assert (found[way].run.max_turns, found[way].distill.top_k) == (most, 50)


def test_luffys_settings() -> None:
    for world in ("alfworld", "webshop", "search"):
        found = configs_of(f"luffy-{world}")
        luffy = found["luffy"].luffy
        assert (luffy.n, luffy.prefix.count, luffy.shape, luffy.a) == (8, 1, "p_div_p_a", 0.1)
        assert (luffy.entropy_coef, luffy.kl_coef, found["grpo"].grpo.n) == (0.001, 0.0, 8)


def test_openclaws_settings() -> None:
    for world in ("alfworld", "webshop", "search"):
        for name, config in configs_of(f"openclaw-{world}").items():
            own = config.prm_rl if name == "prm-rl" else config.opd_hints
            assert (own.clip, own.kl_coef, own.entropy_coef) == ((0.2, 0.28), 0.02, 0.0)
            judging = config.rollouts.judging
            asked = (judging.judge, judging.judge_votes, judging.judge_temperature)
            assert asked == ("http://j:1/v1", 3, 0.6)


def test_the_distilling_rewards_read_a_teacher_and_two_of_them_text() -> None:
    for world in ("alfworld", "webshop", "search"):
        found = configs_of(f"kd-{world}")
        assert list(found) == ["grpo-kd", "grpo-minillm", "ppo-kd", "ppo-minillm"]
        for name, config in found.items():
            assert config.models.teacher == Path("out/models/teacher")
            assert bool(texts_of(config)) == name.endswith("minillm")


@pytest.mark.parametrize(
    ("name", "student", "teacher", "turns"),
    [
        ("alfworld-1.7b", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", 80),
        ("alfworld-4b", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", 80),
        ("webshop-1.7b", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", 50),
        ("webshop-4b", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", 50),
        ("search-2b", "Qwen/Qwen3.5-2B", "Qwen/Qwen3.5-9B", 30),
    ],
)
def test_the_papers_settings_are_in_the_commands(name: str, student: str, teacher: str, turns: int) -> None:
    run = RECIPES[name]
    assert (run.student, run.teacher) == (student, teacher)
    configs = [config for step in paper_steps(run, "out") if (config := trained(step)) is not None]
    assert [config.algorithm for config in configs] == ["grpo", "opd", "tcod", "turnopd"]
    for config in configs:
        assert (config.run.max_turns, config.run.episodes, config.run.temperature) == (turns, 64, 1.0)
        assert (config.rollouts.chat.channel, config.rollouts.chat.thinking) == ("tool", "on")
        assert (config.rollouts.play.env, config.optimizer.lr) == (run.place.env, 1e-6)
    for config in configs[1:]:
        assert (config.run.steps, config.distill.top_k) == (100, 50)
        assert config.models.student == Path("out/models/student")
        assert config.rollouts.servers.teacher_server == "http://a:1,http://b:2"
    assert configs[3].turnopd.depth.h_max == 50
    # what GRPO made is what teaches
    copied = next(step.words for step in paper_steps(run, "out") if step.words[0] == "cp")
    assert copied[2:] == ("out/grpo/checkpoints/step_000150/model", "out/models/teacher")
    assert (configs[0].run.steps, configs[0].models.student) == (150, Path("out/models/base"))


def test_thirty_two_gpus() -> None:
    steps = paper_steps(RECIPES["alfworld-4b"], "out")
    sizes = {tuple(step.words[2:5:2]) for step in steps if step.words[0] == "torchrun"}
    assert sizes == {("3", "8"), ("2", "8")}  # 24 and the 8 that play; 16, the 8 that play, and the 8 that score
    assert all(step.loop for step in steps if step.words[1:3] == ("serve", "policy"))


def test_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The reproduction bench: five methods and seeds of one student, on the same panel, without a server."""
    run = RECIPES["bench-alfworld-1.7b"]
    steps = paper_steps(run, "out")
    parsed: list[str] = []
    learned: list[tuple[str, Path, Path | None]] = []
    for step in steps:
        line = step.line.replace("$SEED", "4")
        assert line.startswith("for SEED in 0 1 2 3 4; do ") == line.endswith("; done") == bool(step.seeds)
        words = shlex.split(line.removeprefix("for SEED in 0 1 2 3 4; do ").removesuffix("; done"))
        if words[0] == "torchrun":
            assert words[1:7] == ["--standalone", "--nproc-per-node", "8", "-m", "turngym", "train"]
            config = train.parse(words[7:])
            assert (config.rollouts.servers.policy_server, config.rollouts.servers.teacher_server) == ("", "")
            assert (config.run.max_turns, config.run.episodes, config.run.seed) == (50, 64, 4 if step.seeds else 0)
            learned.append((config.algorithm, config.models.student, config.models.teacher))
        elif words[:2] == ["turngym", "plan"]:
            assert main(words[1:]) == 0
            assert re.search(r"34\.2 +\S 116\.3", capsys.readouterr().out.replace("│", "|"))
        elif words[:2] == ["turngym", "result"]:
            kinds: dict[str, Any] = {"pack": Pack, "table": Table}
            parsed.append(tyro.cli(kinds[words[2]], args=words[3:]).out.as_posix())
        elif words[:2] == ["turngym", "report"]:
            runs = tyro.cli(ReportOptions, args=words[2:]).runs
            assert (len(runs), runs[9]) == (25, "tcod-4=out/tcod-seed4")
        else:
            assert words[0] in ("hf", "cp")
    student, teacher = Path("out/models/student"), Path("out/models/teacher")
    assert learned[0] == ("grpo", Path("out/models/base"), None)
    assert learned[1:4] == [(name, student, teacher) for name in ("opd", "tcod", "turnopd")]
    assert learned[4:] == [("gigpo", student, None), ("grpo", student, None)]
    names = ("opd", "tcod", "turnopd", "gigpo", "grpo-student")
    assert parsed == [*(f"out/results/{name}-seed4.result.xz" for name in names), "out/table"]
    said = render(run, steps)
    assert "31 hours (teacher 3.6, training 23.1, evaluations 4.0); a GPU holds 23 GB" in said


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "recipe", "alfworld-4b", "--print", "--out", "x"]) == 0
    said = capsys.readouterr().out
    assert "PLAY=http://$POLICY_HOST:30000,http://$POLICY_HOST:30001," in said
    assert "--policy-server $PLAY " in said
    assert "do CUDA_VISIBLE_DEVICES=$N turngym serve policy x/models/teacher" in said
    assert "None of these commands has been run at this size" in said
    assert main(["study", "recipe"]) == 0
    assert "search-2b: Qwen/Qwen3.5-2B from Qwen/Qwen3.5-9B" in capsys.readouterr().out


def played(done: list[Step]) -> Callable[[Step], None]:
    """Stands in for `execute`: notes the steps; the first evaluation has 10 % success, the second 20, the third 30."""

    def execute(step: Step) -> None:
        done.append(step)
        if step.words[1] == "eval":
            folder = Path(step.words[step.words.index("--out") + 1])
            folder.mkdir(parents=True)
            count = sum(step.words[1] == "eval" for step in done)
            value = {"mean": count / 10, "low": 0.0, "high": 1.0, "tasks": 8}
            (folder / "results.json").write_text(json.dumps({"scores": {"overall": {"avg": value}}}))

    return execute


@pytest.mark.long
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_embedded_path_is_one_that_our_verbs_take(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Step] = []
    texts: list[Path] = []
    monkeypatch.setattr(verb, "execute", played(done))
    monkeypatch.setattr(verb, "write_text", lambda world, path: texts.append(path))
    words = ["--embedded", "--steps", "2", "--episodes", "8", "--out", str(tmp_path)]
    assert main(["study", "recipe", name, *words]) == 0
    run = RECIPES[name]
    configs = [config for step in done if (config := trained(step)) is not None]
    assert [config.algorithm for config in configs[run.has_teacher :]] == [one.algorithm for one in run.methods]
    for config, method in zip(configs[run.has_teacher :], run.methods, strict=True):
        teacher = tmp_path / "grpo/checkpoints/step_000002/model"
        assert config.models.teacher == (teacher if method.teacher else None)
        assert config.rollouts.judging.judge == ("expert" if method.judge else "auto")
        assert texts_of(config) == (texts if method.text else [])
        assert (config.run.steps, config.run.episodes, config.optimizer.lr) == (2, 8, 2e-4)
    assert texts == [tmp_path / "text.txt"] * run.has_text
    assert all(
        step.words[:4] == ("torchrun", "--standalone", "--nproc-per-node", "2") for step in done if trained(step)
    )
    evals = [tyro.cli(EvalOptions, args=list(step.words[2:])) for step in done if step.words[1] == "eval"]
    assert {given.workers.workers for given in evals} == {2}
    printed = capsys.readouterr().out
    for place, method in enumerate(run.methods, 1):
        assert re.search(rf"\b{method.name}\b\W+{10 * place}\.0 \[0\.0, 100\.0\]", printed)


def test_a_step_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TurngymError, match=r"a try failed \(exit status 2\): turngym no-such-verb"):
        verb.execute(Step(where="here", words=("turngym", "no-such-verb"), why="a try"))
    assert main(["study", "recipe", "alfworld-9b", "--print"]) == 2
    assert main(["study", "recipe", "alfworld-4b"]) == 2
    assert "Did you mean 'alfworld-4b'" in (said := capsys.readouterr().err)
    assert "say --print for the commands" in said
