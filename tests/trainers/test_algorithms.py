"""Algorithms as compositions: their pieces, their gradients, and that they learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from late import late

from turngym.core.episode import EpisodeError, check_numbers
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.spec import changed
from turngym.trainers.algorithm import Algorithm, Scorers, Targets
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import grpo, opd, sft
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.optimizer_step import Forward, RunStep, accumulate, make_optimizer, run_epochs, update
from turngym.trainers.recorded_source import check_logprobs
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.targets import TargetError, rows, support_kl

torch.set_num_threads(1)
RUN = RunConfig(steps=10, episodes=12, max_turns=6)
DISTILL = DistillConfig(top_k=8)


def rollouts(model: Any, step: int = 1, temperature: float = 1.0) -> list[Any]:
    return toy.Sampled(model)(RolloutRequest(step=step, episodes=12, max_turns=6, temperature=temperature))


def gradient(model: Any, algorithm: Algorithm, batch: RolloutBatch, targets: Targets, forward: Forward) -> torch.Tensor:
    model.zero_grad()
    weight_N = algorithm.weight(batch, step=5, total_steps=10)
    accumulate(model, batch, targets=targets, weight_N=weight_N, token_loss=algorithm.token_loss, forward=forward)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def vanilla(**changes: Any) -> Algorithm:
    return opd.build(opd.OpdConfig(), BuildContext(run=RUN, distill=changed(DISTILL, **changes)))


GIVEN = BuildContext(run=RUN, distill=DISTILL)
ALGORITHMS = {
    "sft": sft.build(sft.SftConfig(train_on="policy"), GIVEN),
    "opd": vanilla(),
    "opd student support": vanilla(support="student"),
    "opd sampled": vanilla(form="sampled"),
    "opd warm": vanilla(temperature=2.0),
}


@pytest.mark.parametrize("name", late(("sft", "opd", "opd student support", "opd sampled"), "opd"))
def test_accumulation_changes_nothing(name: str) -> None:
    algorithm, model = ALGORITHMS[name], toy.tiny(1)
    batch = pack(rollouts(model), origins=algorithm.origins)
    student = LocalScorer(model=model, temperature=algorithm.distill_temperature)
    teacher = LocalScorer(model=toy.tiny(2, 6.0), temperature=algorithm.distill_temperature)
    targets = algorithm.target_fn(batch, (), Scorers(teacher=teacher, student=student))
    whole = Forward(distill_temperature=algorithm.distill_temperature)
    one = gradient(model, algorithm, batch, targets, whole)
    assert one.abs().max() > 1e-3
    for micro_tokens, head_chunk in ((30, 1024), (64, 7), (1, 3)):
        split = replace(whole, micro_tokens=micro_tokens, head_chunk=head_chunk)
        assert torch.allclose(gradient(model, algorithm, batch, targets, split), one, atol=1e-6)
    checkpointed = replace(whole, gradient_checkpointing=True)
    assert torch.allclose(gradient(model, algorithm, batch, targets, checkpointed), one, atol=1e-6)
    assert not model.training


def test_gradient_is_that_of_the_written_formula() -> None:
    """OPD on two ragged episodes against logits of whole episodes and formulas (5) and (10) of docs/algorithms.md."""
    model, teacher = toy.tiny(1), toy.tiny(2, 6.0)
    episodes = rollouts(model)[:2]
    algorithm = ALGORITHMS["opd"]
    batch = pack(episodes)
    targets = algorithm.target_fn(
        batch, (), Scorers(teacher=LocalScorer(model=teacher), student=LocalScorer(model=model))
    )
    mine = gradient(model, algorithm, batch, targets, Forward(micro_tokens=20))
    model.zero_grad()
    total = torch.zeros(())
    for episode in episodes:
        ids = torch.from_numpy(episode.segments[0].astype(np.int64))
        p, q = (m(ids[None]).logits[0].log_softmax(-1) for m in (model, teacher))
        spans = [np.arange(*turn.response_span) for turn in episode.turns]
        for place in np.concatenate(spans):
            top = q[place - 1].detach().topk(8).indices
            a, b = p[place - 1][top], q[place - 1][top].detach()
            tail_a, tail_b = (1 - a.exp().sum()).log(), (1 - b.exp().sum()).log()
            kl = (a.exp() * (a - b)).sum() + tail_a.exp() * (tail_a - tail_b)
            total = total + kl / (2 * len(np.concatenate(spans)))
    total.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_distillation_brings_the_student_to_its_teacher() -> None:
    algorithm, model = ALGORITHMS["opd"], toy.tiny(1)
    config, kl = OptimizerConfig(lr=6e-3, ppo_epochs=3), []
    teacher, optimizer = LocalScorer(model=toy.tiny(2, 12.0)), make_optimizer(model, config)
    for step in range(1, 16):
        episodes = rollouts(model, step)
        batch = pack(episodes)
        targets = algorithm.target_fn(batch, (), Scorers(teacher=teacher, student=LocalScorer(model=model)))
        run_step = RunStep(config=config, step=step, total_steps=15)
        done = run_epochs(model, optimizer, batch, episodes, targets, algorithm, run_step, Forward())
        assert done.weight_N.sum() == pytest.approx(1.0, abs=1e-9)
        kl.append(float(done.columns["kl_bin"].mean()))
    assert kl[-1] < 0.5 * kl[0]


def test_sft_learns_demonstrations_and_ignores_noise() -> None:
    model = toy.tiny(1)
    optimizer = make_optimizer(model, OptimizerConfig())
    episodes = toy.demonstrations(32)
    algorithm = sft.build(sft.SftConfig(), GIVEN)
    batch = pack(episodes, origins=algorithm.origins)
    run_step = RunStep(config=OptimizerConfig(lr=5e-3, ppo_epochs=40), step=1, total_steps=1)
    done = run_epochs(model, optimizer, batch, episodes, Targets(), algorithm, run_step, Forward())
    losses = [result.loss for result in done.results]
    assert losses[0] == pytest.approx(np.log(60), rel=0.05)
    assert losses[-1] < 0.6 * losses[0]
    half = [
        replace(e, turns=tuple(replace(t, origin="noise") if t.index % 2 else t for t in e.turns)) for e in episodes
    ]
    assert set(pack(half, origins=("demonstration",)).turn_N.tolist()) == {0, 2, 4}


def test_epochs_and_minibatches_are_optimizer_updates() -> None:
    model = toy.tiny(1)
    config = OptimizerConfig(lr=1e-3, ppo_epochs=2, minibatches=3)
    optimizer, episodes, algorithm = make_optimizer(model, config), rollouts(model), ALGORITHMS["opd"]
    batch = pack(episodes)
    targets = algorithm.target_fn(
        batch, (), Scorers(teacher=LocalScorer(model=toy.tiny(2)), student=LocalScorer(model=model))
    )
    run_step = RunStep(config=config, step=1, total_steps=10)
    done = run_epochs(model, optimizer, batch, episodes, targets, algorithm, run_step, Forward())
    assert len(done.results) == 6
    assert done.weight_N.sum() == pytest.approx(1.0)
    assert np.isfinite(done.columns["kl_bin"]).all()
    gap = np.abs(done.columns["sampled_logp"] - batch.behavior_logp_N)
    assert gap[done.fresh_N].max() < 1e-4 < gap[~done.fresh_N].max()


@pytest.mark.parametrize(
    ("played", "forward"),
    [
        (1.7, Forward(sampling_temperature=1.7)),
        # greedy ids: engines report their log-probabilities at temperature 1, whatever is distilled
        (1.0, Forward(sampling_temperature=0.0, distill_temperature=1.7)),
    ],
)
def test_temperature_of_the_rollout_is_the_one_that_is_compared(played: float, forward: Forward) -> None:
    model = toy.tiny(1, 6.0)
    batch, algorithm = pack(rollouts(model, temperature=played)), ALGORITHMS["sft"]
    weight_N = algorithm.weight(batch, step=1, total_steps=1)
    _, columns = accumulate(
        model, batch, targets=Targets(), weight_N=weight_N, token_loss=algorithm.token_loss, forward=forward
    )
    assert np.abs(columns["sampled_logp"] - batch.behavior_logp_N).max() < 1e-4
    assert np.abs(columns["logp"] - batch.behavior_logp_N).max() > 0.1


def at(heat: Any, episodes: list[Any]) -> list[Any]:
    return [replace(episode, meta={"temperature": heat}) for episode in episodes]


@pytest.mark.parametrize("name", late(("sft", "grpo", "opd warm"), "grpo"))
def test_episodes_of_several_temperatures_in_one_batch_are_scored_at_their_own(name: str) -> None:
    """Ratios are 1 whatever the run's temperature and the microbatches; gradients are those of each alone."""
    model, algorithm = toy.tiny(1, 6.0), ALGORITHMS.get(name) or grpo.build(grpo.GrpoConfig(), GIVEN)
    parts = [at(0.6, rollouts(model, 1, 0.6)), at(1.7, rollouts(model, 2, 1.7)), at(1, rollouts(model, 3, 1.0))]
    # greedy ids are reported at temperature 1, and who records none was drawn at the run's
    parts += [at(0, rollouts(model, 4, 1.0)), rollouts(model, 5, 2.5)]
    mixed = [episode for same in zip(*parts, strict=True) for episode in same]
    scorers = Scorers(
        teacher=LocalScorer(model=toy.tiny(2, 6.0), temperature=algorithm.distill_temperature),
        student=LocalScorer(model=model, temperature=algorithm.distill_temperature),
    )
    forward = Forward(sampling_temperature=2.5, distill_temperature=algorithm.distill_temperature, micro_tokens=70)

    def columns(episodes: list[Any], forward: Forward = forward) -> tuple[dict[str, Any], RolloutBatch]:
        batch = pack(episodes)
        targets = algorithm.target_fn(batch, episodes, scorers)
        weight_N = np.full(batch.tokens, 1.0 / batch.tokens)
        how: dict[str, Any] = {"targets": targets, "weight_N": weight_N, "token_loss": algorithm.token_loss}
        return accumulate(model, batch, forward=forward, **how)[1], batch

    model.zero_grad()
    found, batch = columns(mixed)
    assert np.abs(found["sampled_logp"] - batch.behavior_logp_N).max() < 1e-4
    whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    if name == "grpo":
        return  # its advantages compare what is in the batch
    model.zero_grad()
    alone = [columns(part, replace(forward, micro_tokens=10_000)) for part in parts]
    assert [np.abs(one["sampled_logp"] - part.behavior_logp_N).max() < 1e-4 for one, part in alone] == [True] * 5
    # equally many tokens each, so that five means weigh five times as much as the mean of all
    apart = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / 5
    torch.testing.assert_close(whole, apart, rtol=1e-3, atol=1e-6 * float(apart.abs().max()) + 1e-7)


