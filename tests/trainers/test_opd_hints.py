"""OPD with hindsight hints: advantages by hand, what a teacher may not answer, the two losses, and a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import judged as tools
import numpy as np
import pytest
import torch
import toy_run as toy
from numpy.typing import NDArray

from turngym.envs.episode import Episode, TopK
from turngym.envs.protocols import CollectRequest
from turngym.trainers.algorithm import Scorers, Tokens
from turngym.trainers.algorithms import opd_hints
from turngym.trainers.batch import pack
from turngym.trainers.config import ConfigError, DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.judge.collect import JudgedCollect
from turngym.trainers.judge.targets import HintAdvantage, HintTopK, up_to_rejection
from turngym.trainers.judge.turn_filter import HintedTurns
from turngym.trainers.models.scorer import LocalScorer
from turngym.trainers.run.metrics import known_metric, read_metrics
from turngym.trainers.targets.targets import TargetError
from turngym.trainers.trainer import Trainer

torch.set_num_threads(1)
Make = Callable[..., Episode]
RUN = RunConfig(steps=4, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tensorboard=False)
DISTILL = DistillConfig(top_k=8)


@dataclass(slots=True)
class Table:
    """Scores a position by its id and index: log-probability -(id + position / 100); notes what it was asked."""

    short: int = 0
    value: float = 0.0
    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def logprobs(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        self.asked += [(row.tolist(), where.tolist()) for row, where in zip(ids, positions, strict=True)]
        found = [
            np.array([self.value - int(row[p]) - p / 100 for p in where], np.float32)
            for row, where in zip(ids, positions, strict=True)
        ]
        return [*found[:-1], found[-1][: len(found[-1]) - self.short]]

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        return [
            TopK(
                ids=np.tile(np.arange(k, dtype=np.int32), (len(where), 1)),
                logp=np.tile(np.log(np.full(k, 0.5 / k)), (len(where), 1)).astype(np.float32),
            )
            for where in positions
        ]


@pytest.fixture
def two(make_episode: Make) -> list[Episode]:
    """A: turns of 2, 1 (no hint) and 3 tokens; B: one of 2. Prompts with hints are longer than without."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])], number=0)
    b = make_episode([([5, 6], [20, 21])], number=1)
    prompts: dict[int, list[int] | None] = {0: [1, 2, 7, 7], 1: None, 2: [1, 2, 10, 11, 3, 12, 4, 8]}
    turns = [
        replace(turn, hint_prompt_ids=None if (ids := prompts[turn.index]) is None else np.array(ids, np.int32))
        for turn in a.turns
    ]
    only = replace(b.turns[0], hint_prompt_ids=np.array([9], np.int32))
    return HintedTurns()([replace(a, turns=tuple(turns)), replace(b, turns=(only,))])


def test_the_teacher_reads_the_hint_and_the_original_response(two: list[Episode]) -> None:
    batch = pack(two)
    assert batch.label_N.tolist() == [10, 11, 13, 14, 15, 20, 21]
    teacher, student = Table(value=0.5), Table()
    targets = HintAdvantage()(batch, two, Scorers(student=student, teacher=teacher))
    assert teacher.asked == [
        ([1, 2, 7, 7, 10, 11], [4, 5]),
        ([1, 2, 10, 11, 3, 12, 4, 8, 13, 14, 15], [8, 9, 10]),
        ([9, 20, 21], [1, 2]),
    ]
    # the ids cancel; teacher positions 4 5 8 9 10 1 2, student positions 2 3 7 8 9 2 3
    assert targets.advantage_N is not None
    expected = [0.5 - shift / 100 for shift in (2, 2, 1, 1, 1, -1, -1)]
    assert targets.advantage_N.tolist() == pytest.approx(expected, abs=1e-5)
    alone = HintAdvantage()(batch, two, Scorers(student=student, reference=Table(value=0.5)))
    assert alone.advantage_N is not None
    assert alone.advantage_N.tolist() == targets.advantage_N.tolist()


