"""OPD with hindsight hints: the teacher is the policy itself, told what it should have known.

Read next: trainers/judged_episodes.py, agents/judges/hinted_prompts.py, trainers/algorithms/judge_targets.py.
"""

from __future__ import annotations

from typing import Literal

from turngym.core.errors import SettingsError
from turngym.core.numbers import BelowOne, Million, NotNegative
from turngym.core.protocols import Position
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, FixedDepth, PrivilegedText, Reader, TokenLoss
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms.judge_targets import HintTargets
from turngym.trainers.judged_episodes import HintedTurns
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import WithReference, support_kl
from turngym.trainers.token_losses import PolicyGradient, Regularized
from turngym.trainers.token_weights import WEIGHTS


class OpdHintsConfig(Spec):
    """On-policy distillation from a teacher that has read a hint."""

    n: Million = 1
    """Episodes per task. They are one group; more than one where `--judge attempts` tells one attempt what another
    did."""
    reader: Reader = "initial"
    """Who reads the hints. Where no other model teaches: the initial policy (with --reference-every K the student of up
    to K steps before; with --reference-rate a moving average of the student), or the student as it is."""
    form: Literal["sampled", "topk"] = "sampled"
    """What is minimized. `sampled`: clipped surrogate with advantage log q - log p; `topk`: the reverse KL on the
    teacher's top-K."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.02
    """Weight of the KL to the initial policy. It is k3, cut to 10 nats."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    position: Position = "last_user"
    """Which message gets the hint: the first observation, the last of role user, the last."""
    reject_below: BelowOne = 0.0
    """Probability where a response's lesson ends. It teaches up to its first token that the hinted teacher gives less
    than this probability: what follows goes on from words that it would not have said. 0: to its end."""
    weight: Literal["turn_mean", "trajectory", "token_mean"] = "turn_mean"
    """What counts the same. Every response, every episode or every token."""

    def unread(self) -> Unread:
        if self.form != "sampled":
            yield from needing("form sampled, a loss with a probability ratio", "clip", "../dual_clip")


def build(config: OpdHintsConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient with A_i = log q(y_i | prompt + hint, y_<i) - log p(y_i | prompt, y_<i).

    l_i = max(-A_i r_i, -A_i clip(r_i, 1 - eps_low, 1 + eps_high)) + kl_coef KL_i(policy, initial) - entropy_coef H_i.
    Turns without a hint are dropped. q is the frozen initial policy, its moving average, the live student, or
    (`teacher`) a model of its own.
    Source: [openclaw-rl] section 4.2, Option B, [sdpo], [sdft]; docs/algorithms.md#opd-hints.
    Differs from the paper: the first response token gets its true log-probability, which the published code loses to an
    offset; a failed request is an error, not zeros.
    """
    if context.has_teacher and config.reader == "live":
        raise SettingsError("reader is live, and --teacher names another model: leave one of them out")
    topk = config.form == "topk"
    privileged = PrivilegedText(position=config.position, reader=config.reader)
    signal = HintTargets(
        k=context.distill.top_k if topk else None,
        reject_below=config.reject_below,
        own=None,
        privileged=privileged,
    )
    loss: TokenLoss = PolicyGradient(clip=config.clip, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef)
    if topk:
        loss = Regularized(loss=support_kl(context.distill), kl_coef=config.kl_coef, entropy_coef=config.entropy_coef)
    return Algorithm(
        name="opd-hints",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=loss,
        select=HintedTurns(),
        group=config.n,
        needs_teacher=context.has_teacher,
        judge="hint",
        privileged=privileged,
        needs_reference=bool(config.kl_coef) or privileged.needs_reference(has_teacher=context.has_teacher),
        entropy_gradient=bool(config.entropy_coef),
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="opd-hints",
    config=OpdHintsConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "form", "judge", "expert", "reward", "reference", "surrogate"}),
)