def test_turns_of_several_temperatures_in_one_episode() -> None:
    """Sessions of the proxy record one for each turn."""
    model = toy.tiny(1, 6.0)
    cool, hot = (rollouts(model, 1, heat)[3] for heat in (0.6, 1.7))
    heats = [0.6] * cool.depth
    batch = pack([replace(cool, meta={"temperatures": heats, "temperature": 9.0}), at(1.7, [hot])[0]])
    assert set(batch.temperature_N[batch.episode_N == 0]) == {0.6}
    turns = (*cool.turns[:-1], replace(cool.turns[-1], excluded="no"))
    other = pack([replace(cool, turns=turns, meta={"temperatures": [0.6, 0.7, 0.8, 0.9, 1.0, 1.1]})])
    assert {(turn, heat) for turn, heat in zip(other.turn_N.tolist(), other.temperature_N.tolist(), strict=True)} == {
        (turn, [0.6, 0.7, 0.8, 0.9, 1.0, 1.1][turn]) for turn in range(cool.depth - 1)
    }
    for wrong in ("hot", True, -0.5, float("nan"), float("inf"), 10**400, [1.0]):
        with pytest.raises(EpisodeError, match="turn 0: its temperature is "):
            pack([replace(cool, meta={"temperature": wrong})])
        with pytest.raises(EpisodeError, match="turn 0: its temperature is"):
            check_numbers(replace(cool, meta={"temperatures": [wrong] * cool.depth}), toy.VOCAB)
    with pytest.raises(EpisodeError, match="turn 1: its temperature is 'missing'"):
        pack([replace(cool, meta={"temperatures": [1.0]})])


