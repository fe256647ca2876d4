"""Supervised fine-tuning on demonstrations: makes the teachers and weak students of the embedded default.

Read next: trainers/token_losses.py, trainers/token_weights.py, trainers/batch.py, trainers/optimizer_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from turngym.agents.playing.scripted import LOOPING
from turngym.core.episode import Origin
from turngym.core.errors import SettingsError
from turngym.core.numbers import NotNegative, Share
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, ExpertPlay, FixedDepth
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import NoTargets
from turngym.trainers.token_losses import NegativeLogLikelihood
from turngym.trainers.token_weights import WEIGHTS


class SftConfig(Spec):
    """Supervised fine-tuning on demonstrations."""

    weight: Literal["token_mean", "episode_mean", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""
    train_on: Literal["demonstration", "policy", "both"] = "demonstration"
    """Whose responses are imitated; `policy` fits traces that a policy sampled. Noise never is."""
    noise: tuple[Share, Share] = (0.0, 0.0)
    """Range of the share of random actions. Each episode draws its share from it; they are never imitated."""
    mistakes: Share = 0.0
    """Share of plausible mistakes among these. They are possible or not; the others are admissible actions."""
    players: str = ""
    """Who plays, with shares. For example expert:.35,noisy:.2,repeat:.2,cycle:.25. `noisy` is the expert among its
    `noise`; `repeat` and `cycle` begin like it and then say their last action, or their last two or three, for ever;
    `wander` (in the shop) goes to and fro between two pages. Their loops are turns of a policy: train_on=both. By
    default all are noisy."""
    loop_after: NotNegative = 2.3
    """Mean number of turns before a loop. A player of `players` then falls into it."""
    loop_slips: Share = 0.0
    """Share of noise in such a loop. The loop goes on after it."""
    hints: Share = 0.0
    """Share of observations with a hint. It is the expert's next action, in the words of the judge `expert`. A model
    can only teach by hints (opd-hints) what it has learned to read."""
    told: str = ""
    """`skills:FOLDER`. Half of the demonstrations are told one of its texts, drawn at random, where `--judge
    skills:FOLDER` puts it. A player that minds it (`--expert reading`) shows how to read them."""

    def __post_init__(self) -> None:
        if self.noise[0] > self.noise[1]:
            raise SettingsError(f"noise is {self.noise[0]} to {self.noise[1]}; valid: a range, the lower share first")

    def unread(self) -> Unread:
        if not self.noise[1]:
            yield from needing("noise", "mistakes")
        if self.kinds == {"expert"}:
            yield from needing("a player in players beside expert", "noise")
        if self.kinds.isdisjoint(LOOPING):
            yield from needing(f"one of {', '.join(LOOPING)} in players", "loop_after", "loop_slips")

    @property
    def kinds(self) -> set[str]:
        """The players that are drawn from."""
        return {item.partition(":")[0].strip() for item in (self.players or "noisy").split(",")}


TRAIN_ON: dict[str, Sequence[Origin]] = {
    "demonstration": ("demonstration",),
    "policy": ("policy",),
    "both": ("demonstration", "policy"),
}


def build(config: SftConfig, context: BuildContext) -> Algorithm:
    """Maximum likelihood on the responses of demonstrations.

    l_i = -log p(label_i | everything before it); w_i = 1 / N (token mean) or 1 / (E n_tok(episode)) (episode mean).
    Only responses of the chosen origins carry loss: observations, templates and injected noise are context.
    One forward over an episode trains all of its turns.
    Source: docs/algorithms.md#sft.
    Differs from the paper: none; the papers' teachers are published models, ours must be made.
    """
    return Algorithm(
        name="sft",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=NoTargets(),
        weight=WEIGHTS[config.weight],
        token_loss=NegativeLogLikelihood(),
        origins=tuple(TRAIN_ON[config.train_on]),
        needs_teacher=False,
        imitates=ExpertPlay(
            noise=config.noise,
            mistakes=config.mistakes,
            players=config.players,
            loop_after=config.loop_after,
            loop_slips=config.loop_slips,
            hints=config.hints,
            told=config.told,
        ),
        cut_recorded=False,  # a demonstration is imitated to its end
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(name="sft", config=SftConfig, build=build, uses=frozenset({"expert", "shown", "imitates"}))
