"""The loop: what it collects, measures, writes and refuses, and how it stops."""

from __future__ import annotations

import io
import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from late import late
from metric_columns import EVERY, known_metric
from tiny_runs import columns, untimed

from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.protocols import EvalPoint
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import opd, sft
from turngym.trainers.checkpoint import list_checkpoints
from turngym.trainers.metrics import read_metrics
from turngym.trainers.progress import LiveProgress, describe
from turngym.trainers.recorded_source import RecordedSource
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.train_loop import Interrupts, TrainError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loop") / "run"
    toy.trainer(out, steps=8).train()
    return out


def test_rows_of_a_run(finished: Path) -> None:
    rows = read_metrics(finished)
    assert [(row["kind"], row["step"]) for row in rows if row["kind"] == "eval"] == [("eval", k) for k in (0, 4, 8)]
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(1, 9))
    assert all(known_metric(name) for row in rows for name in row)
    # LoopStop's two are in its own runs (test_loopstop)
    missing = EVERY - {name for row in rows for name in row}
    assert missing == {"depth/loop_ratio", "depth/left_loops"}
    assert [row["depth/probe"] for row in train] == [1, 0, 1, 0, 0, 1, 0, 0]
    assert [row["depth/cap"] for row in train if row["depth/probe"]] == [6, 6, 6]
    assert train[-1]["depth/cap"] < 6
    assert all(0 < row["tokens"] <= 90 and row["episodes"] == 12 for row in train)


def test_numbers_by_turn_agree_with_their_totals(finished: Path) -> None:
    for row in read_metrics(finished):
        if row["kind"] == "train":
            assert sum(row["turn/weight"]) == pytest.approx(1.0)
            assert sum(row["turn/loss_share"]) == pytest.approx(1.0)
            assert len(row["turn/kl"]) == len(row["turn/survivors"]) == len(row["turn/entropy"])
            assert row["gap_mean"] < row["gap_max"] < 1e-4
            assert row["time/rollout_s"] + row["time/update_s"] < row["time/step_s"]


def test_sft_needs_no_teacher_and_learns_from_a_data_set(tmp_path: Path) -> None:
    run = RunConfig(steps=12, episodes=16, max_turns=6, eval_every=0, checkpoint_every=0)
    made = toy.trainer(
        tmp_path / "run",
        algorithm=sft.build(sft.SftConfig(), BuildContext(run=run)),
        run=run,
        source=RecordedSource(episodes=toy.demonstrations(40), seed=3),
        optimizer=OptimizerConfig(lr=5e-3, minibatches=2, schedule="cosine", lr_warmup=1),
        teacher=None,
    )
    result = made.train()
    losses = [loss for (loss,) in columns(tmp_path / "run", "loss")]
    assert losses[-1] < losses[0] - 0.3
    assert result.step == 12
    assert (result.model / "model.safetensors").exists()
    row = read_metrics(tmp_path / "run")[0]
    assert row["kl_bin"] is None
    assert row["gap_mean"] is None
    assert "turn/kl" not in row
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_distilling_a_model_into_itself_changes_little(tmp_path: Path) -> None:
    run = RunConfig(steps=5, episodes=12, max_turns=6, eval_every=0, tracker=None)
    algorithm = opd.build(opd.OpdConfig(), BuildContext(run=run, distill=DistillConfig(top_k=60)))
    made = toy.trainer(tmp_path / "run", run=run, algorithm=algorithm)
    teacher = toy.LocalScorer(model=toy.tiny(1))
    replace(made, teacher=teacher, optimizer=OptimizerConfig(lr=1e-4)).train()
    assert all(abs(kl) < 1e-4 for (kl,) in columns(tmp_path / "run", "kl_bin"))


def test_data_set_epochs_are_permutations() -> None:
    episodes = toy.demonstrations(7)
    source = RecordedSource(episodes=episodes, seed=1)
    seen = [e.task.task_id for k in range(1, 8) for e in source(RolloutRequest(step=k, episodes=3, max_turns=9))]
    assert set(Counter(seen).values()) == {3}
    assert len(set(seen[:7])) == len(set(seen[7:14])) == 7
    assert seen[:7] != seen[7:14]
    again = RecordedSource(episodes=episodes, seed=1)(RolloutRequest(step=5, episodes=3, max_turns=9))
    assert [e.task.task_id for e in again] == seen[12:15]
    with pytest.raises(TurngymError, match="no episodes"):
        RecordedSource(episodes=[])
    with pytest.raises(TurngymError, match="cannot use trace files"):
        source(RolloutRequest(step=1, episodes=3, max_turns=9, plan=PlayPlan(demonstration_turns=2)))


