"""SAGE-OPD: which turns count, how much each token does, and what the loss makes of it, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.core.episode import Episode, TopK
from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import Scorers, Tokens
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.batch import pack
from turngym.trainers.contrib import sage_opd
from turngym.trainers.contrib.sage_opd import Intervention, Reweighted, gate
from turngym.trainers.run_config import DistillConfig
from turngym.trainers.token_losses import NegativeLogLikelihood

# the most likely id stands second here: it is looked for, not taken for granted
CONFIDENCE = np.array([0.5, 0.25, 0.8, 0.4, 1.0])


@dataclass(frozen=True)
class Fixed:
    """A teacher with a top-2 of known probabilities."""

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        assert k == 2
        logp = np.log(np.stack([np.full(5, 0.125), CONFIDENCE], axis=1)).astype(np.float32)
        counts = [len(where) for where in positions]
        return [TopK(ids=np.zeros(p.shape, np.int32), logp=p) for p in np.split(logp, np.cumsum(counts)[:-1])]


SCORERS = Scorers(student=None, teacher=Fixed())  # type: ignore[arg-type]


def judged(episode: Episode, *scores: Any) -> Episode:
    turns = [replace(turn, judge_scores=given) for turn, given in zip(episode.turns, scores, strict=True)]
    return replace(episode, turns=tuple(turns))


def pair(make_episode: Callable[..., Episode], *scores: Any) -> list[Episode]:
    a = make_episode([([1, 2, 3], [10, 11]), ([4], [12])], number=0)
    b = make_episode([([5, 6], [20, 21])], number=1)
    return [judged(a, *scores[:2]), judged(b, scores[2])]


def test_a_verdict_opens_the_gate(make_episode: Callable[..., Episode]) -> None:
    def of(scores: Any) -> float:
        return gate(pair(make_episode, scores, None, None)[0].turns[0], 0.3)

    assert [of(scores) for scores in ((1.0,), (0.0,), (-1.0,), None, ())] == [0.0, 0.3, 1.0, 1.0, 1.0]
    assert of((1.0, -1.0, -1.0)) == 1.0
    assert of((1.0, 1.0, -1.0)) == 0.0


def test_factors_by_hand(make_episode: Callable[..., Episode]) -> None:
    episodes = pair(make_episode, (-1.0,), (1.0,), (0.0,))
    batch = pack(episodes)
    targets = Intervention(k=2, weak=0.25)(batch, episodes, SCORERS)
    # 0.5, 0.25 | 0 | 0.1, 0.25: 1.1 over 5 tokens
    np.testing.assert_allclose(targets.extra["factor"], np.array([0.5, 0.25, 0.0, 0.1, 0.25]) / 0.22, rtol=1e-6)
    assert targets.extra["factor"].dtype == np.float32
    assert targets.topk_logp_NK is not None
    np.testing.assert_allclose(np.exp(targets.topk_logp_NK[:, 1]), CONFIDENCE, rtol=1e-6)
    plain = Intervention(k=2, weak=0.25, confidence=False)(batch, episodes, SCORERS)
    np.testing.assert_allclose(plain.extra["factor"], np.array([1.0, 1.0, 0.0, 0.25, 0.25]) / 0.5)
    default = Intervention(k=2, confidence=False)(batch, episodes, SCORERS)
    np.testing.assert_allclose(default.extra["factor"], np.array([1.0, 1.0, 0.0, 0.5, 0.5]) / 0.6)


def test_without_a_verdict_it_is_plain_distillation_and_praise_alone_teaches_nothing(
    make_episode: Callable[..., Episode],
) -> None:
    signal = Intervention(k=2, confidence=False)
    episodes = pair(make_episode, None, None, None)
    np.testing.assert_array_equal(signal(pack(episodes), episodes, SCORERS).extra["factor"], np.ones(5))
    episodes = pair(make_episode, (1.0,), (1.0,), (1.0,))
    np.testing.assert_array_equal(signal(pack(episodes), episodes, SCORERS).extra["factor"], np.zeros(5))


def test_the_loss_is_multiplied() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0]).requires_grad_()
    rest: dict[str, Any] = {"behavior_logp_n": logp.detach(), "off_policy_n": torch.zeros(3, dtype=torch.bool)}
    factor = torch.tensor([2.0, 0.0, 0.5])
    tokens = Tokens(logp_n=logp, sampled_logp_n=logp, entropy_n=torch.zeros(3), extra={"factor": factor}, **rest)
    found = Reweighted(loss=NegativeLogLikelihood())(tokens)
    torch.testing.assert_close(found.loss_n, torch.tensor([2.0, 0.0, 1.5]))
    torch.testing.assert_close(found.diagnostics["factor"], factor)
    found.loss_n.sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -factor)


@pytest.mark.parametrize("more", [{"form": "sampled"}, {"support": "student"}])
def test_a_form_without_the_teachers_confidence_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="topk and teacher"):
        sage_opd.build(sage_opd.SageOpdConfig(), BuildContext(distill=DistillConfig(**more)))
