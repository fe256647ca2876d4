"""What tests of training runs share: tiny models on disk, rows without their times, and a run that is broken off."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.saved_model import save_model
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.rollout_request import RolloutRequest
from turngym.envs.alfworld.priors import SMALL, vocabulary
from turngym.trainers.algorithm_spec import find_algorithm
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import tiny_qwen3


def save_tiny(
    folder: Path,
    *,
    seed: int = 0,
    words: Sequence[str] = (*vocabulary(SMALL), "<action>", "</action>", "Do the task."),
    width: int = 32,
    length: int = 512,
    new_tokens: int = 3,
    system: str | None = "Do the task.",
) -> Path:
    """An untrained model of one layer with its tokenizer; by default it speaks the words of the generated games."""
    tokenizer = build_phrase_tokenizer(list(words))
    save_model(tiny_qwen3(len(tokenizer), width=width, layers=1, heads=2, max_length=length, seed=seed), folder)
    tokenizer.save_pretrained(str(folder))
    ChatSettings(system=system, max_new_tokens=new_tokens, max_context=length).save(folder)
    return folder


def with_file(folder: Path, words: Sequence[str]) -> list[str]:
    """`words` whose lines of TOML (`name = value`) stand in a file in `folder`, as settings do that no option sets."""
    lines = [word for word in words if " = " in word]
    rest = [word for word in words if " = " not in word]
    if not lines:
        return rest
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"settings-{zlib.crc32(text.encode()):08x}.toml"
    path.write_text(text)
    return [*rest, "--config", str(path)]


def command(models: Path, out: Path, algorithm: str, *more: str) -> list[str]:
    """Words of `turngym train` on generated games, for the models of the fixture `models`; `more` counts first."""
    words = ["--algorithm", algorithm, "--student", str(models / "student"), "--out", str(out)]
    if "teacher" in find_algorithm(algorithm).uses:
        words += ["--teacher", str(models / "teacher")]
    words += ["--episodes", "4", "--env-kwargs", '{"on_invalid": "noop"}', "--tracker", "none"]
    # recorded episodes that are imitated end where they end
    words += [] if algorithm == "sft" and "--traces" in more else ["--max-turns", "3"]
    return [*words, "--threads", "1", "--device", "cpu", *with_file(out.parent, more)]


def untimed(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """The rows of a run (of one `kind`) without what the clock says."""
    rows = [row for row in read_metrics(run) if kind in ("", row["kind"])]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_s"))} for row in rows]


def columns(run: Path, *names: str, kind: str = "train") -> list[tuple[Any, ...]]:
    """Chosen columns of the rows of one kind."""
    return [tuple(row[name] for name in names) for row in read_metrics(run) if row["kind"] == kind]


def break_off(trainer: Any, step: int, **train: Any) -> None:
    """Train until Ctrl-C comes while `step` is played."""
    source = trainer.source

    def collect(request: RolloutRequest) -> Any:
        if request.step == step:
            raise KeyboardInterrupt
        return source(request)

    trainer.source = collect
    with pytest.raises(KeyboardInterrupt):
        trainer.train(**train)
