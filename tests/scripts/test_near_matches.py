"""Errors that name what was meant: words of other libraries, names without their kind, keywords of Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest

import turngym
from turngym.agents import evaluate, play_episodes
from turngym.core.errors import TurngymError
from turngym.core.redaction import HeaderKeys, redacted
from turngym.scripts.main import main

PANEL = "alfworld-quickstart"
OUT = "/no/run"
STUDENT = str(turngym.load_world("alfworld").checkpoint("student"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evl --panel x", "unknown verb 'evl'. Did you mean 'eval'"),
        ("rollout --num-tasks 3", "there is no option --num-tasks. Did you mean '--tasks'"),
        ("eval --max-completion-length 3", "no option --max-completion-length. Did you mean '--max-new-tokens'?"),
        ("eval --xyzzy", "there is no option --xyzzy. `turngym eval --help-all` lists them."),
        ("rollout --agent opena:gpt", "unknown agent 'opena:gpt'. Did you mean 'openai:gpt'?"),
        ("rollout --agent /no/folder", "unknown agent '/no/folder'. A model in a folder is named as --agent model:/"),
        ("rollout --agent Qwen/Qwen3-0.6B", "A model in a folder is named as --agent model:Qwen/Qwen3-0.6B."),
    ],
)
def test_a_wrong_word_names_the_right_one(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--learning_rate", "'--optimizer.lr'"),
        ("--group-size", "'--grpo.n'"),
        ("--batch-size", "'--episodes' or '--slots'"),
        ("--beta", "'--grpo.kl-coef'"),
        ("--no-optimizer.lr", None),
    ],
)
def test_training_knows_what_other_libraries_call_its_settings(
    option: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "grpo", "--student", "s", "--out", "o", option, "1"]) == 2
    err = capsys.readouterr().err
    assert f"no option {option}." in err
    assert meant is None or f". Did you mean {meant}?" in err


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: evaluate(PANEL, sample=1), r"evaluate\(\): there is no setting 'sample'\. Did you mean 'samples'"),
        (lambda: evaluate(PANEL, samples="1"), "samples is '1'; valid: a whole number"),
        (lambda: evaluate(PANEL, temperature=0.5), "temperature is a setting of agent = model or openai or own"),
        (lambda: play_episodes(num_tasks=1), r"there is no setting 'num_tasks'\. Did you mean 'tasks'"),
        (lambda: gym.make("turngym/ALFWorld-v0", max_turn=5), "takes no argument 'max_turn'. Did you mean 'max_turns'"),
        (lambda: turngym.train("opd", student=STUDENT, out=OUT), r"opd distills from a teacher.*in Python teacher="),
        (lambda: turngym.train("grpo", student="s", out="o", group_size=1), r"Did you mean 'n'"),
    ],
)
def test_python_is_told_in_python(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TurngymError, match=said):
        call()


def test_the_package_has_its_three_functions_and_loads_nothing_for_them() -> None:
    code = """if True:
        import sys, turngym
        assert not {name for name in sys.modules if name.startswith("turngym.")}, sys.modules
        assert {"evaluate", "train", "load_world"} <= set(dir(turngym))
        turngym.load_world("alfworld")
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="'evaluat'; it has evaluate, train, load_world"):
        turngym.evaluat  # noqa: B018
    assert turngym.evaluate is evaluate


def test_the_lines_of_use_in_help_run() -> None:
    lines = [line for line in (turngym.__doc__ or "").splitlines() if line.startswith("    ")]
    assert len(lines) == 9
    exec("\n".join(line[4:] for line in lines[:-1]), {"turngym": turngym})  # without the training run


def test_a_key_is_hidden_but_not_cut_out_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"the latest contest: Bearer test, test."
    assert HeaderKeys(["Bearer test"]).hidden(said) == b"the latest contest: Bearer ***, ***."
    monkeypatch.setenv("TURNGYM_KEY", "sk-0123456789abcdef")
    assert redacted("xsk-0123456789abcdefx") == "x***x"
    # a placeholder may be any word of a message
    monkeypatch.setenv("TURNGYM_KEY", "test")
    assert redacted("this is a test") == "this is a test"