def test_recorded_attempts_at_a_task_are_groups() -> None:
    one, two, three = toy.demonstrations(3)
    recorded = [replace(e, sample=n) for n, e in enumerate((one, two, one, one, two, three, one, one))]
    source = RecordedSource(episodes=recorded, seed=1)
    steps = [source(RolloutRequest(step=k, episodes=4, max_turns=9, group=2)) for k in (1, 2, 3)]
    for episodes in steps:
        assert [e.group for e in episodes] == [0, 0, 1, 1]
    # task 0 has samples 0, 2 | 3, 6 and one left over, task 1 has 1, 4; task 2 was played once
    pairs = [tuple(e.sample for e in episodes[i : i + 2]) for episodes in steps for i in (0, 2)]
    assert sorted(pairs) == sorted([(0, 2), (3, 6), (1, 4)] * 2)
    with pytest.raises(TurngymError, match=r"no task of the 3 .* 6 episodes .* at most 5"):
        source(RolloutRequest(step=1, episodes=6, max_turns=9, group=6))


def test_recorded_episodes_end_at_the_depth_cap_if_asked() -> None:
    (long,) = [e for e in toy.demonstrations(4) if e.depth == 6]
    request = RolloutRequest(step=1, episodes=1, max_turns=4)
    assert RecordedSource(episodes=[long])(request) == [long]
    (cut,) = RecordedSource(episodes=[long], cut=True)(request)
    assert (cut.depth, cut.status, cut.success) == (4, Status.TRUNCATED_DEPTH, False)
    assert cut.turns == long.turns[:4]
    assert len(cut.segments[0]) == long.turns[3].response_span[1]
    assert RecordedSource(episodes=[long], cut=True)(replace(request, max_turns=6)) == [long]


def test_failed_episodes_are_counted_and_all_failed_is_an_error(tmp_path: Path) -> None:
    made = toy.trainer(tmp_path / "run", steps=1)
    source = made.source

    def failing(share: int) -> Any:
        def collect(request: RolloutRequest) -> Any:
            return [
                replace(e, status=Status.ERROR_ENV, meta={"error": "disk full"}) if n % share == 0 else e
                for n, e in enumerate(source(request))
            ]

        return collect

    replace(made, source=failing(3)).train()
    assert columns(tmp_path / "run", "episodes", "episodes_failed") == [(8, 4)]
    with pytest.raises(TrainError, match="step 1: all 12 episodes failed; the first: disk full"):
        replace(made, source=failing(1), out=tmp_path / "other").train()
    with pytest.raises(TrainError, match=r"\bteacher\b"):
        replace(made, teacher=None, out=tmp_path / "third").train()


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT as on a terminal: a test run in the background inherits that it is ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("when", late(("collect", "update", "evaluate"), "update"))
def test_ctrl_c_saves_and_the_rest_gives_the_same_numbers(tmp_path: Path, finished: Path, when: str) -> None:
    made = toy.trainer(tmp_path / "run", steps=8)
    source, evaluate = made.source, made.evaluate

    def stop(at: str, step: int) -> None:
        if at == when and step == (4 if at == "evaluate" else 5):
            signal.raise_signal(signal.SIGINT)

    def collect(request: RolloutRequest) -> Any:
        stop("collect", request.step)
        return source(request)

    def measured(step: int) -> EvalPoint:
        stop("evaluate", step)
        return evaluate(step)

    stopping = replace(made, source=collect, evaluate=measured, on_update=lambda step: stop("update", step))
    with pytest.raises(KeyboardInterrupt):
        stopping.train()
    done = 5 if when == "update" else 4
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step_{done:06d}"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    toy.trainer(tmp_path / "run", steps=8).train(resume=True)
    assert untimed(tmp_path / "run") == untimed(finished)


@pytest.mark.usefixtures("heeded")
def test_interrupts_wait_for_the_end_of_a_protected_block() -> None:
    reached = []

    def work() -> None:
        with Interrupts() as interrupts:
            with interrupts.protected():
                with interrupts.protected():
                    signal.raise_signal(signal.SIGINT)
                reached.append("inner end")
            reached.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["inner end"]


@pytest.mark.usefixtures("heeded")
def test_a_job_in_the_background_keeps_ignoring_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts, interrupts.protected():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_progress_is_plain_lines_away_from_a_terminal() -> None:
    progress = LiveProgress("turnopd", total=20, every=10)
    progress.console.file = io.StringIO()
    with progress:
        for step in range(1, 21):
            progress.phase("update")
            progress.row({"step": step, "kind": "train", "loss": 1 / step, "success": 0.25, "depth/cap": 7})
        progress.row({"step": 20, "kind": "eval", "eval/avg": 0.31})
    assert progress.console.file.getvalue().splitlines() == [
        "turnopd: step 10  loss 0.100  success 25%  depth 7",
        "turnopd: step 20  loss 0.050  success 25%  depth 7",
        "turnopd: step 20  loss 0.050  success 25%  depth 7  Avg 31.0%",
    ]
    assert describe({}) == "step 0"


def test_metrics_are_json_even_when_a_number_is_not(tmp_path: Path, finished: Path) -> None:
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert np.isfinite(columns(finished, "loss", "grad_norm")).all()