def test_a_wrong_number_of_log_probabilities_names_the_turn(two: list[Episode]) -> None:
    batch, student = pack(two), Table()
    with pytest.raises(TargetError, match=r"task/1 seed 0 sample 0, turn 0: .* 1 log-probabilities for .* 2 tokens"):
        HintAdvantage()(batch, two, Scorers(student=student, teacher=Table(short=1)))
    with pytest.raises(TargetError, match=r"task/0 seed 0 sample 0, turn 0: .* not all finite"):
        HintAdvantage()(batch, two, Scorers(student=student, teacher=Table(value=math.nan)))
    with pytest.raises(TargetError, match="needs a teacher or the frozen initial policy"):
        HintAdvantage()(batch, two, Scorers(student=student))
    bare = [replace(two[1], turns=(replace(two[1].turns[0], hint_prompt_ids=None),))]
    with pytest.raises(TargetError, match=r"task/1 .*turn 0: it has no hint in its prompt"):
        HintAdvantage()(pack(bare), bare, Scorers(student=student, teacher=Table()))

    class Silent(Table):
        def logprobs(self, ids: Any, positions: Any) -> list[NDArray[np.float32]]:
            return super().logprobs(ids, positions)[:-1]

    with pytest.raises(TargetError, match="answered 2 turns; 3 were asked"):
        HintAdvantage()(batch, two, Scorers(student=student, teacher=Silent()))


def test_top_k_targets_are_the_hinted_teachers(two: list[Episode]) -> None:
    targets = HintTopK(4)(pack(two), two, Scorers(student=Table(), teacher=Table()))
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    assert targets.topk_ids_NK.tolist() == [[0, 1, 2, 3]] * 7
    assert targets.topk_logp_NK == pytest.approx(math.log(0.125))


def test_what_follows_a_rejected_token_teaches_nothing(two: list[Episode]) -> None:
    batch = pack(two)  # responses 10 11 | 13 14 15 | 20 21
    logp = np.log(np.array([0.04, 0.9, 0.9, 0.01, 0.9, 0.06, 0.5]))
    counts = [True, False, True, True, False, True, True]
    assert up_to_rejection(batch, two, logp, 0.05).tolist() == counts

    class Read(Table):
        """Knows what the probabilities above are of, and of no id whether it is a label that it did not list."""

        def logprobs(self, ids: Any, positions: Any) -> list[NDArray[np.float32]]:
            return [part.astype(np.float32) for part in np.split(logp, [2, 5])]

        def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
            assert k == 20, "0.05 or more: among the 20 most likely"
            labels, at = [np.array([10, 11]), np.array([13, 14, 15]), np.array([20, 21])], np.split(logp, [2, 5])
            return [
                TopK(
                    ids=np.where(np.exp(p)[:, None] > 0.03, np.c_[np.full(len(p), 99), label], 98).astype(np.int32),
                    logp=np.c_[np.zeros(len(p)), p].astype(np.float32),
                )
                for label, p in zip(labels, at, strict=True)
            ]

    scorers = Scorers(student=Table(), teacher=Read())
    whole, cut = HintAdvantage()(batch, two, scorers), HintAdvantage(0.05)(batch, two, scorers)
    assert whole.advantage_N is not None
    assert cut.advantage_N is not None
    assert cut.advantage_N.tolist() == [a if c else 0.0 for a, c in zip(whole.advantage_N, counts, strict=True)]
    targets = HintTopK(1, 0.05)(batch, two, scorers)
    assert targets.kl_mask_N is not None
    assert targets.kl_mask_N.tolist() == counts
    assert targets.topk_ids_NK is not None
    assert targets.topk_ids_NK.shape == (7, 1)
    for wrong in (1.0, 0.0009, -0.1, math.nan):
        with pytest.raises(ConfigError, match=rf"reject_below is {wrong}; valid: 0, or 0\.001 to below 1"):
            opd_hints.OpdHintsConfig(reject_below=wrong)


