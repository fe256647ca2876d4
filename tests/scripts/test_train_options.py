"""The command line of `turngym train`: each algorithm's own options, configuration files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from late import late

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.saved_model import save_model
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.nested import at
from turngym.core.settings import read_toml
from turngym.envs.alfworld.priors import SMALL, vocabulary
from turngym.scripts import train
from turngym.scripts.main import main
from turngym.trainers.algorithm_spec import BUILT_IN
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import tiny_qwen3

torch.set_num_threads(1)
NEEDED = ("--student", "s", "--out", "o")
JUDGED = ("prm-rl", "opd-hints", "prm-opd", "sage-opd", "sdar", "rlsd", "skill-sd", "opid", "agent-opsd")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        train.resolved(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("algorithm", "columns"),
    late(
        [("turnopd", "60"), ("turnopd", "120"), *((name, "80") for name in BUILT_IN)], "turnopd", "grpo-minillm", "sdar"
    ),
)
def test_help_is_one_screen_of_what_the_algorithm_uses(
    algorithm: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(capsys, algorithm, "--help")
    lines = text.splitlines()
    assert columns == "60" or len(lines) <= 122
    assert max(map(len, lines)) <= int(columns)
    # nothing is cut
    assert not [line for line in lines if line.endswith("...")]
    every = shown(capsys, algorithm, "--help-all").splitlines()
    assert max(map(len, every)) <= int(columns)
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    first = ["--student", "--teacher", "--out", "--env", "--panel", "--steps"]
    assert options[: len(first)] == first or options[: len(first) - 1] == [n for n in first if n != "--teacher"]
    others = {name.removesuffix("-minillm") for name in BUILT_IN} - {algorithm}
    tables = {"grpo-minillm": "grpo-kd", "ppo-minillm": "ppo-kd", "reinforce++": "reinforce-pp"}
    table = tables.get(algorithm, algorithm)
    assert any(option.startswith(f"--{table}.") for option in options)
    assert not any(option.startswith(f"--{other}.") for option in options for other in others - {table})
    assert ("--judge" in options) == (algorithm in JUDGED)
    assert "--max-new-tokens" in options


def test_every_option_is_in_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "opd", "--help-all")
    for option in ("--weight-sync", "--workers", "--staleness", "--lora.rank", "--teacher-server"):
        assert f"  {option}" in text
    assert "(disk, gloo, nccl)" in " ".join(text.split())


def test_without_an_algorithm_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert all(f"  {name} " in text for name in BUILT_IN)
    assert "package.module:NAME" in text


def test_an_option_of_another_algorithm_is_refused_by_its_owner() -> None:
    for words, text in (
        (("turnopd", "--grpo.n", "4"), r"turnopd has no option --grpo\.n\. It belongs to grpo\.$"),
        (("grpo", "--grpo-kd.n", "4"), r"It belongs to grpo-kd, grpo-minillm\.$"),
        (("opd", "--judge", "expert"), rf"opd has no option --judge\. It belongs to {', '.join(JUDGED)}\.$"),
        (("opd", "--sft.noise", "0", ".5"), r"It belongs to sft\.$"),
        (
            ("grpo", "--teacher", "t"),
            rf"all but sft, grpo, gigpo, rloo, reinforce\+\+, ppo, luffy, prm-rl, {', '.join(JUDGED[4:])}\.$",
        ),
        (("sft", "--temperature", "2"), r"It belongs to all but sft\.$"),
        (("opd", "--luffy.no-filter-groups"), r"It belongs to luffy\.$"),
        (("grpo", "--grpo.no-clip"), r"no option --grpo\.no-clip"),
        (("grpo", "--grpo.no-filter-gruops"), r"no option --grpo\.no-filter-gruops"),
        (("grpo", "--distill.top-k", "4"), r"to opd, turnopd, tcod, .*, loopstop, guided-opd, sage-opd\.$"),
        (("opd", "--lm-loss.coef", "1"), r"It belongs to grpo-minillm, ppo-minillm\.$"),
        (("opd", "--epsiodes", "4"), r"no option --epsiodes\. Did you mean '--episodes'"),
    ):
        with pytest.raises(TurngymError, match=text):
            train.resolved([*words, *NEEDED])
    with pytest.raises(TurngymError, match=r"unknown algorithm 'turnop'.*Did you mean 'turnopd'"):
        train.resolved(["turnop", *NEEDED])


def test_the_algorithm_is_a_word_an_option_or_the_reference() -> None:
    assert [train.resolved([*words, *NEEDED]).spec.algorithm for words in (["grpo"], ["--algorithm", "grpo"], [])] == [
        "grpo",
        "grpo",
        "turnopd",
    ]
    assert train.resolved(["--algorithm=luffy", *NEEDED, "--luffy.n", "4"]).spec.own.n == 4


def test_flags_override_the_file_and_mistakes_in_it_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'algorithm = "luffy"\nstudent = "s"\nsteps = 7\nenv_kwargs = {config = "small"}\nmax_new_tokens = 64\n'
        '[luffy]\nn = 6\nclip = "none"\n[luffy.prefix]\ncount = 2\n[optimizer]\nbetas = [0.8, 0.9]\n'
        "[provenance]\nx = 1\n"
    )
    found = train.resolved(["--config", str(path), "--out", "o", "--luffy.n", "4", "--seed", "5"]).spec
    assert (found.algorithm, found.run.steps, found.run.seed, str(found.models.student)) == ("luffy", 7, 5, "s")
    assert (found.own.n, found.own.clip, found.own.prefix.count) == (4, None, 2)
    assert found.optimizer.betas == (0.8, 0.9)
    assert found.play.env_kwargs["config"] == "small"
    assert found.chat.max_new_tokens == 64
    for line, text in (
        ("stpes = 3", r"there is no setting 'stpes'\. Did you mean 'steps'"),
        ("steps = 0", "steps is 0"),
        ('steps = "many"', "steps is 'many'; valid: a whole number"),
        ("[grpo]\nn = 4", r"there is no setting grpo\. It belongs to grpo\."),
        ("[optimizer]\nlrr = 1", r"there is no setting 'optimizer\.lrr'\."),
        ('[turnopd]\nweight = "blnd"', r"weight is 'blnd'; valid: blend, trajectory, turn\. Did you mean 'blend'"),
        ("steps =", "is not TOML"),
    ):
        path.write_text(f"{line}\n")
        with pytest.raises(TurngymError, match=text):
            train.resolved(["--config", str(path), *NEEDED])
    with pytest.raises(SettingsError, match=r"none.toml cannot be read: No such file"):
        train.resolved(["--config", str(tmp_path / "none.toml"), *NEEDED])
    with pytest.raises(TurngymError, match="--config needs a value"):
        train.resolved([*NEEDED, "--config"])


def test_a_file_may_hold_one_table_beside_options(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[luffy.prefix]\ncount = 2\n")
    found = train.resolved(["luffy", *NEEDED, "--config", str(path), "--luffy.n", "5", "--steps", "7"]).spec
    assert (found.own.n, found.own.prefix.count, found.own.prefix.high, found.run.steps) == (5, 2, 1.0, 7)
    path.write_text("dual_clip = 4\n")
    assert train.resolved(["grpo", *NEEDED, "--config", str(path)]).spec.part("dual_clip") == 4.0


def test_the_settings_are_shown_with_their_origins_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text("steps = 7\n[optimizer]\nlr = 1e-3\n")
    words = ["turnopd", *NEEDED, "--config", str(path), "--turnopd.depth.h-min", "3", "--print"]
    text = shown(capsys, *words)
    assert f"steps = 7  # {path}" in text
    assert "h_min = 3  # command line" in text
    assert "\nepisodes = 64\n" in text
    (tmp_path / "whole.toml").write_text(text)
    again = shown(capsys, "--config", str(tmp_path / "whole.toml"), "--print")
    assert [line.partition("  #")[0] for line in again.splitlines()] == [
        line.partition("  #")[0] for line in text.splitlines()
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    words = build_phrase_tokenizer([*vocabulary(SMALL), "<action>", "</action>", "Do the task."])
    for seed, name in enumerate(("student", "teacher")):
        save_model(tiny_qwen3(len(words), width=32, layers=1, heads=2, max_length=512, seed=seed), folder / name)
        words.save_pretrained(str(folder / name))
        ChatSettings(system="Do the task.", max_new_tokens=3, max_context=512).save(folder / name)
    return folder


def untimed(run: Path) -> list[dict[str, Any]]:
    clock = ("time/", "tokens_per_s")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(run)]


def test_a_run_is_repeated_from_its_folder(models: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words = ["--student", str(models / "student"), "--teacher", str(models / "teacher"), "--out", str(one)]
    words += ["--steps", "2", "--episodes", "4", "--max-turns", "3", "--tracker", "none", "--threads", "1"]
    words += ["--device", "cpu", "--env-kwargs", '{"on_invalid": "noop"}', "--optimizer.lr", "1e-2", "--seed", "3"]
    words += ["--eval-every", "0", "--max-new-tokens", "5", "--system", "Do it.", "--turnopd.depth.h-min", "1"]
    assert train.main(["turnopd", *words]) == 0
    assert train.main(["--config", str(one / "config.toml"), "--out", str(two)]) == 0
    assert untimed(two) == untimed(one)
    assert len(untimed(one)) == 2
    text = (one / "config.toml").read_text()
    assert "max_turns = 3  # command line\n" in text
    assert "[provenance]" in text
    assert 'command = "turngym train turnopd --student' in text
    assert "[provenance.packages]" in text
    assert f'torch = "{torch.__version__}"' in text
    ours, theirs = read_toml(one / "config.toml"), read_toml(two / "config.toml")
    assert {key for key in ours if ours[key] != theirs[key]} == {"models"}
    assert at(ours, "models.out") == str(one)
    chat = ChatSettings.load(one / "checkpoints" / "step_000002" / "model")
    assert (chat.max_new_tokens, chat.system, chat.max_context) == (5, "Do it.", 512)
    train.main(["--config", str(one / "config.toml"), "--resume"])
    assert (one / "config.toml").read_text() == text


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("train", "opd --config a.toml --config=b.toml", r"--config is given 2 times \(a.toml, b.toml\); valid: once"),
        ("train", "opd --algorithm grpo", r"opd and --algorithm grpo are two algorithms; valid: one"),
        ("eval", "--config a.toml --config b.toml", r"--config is given 2 times"),
        ("plan", "--config a.toml --config b.toml", r"--config is given 2 times"),
        ("eval", "--preset list --preset verl-agent", r"--preset is given twice"),
    ],
)
def test_what_is_given_once_is_refused_twice(
    verb: str, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *words.split()]) == 2
    assert re.search(said, capsys.readouterr().err)
