"""Tiny models for somebody else's environment by one command: its words, its expert, and what they learn."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.models import load_policy
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.any_world import AnyWorld, learn_phrases
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.errors import TurngymError
from turngym.scripts import main
from turngym.trainers.metrics import read_metrics

LAMPS = "lamps_env:tests/Lamps-v0"


def asked(**more: Any) -> AnyWorld:
    return AnyWorld(**{"env_id": LAMPS, "max_turns": 10, "make": {"on_invalid": "noop"}, "episodes": 64, **more})


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_words_that_always_go_together_are_one_piece() -> None:
    said = ["Nothing happens.", "go to cabinet 3"] * 4 + ["go to shelf 12", "You see cabinet 12"] * 4 + ["rare words"]
    found = learn_phrases(said)
    assert {"Nothing happens.", "go to", " cabinet", " shelf", " 3", " 12"} <= set(found)
    # what combines stays apart, and what was said once says nothing
    assert not {" cabinet 3", "rare words", " to cabinet"} & set(found)
    assert {"rare", " words", "7", " 7"} <= set(found)
    tokenizer = build_phrase_tokenizer(found)
    assert pieces(tokenizer, "go to cabinet 7") == ["go to", " cabinet", " 7"]
    assert found == learn_phrases(reversed(said))
    assert learn_phrases([]) == learn_phrases(["", "1"])


def test_nothing_that_is_said_is_lost() -> None:
    text = "  A_b\n\tÜber 12.5 % -- <x>é 中文"
    assert "".join(pieces(build_phrase_tokenizer(learn_phrases([text])), "A_b 12.5")) == "A_b 12.5"
    tokenizer = build_phrase_tokenizer(learn_phrases([text]))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_world_is_learned_from_play() -> None:
    world = asked().world()
    tokenizer = world.make_tokenizer()
    assert pieces(tokenizer, "go to cellar")[-1] == " cellar"
    # colors that were said to one player are said to all: no byte is needed
    for text in ("<action>switch green lamp on</action>", "You walk to the attic. There are three lamps.", "dance"):
        assert len(pieces(tokenizer, text)) <= len(text.split()) + 4
    assert pieces(tokenizer, world.chat.system or "") == [world.chat.system]
    assert (world.env_id, world.split, world.max_turns, world.expert) == (LAMPS, "train", 10, "expert")
    assert (world.recipes["teacher"].steps, world.recipes["student"].steps) == (300, 60)
    assert (world.recipes["teacher"].mistakes, world.recipes["student"].mistakes) == (0.5, 0.0)
    assert 6 < world.chat.max_new_tokens < 20
    assert world.chat.max_context in (192, 256, 320)
    assert asked().world().make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_an_environments_own_phrases_go_before_what_is_learned() -> None:
    phrases = tuple(asked(env_id="lamps_env:tests/PhrasedLamps-v0").world().phrases())
    assert "xylophone" in phrases
    assert " cellar" not in phrases


def test_an_expert_is_needed() -> None:
    with pytest.raises(TurngymError, match="'expert' won none of 16 episodes: "):
        asked(env_id="lamps_env:tests/NoExpert-v0").world()
    with pytest.raises(TurngymError, match="won none of 16 episodes within 2 turns"):
        asked(max_turns=2).world()


@pytest.mark.long
def test_one_command_makes_a_student_and_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--world", LAMPS, "--out", str(tmp_path / "run"), "--max-turns", "10", "--steps", "24"]
    words += ["--student-steps", "8", "--batch", "16", "--vocabulary-episodes", "64", "--eval-episodes", "40"]
    assert main.main([*words, "--eval-split", "eval", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    success = json.loads((tmp_path / "run" / "success.json").read_text())
    assert [*success] == ["untrained", "teacher", "student", "expert"]
    assert success["expert"]["avg"] == 1.0
    assert success["untrained"]["avg"] == 0.0
    # the held-out tasks of this environment are blue and green; so few steps are not enough to solve them
    assert "blue" in printed
    assert "red" not in printed
    assert ("--student-steps above 8" in printed) == (success["student"]["avg"] == 0.0)
    assert all(row["episodes"] == 40 for row in success.values())
    assert all(f"| {name}" in printed or f"{name} " in printed for name in success)
    for role, steps in (("teacher", 24), ("student", 8)):
        folder = tmp_path / "run" / role
        assert f"{role} in {folder / 'model'}" in printed
        config = tomllib.loads((folder / "sft" / "config.toml").read_text())
        env = config["play"]["env"]
        assert (env["id"], env["split"], env["on_invalid"]) == (LAMPS, "train", "noop")
        assert (config["run"]["steps"], config["run"]["seed"]) == (steps, 1)
        assert config["method"]["sft"]["mistakes"] == (0.5 if role == "teacher" else 0.0)
        losses = [row["loss"] for row in read_metrics(folder / "sft")]
        assert len(losses) == steps
        assert losses[-1] < (0.25 if role == "teacher" else 0.7) * losses[0]
        assert ChatSettings.load(folder / "model").system is not None
    vocabularies = [
        load_policy(str(tmp_path / "run" / role / "model"), "cpu", "float32")[1] for role in ("teacher", "student")
    ]
    assert vocabularies[0].get_vocab() == vocabularies[1].get_vocab()


def test_options_of_the_one_kind_are_not_for_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pretrain", "--world", "alfworld", "--eval-split", "eval"]) != 0
    assert "eval_split is 'eval'; it needs an environment by its id as --world" in capsys.readouterr().err
    assert main.main(["pretrain", "--world", LAMPS, "--role", "mixture", "--vocabulary-episodes", "8"]) != 0
    assert f"--role 'mixture': {LAMPS} has teacher, student" in capsys.readouterr().err