def test_log_probabilities_before_the_temperature_are_refused() -> None:
    """Of the student's own ids; those of another model, or at the right temperature, are trained on."""
    model, other = toy.tiny(1, 6.0), toy.tiny(5, 6.0)
    drawn = at(0.7, rollouts(model, 1, 0.7))
    check_logprobs(drawn, model, "own.jsonl")
    plain = LocalScorer(model=model).logprobs(*rows(pack(drawn)))
    raw = [
        replace(
            episode,
            turns=tuple(
                replace(turn, logprobs=plain[number][turn.index * toy.RESPONSE :][: toy.RESPONSE])
                for turn in episode.turns
            ),
        )
        for number, episode in enumerate(drawn)
    ]
    with pytest.raises(TurngymError, match=r"own\.jsonl: ids were drawn at temperature 0\.7"):
        check_logprobs([*at(1.0, rollouts(model, 2)), *raw], model, "own.jsonl")
    for fine in (raw, drawn):
        check_logprobs(fine, other, "own.jsonl")
    # nothing is known of these
    check_logprobs(at(None, raw), model, "own.jsonl")
    check_logprobs(at(0.0, raw), model, "own.jsonl")
    check_logprobs([replace(e, turns=tuple(replace(t, logprobs=None) for t in e.turns)) for e in raw], model, "x")


