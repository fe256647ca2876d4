"""Checkpoints: whole or absent, refused when they belong to something else, never overwritten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run as toy
from tiny_runs import untimed

from turngym.agents.models import load_model
from turngym.core.errors import TurngymError
from turngym.core.spec import changed
from turngym.trainers.checkpoint import (
    CheckpointError,
    latest_model,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from turngym.trainers.metrics import MetricsLog, read_metrics
from turngym.trainers.optimizer_step import make_optimizer
from turngym.trainers.progress import Progress
from turngym.trainers.rollout_order import AsyncRollout, WeightSnapshot, frozen_copy
from turngym.trainers.run_config import OptimizerConfig, Wandb
from turngym.trainers.token_weights import WEIGHTS
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_checkpoint_brings_back_weights_moments_and_random_stream(tmp_path: Path) -> None:
    model = toy.tiny(1)
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-2))
    model(torch.arange(9)[None]).logits.sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    saved = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state={"step": 3, "x": 0.1})
    expected = torch.rand(3)
    other = toy.tiny(9)
    fresh = make_optimizer(other, OptimizerConfig(lr=1e-2))
    load_checkpoint(saved, model=other, optimizer=fresh)
    assert torch.equal(torch.rand(3), expected)
    assert read_state(saved) == {"schema": 2, "step": 3, "x": 0.1}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], fresh.state[two]["exp_avg_sq"])
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(load_model(latest_model(tmp_path)).lm_head.weight, model.lm_head.weight)


def test_only_the_newest_are_kept_and_half_written_ones_do_not_count(tmp_path: Path) -> None:
    model = toy.tiny(1)
    optimizer = make_optimizer(model, OptimizerConfig())
    (tmp_path / "checkpoints" / ".writing_000009").mkdir(parents=True)
    assert list_checkpoints(tmp_path) == []
    for step in (8, 9, 10, 1000000):
        save_checkpoint(
            tmp_path,
            model=model,
            optimizer=optimizer,
            state={"step": step},
            keep=2,
            save_extra=lambda folder: (folder / "tokenizer.txt").write_text("t") and None,
        )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_1000000"]
    assert (latest_model(tmp_path) / "tokenizer.txt").read_text() == "t"


def test_a_run_is_not_overwritten_and_a_missing_one_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* without --resume"):
        toy.trainer(tmp_path / "run", steps=1).train(resume=True)
    toy.trainer(tmp_path / "run", steps=1).train()
    before = snapshot(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"already holds a run: continue it with --resume"):
        toy.trainer(tmp_path / "run", steps=1).train()
    assert snapshot(tmp_path / "run") == before


def test_another_configuration_is_refused_field_by_field(tmp_path: Path) -> None:
    made = toy.trainer(tmp_path / "run", steps=1)
    made.train()
    before = snapshot(tmp_path / "run")
    other = replace(
        made,
        run=changed(made.run, episodes=6, eval_every=1, checkpoint_every=7, keep_checkpoints=9),
        optimizer=changed(made.optimizer, betas=(0.5, 0.9)),
        algorithm=replace(made.algorithm, settings={**made.algorithm.settings, "n": 2}),
    )
    with pytest.raises(CheckpointError) as caught:
        other.train(resume=True)
    text = str(caught.value)
    assert "algorithm.n: checkpoint None, now 2" in text
    assert "run.episodes: checkpoint 12, now 6" in text
    assert "optimizer.betas: checkpoint [0.9, 0.999], now [0.5, 0.9]" in text
    assert "nothing was overwritten" in text
    assert not any(name in text for name in ("eval_every", "checkpoint_every", "keep", "tensorboard"))
    assert snapshot(tmp_path / "run") == before


def test_another_model_is_refused(tmp_path: Path) -> None:
    made = toy.trainer(tmp_path / "run", steps=1)
    made.train()
    wide = toy.tiny_qwen3(toy.VOCAB, width=48, layers=2, heads=4)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        replace(made, model=wide).train(resume=True)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    toy.trainer(tmp_path / "run", steps=2).train()
    before = snapshot(tmp_path / "run")
    assert toy.trainer(tmp_path / "run", steps=2).train(resume=True).step == 2
    assert snapshot(tmp_path / "run") == before


def test_truncation_keeps_what_the_checkpoint_knows_and_drops_a_torn_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, tracker=None)
    for step, kind in ((0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train")):
        log.write({"step": step, "kind": kind})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ki')
    log.truncate(2, 0)
    assert [(row["step"], row["kind"]) for row in read_metrics(tmp_path)] == [(0, "eval"), (1, "train"), (2, "train")]
    assert not capsys.readouterr().err
    for lose in (lambda path: path.write_bytes(b""), Path.unlink):
        lose(tmp_path / "metrics.jsonl")
        log.truncate(2, 0)
        assert "metrics.jsonl has lost 2 of 2 training rows" in capsys.readouterr().err


def test_what_trackers_know_of_a_run_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("")
    with pytest.raises(TurngymError, match=r"trackers\.json cannot be read"):
        MetricsLog(tmp_path, tracker=Wandb()).open(0)


class Began(Progress):
    """Notes after which step the run begins."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin(self, step: int) -> None:
        self.steps.append(step)


def test_a_finished_run_can_be_extended_as_if_it_had_been_longer_from_the_start(tmp_path: Path) -> None:
    def made(name: str, steps: int) -> Trainer:
        run = toy.trainer(tmp_path / name, steps=steps)
        # without the share of training in its weights
        return replace(run, algorithm=replace(run.algorithm, weight=WEIGHTS["trajectory"]))

    made("whole", 5).train()
    made("run", 2).train()
    progress = Began()
    replace(made("run", 5), progress=progress).train(resume=True)
    assert progress.steps == [2]
    assert untimed(tmp_path / "run", "train") == untimed(tmp_path / "whole", "train")
    a, b = (load_model(latest_model(tmp_path / name)).state_dict() for name in ("run", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    before = snapshot(tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot be made one of 3: 5 steps are done"):
        made("run", 3).train(resume=True)
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        (r"reaches zero at its last step \(--optimizer.schedule cosine\)", {"schedule": "cosine"}),
        ("weights of turnopd change with the share of the run", {"weight": "blend"}),
        ("batches are played ahead", {"order": "ahead"}),
    ],
)
def test_a_run_that_was_made_for_its_end_says_why_it_cannot_be_longer(
    tmp_path: Path, why: str, changes: dict[str, str]
) -> None:
    def trainer(steps: int) -> Trainer:
        made = toy.trainer(tmp_path / "run", steps=steps)
        weight = WEIGHTS[changes.get("weight", "trajectory")]
        order: Any = made.order
        if "order" in changes:
            snapshot = WeightSnapshot(made.model, frozen_copy(made.model), lambda version: None)
            order = AsyncRollout(staleness=1, last=steps, snapshot=snapshot)
        optimizer = changed(made.optimizer, schedule=changes.get("schedule", "constant"))
        algorithm = replace(made.algorithm, weight=weight)
        return replace(made, algorithm=algorithm, optimizer=optimizer, order=order)

    trainer(1).train()
    with pytest.raises(CheckpointError, match=f"cannot be made one of 2: .*{why}"):
        trainer(2).train(resume=True)
    trainer(1).train(resume=True)
