"""A judge's score and a hinted teacher in one, by hand: the advantage, the summed losses, which turns count."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import judged as tools
import numpy as np
import pytest
import torch

from turngym.core.episode import Episode, TopK
from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import Scorers, Tokens
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import prm_opd
from turngym.trainers.algorithms.judge_targets import HintTargets
from turngym.trainers.algorithms.prm_opd import ScoredOrHinted, WeightedSum
from turngym.trainers.batch import pack
from turngym.trainers.judged_episodes import ScoredTurns
from turngym.trainers.token_losses import PolicyGradient, Regularized, SupportKL, with_dual_clip

Table: Any = importlib.import_module("test_judge_targets").Table
torch.set_num_threads(1)
Make = Callable[..., Episode]
NOBODY: Any = None


@pytest.fixture
def mixed(make_episode: Make) -> list[Episode]:
    """A: a hinted turn scored 1 (2 tokens), one scored -1 without a hint (1), a hinted one that nobody scored (3).

    B: one turn of 2 tokens, unjudged.
    """
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])], number=0)
    hints = [np.array([1, 2, 7, 7], np.int32), None, np.array([8], np.int32)]
    scores: list[Any] = [(1.0, 1.0), (-1.0,), None]
    turns = [
        replace(turn, judge_votes=("v",), judge_scores=score, hint_prompt_ids=ids, hint=None if ids is None else "h")
        for turn, score, ids in zip(a.turns, scores, hints, strict=True)
    ]
    return [replace(a, turns=tuple(turns)), make_episode([([5, 6], [20, 21])], number=1)]


# the ids cancel: the teacher's positions 4 5 and 1 2 3 against the student's 2 3 and 7 8 9, and half a nat
RATIO = np.array([0.48, 0.48, 0.0, 0.56, 0.56, 0.56, 0.0, 0.0])
SCORE = np.array([1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_scores_everywhere_and_log_ratios_where_there_are_hints(mixed: list[Episode]) -> None:
    batch = pack(mixed)
    assert batch.label_N.tolist() == [10, 11, 12, 13, 14, 15, 20, 21]
    teacher = Table(value=0.5)
    scorers = Scorers(student=Table(), teacher=teacher)
    targets = HintTargets(w_reward=0.5, w_hint=2.0)(batch, mixed, scorers)
    np.testing.assert_allclose(targets.advantage_N, 0.5 * SCORE + 2.0 * RATIO, atol=1e-5)
    # only the hinted turns are the teacher's affair
    assert teacher.asked == [([1, 2, 7, 7, 10, 11], [4, 5]), ([8, 13, 14, 15], [1, 2, 3])]
    np.testing.assert_allclose(HintTargets()(batch, mixed, scorers).advantage_N, SCORE + RATIO, atol=1e-5)
    assert targets.label_logp_N is not None
    np.testing.assert_allclose(targets.label_logp_N[:3], [0.5 - 10.04, 0.5 - 11.05, -12.05], atol=1e-5)
    alone = HintTargets()(batch, mixed, Scorers(student=Table(), reference=Table(value=0.5)))
    np.testing.assert_allclose(alone.advantage_N, SCORE + RATIO, atol=1e-5)


def test_without_a_hint_the_score_is_all(mixed: list[Episode]) -> None:
    bare = [replace(e, turns=tuple(replace(turn, hint_prompt_ids=None) for turn in e.turns)) for e in mixed]
    teacher = Table()
    targets = HintTargets(w_reward=0.5)(pack(bare), bare, Scorers(student=NOBODY, teacher=teacher))
    np.testing.assert_allclose(targets.advantage_N, 0.5 * SCORE)
    assert not teacher.asked
    topk = HintTargets(k=2)(pack(bare), bare, Scorers(student=NOBODY, teacher=teacher))
    assert topk.kl_mask_N is not None
    assert not topk.kl_mask_N.any()
    assert topk.topk_ids_NK is not None
    assert topk.topk_ids_NK.tolist() == [[0]] * 8
    np.testing.assert_allclose(topk.advantage_N, SCORE)


class Falling:
    """Finds the label less and less likely: log-probabilities 0, -1, -2, ... along a response."""

    def logprobs(self, ids: Sequence[Any], positions: Sequence[Any]) -> list[Any]:
        return [-np.arange(len(where), dtype=np.float32) for where in positions]

    def topk(self, ids: Sequence[Any], positions: Sequence[Any], k: int) -> list[TopK]:
        """The label first while it is likely; behind the first token it is not among the likely ids."""
        found = []
        for row, where in zip(ids, positions, strict=True):
            first = np.where(np.arange(len(where)) == 0, row[where], 99)
            likely = np.stack([first, *[np.full(len(where), 90 - n) for n in range(k - 1)]], axis=1)
            logp = np.tile(np.log([0.5, *[0.4 / k] * (k - 1)]), (len(where), 1))
            found.append(TopK(ids=likely.astype(np.int32), logp=logp.astype(np.float32)))
        return found


def test_behind_a_rejected_token_only_the_score_teaches(mixed: list[Episode]) -> None:
    batch = pack(mixed)
    scorers: Any = Scorers(student=Table(), teacher=Falling())
    whole = HintTargets(w_reward=0.0)(batch, mixed, scorers).advantage_N
    # e^-1 is the first below one half: the token after it is the first that does not count
    cut = HintTargets(reject_below=0.5)(batch, mixed, scorers).advantage_N
    assert whole is not None
    assert (whole[[0, 1, 3, 4, 5]] != 0).all()
    expected = SCORE + np.where(np.arange(8) == 5, 0.0, whole)
    np.testing.assert_allclose(cut, expected, rtol=1e-5)
    topk = HintTargets(k=2, reject_below=0.1)(batch, mixed, scorers)
    assert topk.kl_mask_N is not None
    assert topk.kl_mask_N.tolist() == [True, True, False, True, True, False, False, False]
    np.testing.assert_allclose(topk.advantage_N, SCORE)
    assert topk.topk_ids_NK is not None
    assert topk.topk_logp_NK is not None
    # asked for ten, of which two are kept
    assert topk.topk_ids_NK[[0, 1, 3]].tolist() == [[10, 90], [99, 90], [13, 90]]
    np.testing.assert_allclose(np.exp(topk.topk_logp_NK[0]), [0.5, 0.04], rtol=1e-5)
    # a placeholder of half of the mass
    assert topk.topk_ids_NK[2].tolist() == [0, 1]
    np.testing.assert_allclose(np.exp(topk.topk_logp_NK[[2, 6, 7]]).sum(axis=1), 0.5, rtol=1e-6)
    free = HintTargets(k=2)(batch, mixed, scorers)
    assert free.kl_mask_N is not None
    assert free.kl_mask_N.tolist() == [True, True, False, True, True, True, False, False]


def test_turns_that_either_part_teaches_from_stay(mixed: list[Episode]) -> None:
    found = ScoredOrHinted()
    texts = tools.with_texts(mixed[0], ["a", "b", "c"], "d")
    assert found.reasons(texts) == {}
    neutral = [replace(turn, judge_scores=(0.0,)) for turn in texts.turns]
    quiet = replace(texts, turns=tuple(neutral))
    assert found.reasons(quiet) == {}
    strict = ScoredOrHinted(scored=ScoredTurns(mask_neutral=True))
    assert strict.reasons(quiet) == {1: "judged neutral"}
    failed = replace(texts, turns=tuple(replace(turn, judge_scores=None) for turn in texts.turns))
    assert found.reasons(failed) == {1: "the judge failed"}
    kept = found([failed])
    assert [turn.excluded for turn in kept[0].turns] == [None, "the judge failed", None]
    nothing = replace(failed, turns=tuple(replace(turn, hint_prompt_ids=None) for turn in failed.turns))
    assert found([nothing]) == []


def tokens(**more: Any) -> Tokens:
    logp = torch.tensor([math.log(0.25)] * 2, requires_grad=True)
    return Tokens(
        logp_n=logp,
        sampled_logp_n=logp,
        behavior_logp_n=logp.detach(),
        topk_logp_nK=torch.tensor([[math.log(0.5), math.log(0.25)]] * 2),
        teacher_logp_nK=torch.tensor([[math.log(0.25), math.log(0.5)]] * 2),
        advantage_n=torch.tensor([2.0, -1.0]),
        off_policy_n=torch.zeros(2, dtype=torch.bool),
        entropy_n=torch.full((2,), 0.7),
        **more,
    )


def test_both_losses_are_summed_where_there_are_hints() -> None:
    loss = WeightedSum(loss=PolicyGradient(), support=SupportKL(), w_reward=0.5, w_hint=3.0)
    found = loss(tokens(kl_mask_n=torch.tensor([True, False])))
    kl = 0.25 * math.log(2)  # bins 0.5 0.25 0.25 against 0.25 0.5 0.25
    assert found.loss_n.tolist() == pytest.approx([0.5 * -2.0 + 3.0 * kl, 0.5 * 1.0], abs=1e-6)
    assert found.diagnostics["kl_bin"].tolist() == pytest.approx([kl, 0.0], abs=1e-6)
    assert found.diagnostics["clipped"].tolist() == [0.0, 0.0]
    plain = WeightedSum(loss=PolicyGradient(), support=SupportKL())
    both = plain(tokens(kl_mask_n=torch.tensor([True, True]))).loss_n.tolist()
    assert both == pytest.approx([-2.0 + kl, 1.0 + kl], abs=1e-6)
    with pytest.raises(ValueError, match="kl_mask_N"):
        plain(tokens())


def test_the_dual_clip_reaches_the_surrogate() -> None:
    algorithm = prm_opd.build(prm_opd.PrmOpdConfig(form="topk"), BuildContext())
    loss: Any = with_dual_clip(algorithm.token_loss, 3.0)
    assert isinstance(loss, Regularized)
    assert loss.loss.loss.dual_clip == 3.0  # type: ignore[attr-defined]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingsError, match="not both 0"):
        prm_opd.PrmOpdConfig(w_reward=0.0, w_hint=0.0)
    with pytest.raises(SettingsError, match=r"reject_below is 0\.0009"):
        prm_opd.build(prm_opd.PrmOpdConfig(reject_below=0.0009), BuildContext())