def test_a_learning_rate_of_zero_measures_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss and columns; nothing moves, and no gradient takes memory."""
    algorithm, teacher = ALGORITHMS["opd"], LocalScorer(model=toy.tiny(2, 6.0))
    batch = pack(rollouts(toy.tiny(1)))
    backward, passes = torch.Tensor.backward, []
    monkeypatch.setattr(torch.Tensor, "backward", lambda *loss: (passes.append(lr), backward(*loss)))
    found = {}
    for lr in (0.0, 0.5):
        model = toy.tiny(1)
        targets = algorithm.target_fn(batch, (), Scorers(teacher=teacher, student=LocalScorer(model=model)))
        before = toy.weight_sum(model)
        found[lr] = update(
            model,
            make_optimizer(model, OptimizerConfig(lr=0.5)),
            batch,
            targets=targets,
            weight_N=algorithm.weight(batch, step=1, total_steps=2),
            token_loss=algorithm.token_loss,
            forward=Forward(micro_tokens=40),
            lr=lr,
        )
        assert (toy.weight_sum(model) == before) == (lr == 0)
    measured, learned = found[0.0], found[0.5]
    assert len(passes) > 1
    assert set(passes) == {0.5}
    assert (measured.loss, measured.skipped) == (learned.loss, False)
    assert (measured.grad_norm, learned.grad_norm > 0) == (0.0, True)
    assert measured.columns.keys() == learned.columns.keys()
    assert all(np.array_equal(column, learned.columns[name]) for name, column in measured.columns.items())


def test_gradient_that_is_not_finite_changes_nothing() -> None:
    model = toy.tiny(1)
    batch, algorithm = pack(rollouts(model)), ALGORITHMS["sft"]
    before, optimizer = toy.weight_sum(model), make_optimizer(model, OptimizerConfig(lr=1.0))
    weight_N = np.full(batch.tokens, np.inf)
    result = update(
        model,
        optimizer,
        batch,
        targets=Targets(),
        weight_N=weight_N,
        token_loss=algorithm.token_loss,
        forward=Forward(),
        lr=1.0,
    )
    assert result.skipped
    assert toy.weight_sum(model) == before


def test_signals_refuse_a_missing_or_broken_teacher() -> None:
    model = toy.tiny(1)
    batch, algorithm = pack(rollouts(model)), ALGORITHMS["opd"]
    student = LocalScorer(model=model)
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        algorithm.target_fn(batch, (), Scorers(teacher=None, student=student))

    class Short(LocalScorer):
        def topk(self, ids: Any, positions: Any, k: int) -> Any:
            return super().topk(ids, positions, k)[:-1]

    with pytest.raises(TargetError, match=f"{batch.tokens} were asked"):
        algorithm.target_fn(batch, (), Scorers(teacher=Short(model=model), student=student))
    broken = toy.tiny(2)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TargetError, match=r"turn 0 of toy/0.*must be finite"):
        algorithm.target_fn(batch, (), Scorers(teacher=LocalScorer(model=broken), student=student))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="tail is raw with form forward"):
        support_kl(DistillConfig(form="forward", tail="raw"))
