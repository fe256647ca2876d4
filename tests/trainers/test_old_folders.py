"""A run that an older version began, under the names that its settings had then, is continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.agents.rendering.chat_settings import ChatSettings, build_phrase_tokenizer
from turngym.envs.alfworld.priors import SMALL, vocabulary
from turngym.envs.core.errors import TurngymError
from turngym.scripts import train
from turngym.trainers.config import ADDED, SINCE
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import save_model, tiny_qwen3
from turngym.trainers.train import build_trainer

torch.set_num_threads(1)
OLD = {
    "algorithm.n_min": "algorithm.reliable_count",
    "algorithm.n_min_share": "algorithm.reliable_share",
    "optimizer.ppo_epochs": "optimiser.passes",
    "env_kwargs": "make",
}


def test_old_names_in_a_checkpoint_are_those_of_today(tmp_path: Path) -> None:
    words = build_phrase_tokenizer([*vocabulary(SMALL), "<action>", "</action>", "Do the task."])
    save_model(tiny_qwen3(len(words), width=32, layers=1, heads=2, max_length=512, seed=0), tmp_path / "model")
    words.save_pretrained(str(tmp_path / "model"))
    ChatSettings(system="Do the task.", max_new_tokens=3, max_context=512).save(tmp_path / "model")
    model, out = str(tmp_path / "model"), tmp_path / "run"
    argv = ["turnopd", "--student", model, "--teacher", model, "--out", str(out), "--steps", "1", "--eval-every", "0"]
    argv += ["--episodes", "2", "--max-turns", "2", "--device", "cpu", "--threads", "1", "--no-tensorboard"]
    argv += ["--env-kwargs", '{"on_invalid": "noop"}']
    train.main(argv)
    rows = read_metrics(out)
    made = build_trainer(train.parse(argv))
    assert (made.run.packing, made.teacher.packing) == ("auto", "auto")  # type: ignore[union-attr]
    for path in out.glob("checkpoints/step_*/state.json"):
        state: dict[str, Any] = json.loads(path.read_text())
        del state["crc32"]  # which they did not have
        saved = state["fingerprint"]
        assert set(OLD) < set(saved)
        assert "run.dual_clip" in SINCE.keys() & saved.keys()
        state["fingerprint"] = {
            OLD.get(name, name.replace("optimizer.", "optimiser.")): value
            for name, value in saved.items()
            if not name.startswith(ADDED) and name not in SINCE
        }
        path.write_text(json.dumps(state))
    (out / "config.toml").unlink()  # older versions wrote none
    made = build_trainer(train.parse([*argv, "--resume"]))
    # before there was a choice, rows did not share lines, neither of the student nor of the teacher
    assert (made.run.packing, made.teacher.packing) == ("off", "off")  # type: ignore[union-attr]
    train.main([*argv, "--resume"])
    assert read_metrics(out) == rows
    with pytest.raises(TurngymError, match=r"algorithm\.n_min: checkpoint 8, now 3"):
        train.main([*argv, "--resume", "--turnopd.n-min", "3"])