def test_both_losses_hold_the_policy_to_its_start() -> None:
    logp = torch.tensor([math.log(0.25)], requires_grad=True)
    tokens = Tokens(
        logp_n=logp,
        sampled_logp_n=logp,
        behavior_logp_n=logp.detach(),
        topk_logp_nK=torch.tensor([[math.log(0.5), math.log(0.25)]]),
        teacher_logp_nK=torch.tensor([[math.log(0.25), math.log(0.5)]]),
        advantage_n=torch.tensor([2.0]),
        reference_logp_n=torch.tensor([math.log(0.5)]),
        off_policy_n=torch.zeros(1, dtype=torch.bool),
        entropy_n=torch.full((1,), 0.7),
    )
    held = 0.02 * (2 - 1 - math.log(2))
    sampled = opd_hints.build(opd_hints.OpdHintsConfig(), DISTILL, RUN)
    assert sampled.token_loss(tokens).loss_n.tolist() == pytest.approx([-2.0 + held])
    # bins 0.5 0.25 0.25 against 0.25 0.5 0.25
    topk = opd_hints.build(opd_hints.OpdHintsConfig(form="topk"), DISTILL, RUN)
    losses = topk.token_loss(tokens)
    assert losses.loss_n.tolist() == pytest.approx([0.25 * math.log(2) + held], abs=1e-6)
    assert losses.diagnostics["kl_reference"].tolist() == pytest.approx([1 - math.log(2)])
    free = opd_hints.build(opd_hints.OpdHintsConfig(form="topk", kl_coef=0.0), DISTILL, RUN, teacher=True)
    assert free.needs_teacher
    assert not free.needs_reference
    assert opd_hints.build(opd_hints.OpdHintsConfig(kl_coef=0.0), DISTILL, RUN).needs_reference


def whispered(episodes: Sequence[Episode]) -> list[Episode]:
    """Prompts with the last two ids of the observation said once more, as if somebody had pointed at them."""
    found = []
    for episode in episodes:
        turns = [
            turn if turn.hint is None else replace(turn, hint_prompt_ids=np.repeat(episode.prompt_ids(turn), 2)[-9:])
            for turn in episode.turns
        ]
        found.append(replace(episode, turns=tuple(turns)))
    return found


def trainer(out: Path, form: Any, teacher: bool) -> Trainer:
    student = toy.tiny(1)
    votes = ("[HINT_START]look at the last two[HINT_END]\\boxed{1}",)
    judge = tools.Says(lambda request: votes if request.turn % 2 == 0 else ("\\boxed{-1}",))
    return Trainer(
        model=student,
        algorithm=opd_hints.build(opd_hints.OpdHintsConfig(form=form), DISTILL, RUN, teacher=teacher),
        collect=JudgedCollect(collect=toy.Sampled(student), judge=judge, kind="hint", enhance=whispered),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        teacher=LocalScorer(model=toy.tiny(2, 4.0)) if teacher else None,
        reference=LocalScorer(model=toy.tiny(1)),
    )


@pytest.mark.parametrize(("form", "teacher"), [("sampled", False), ("topk", True)])
def test_a_stopped_run_resumes_to_the_same_rows(tmp_path: Path, form: str, teacher: bool) -> None:
    trainer(tmp_path / "whole", form, teacher).train()
    stopped = trainer(tmp_path / "stopped", form, teacher)
    source = stopped.collect

    def interrupted(request: CollectRequest) -> list[Episode]:
        if request.step == 3:
            raise KeyboardInterrupt
        return source(request)

    stopped.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "stopped", form, teacher).train(resume=True)
    clock = ("time/", "tokens_per_s")
    whole, again = (
        [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(tmp_path / name)]
        for name in ("whole", "stopped")
    )
    assert again == whole
    assert all(known_metric(name) for row in whole for name in row)
    assert all(row["judge/hints"] == 21 and row["judge/hints_refused"] == 0 for row in whole)
    assert all(row["judge/turns_masked"] == 24 for row in whole)
