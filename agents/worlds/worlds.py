"""How pairs of models are made that have seen players fall into loops.

Models taught by an expert alone have no idea how a player in a loop goes on, and disagree about it for ever. These are
mixtures of the same players in other shares: the history tells who is playing, and both go on alike (docs/worlds.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turngym.agents.rendering.chat_settings import ChatSettings, build_phrase_tokenizer

# What an embedded world is made of, and how its tiny models are made.

CHECKPOINTS = Path(__file__).with_name("checkpoints")
"""The shipped models, WORLD/ROLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """How one shipped model is made by supervised fine-tuning on noisy expert episodes."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    steps: int
    """Updates."""
    episodes: int = 64
    """Expert episodes per update. A task may come again, but with other noise."""
    noise: tuple[float, float] = (0.0, 0.5)
    """Share of random actions in an episode, drawn per episode; the expert labels every state that they lead to."""
    mistakes: float = 0.5
    """Share of those that are plausible mistakes, most of them refused by the environment."""
    lr: float = 3e-3
    seed: int = 0
    start: str = ""
    """What it grows from: another recipe of the same world, which is made first; the shipped model WORLD/ROLE; or, by
    default, random weights."""
    players: str = ""
    """Who plays the episodes, as `--players`; by default all do as `noise` says."""
    loop_after: float = 2.3
    """Mean turns before a player falls into its loop."""
    loop_slips: float = 0.0
    """Share of turns in a loop that are noise, after which it goes on."""
    weight: Literal["token_mean", "episode_mean"] = "token_mean"
    """What counts the same: every token, or every episode, however long."""
    dtype: Literal["float32", "float16"] = "float32"
    """Precision of the finished model's file. Training and playing are in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillRecipe:
    """How the quickstart distills: the same for every method."""

    steps: int = 100
    episodes: int = 64
    lr: float = 1e-3
    warmup: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedWorld:
    """A small task family of one environment, and the two models that the quickstart starts from."""

    name: str
    env_id: str
    split: str
    """What is trained on, as `--split` of `turngym train`."""
    make: Mapping[str, Any]
    """Further arguments of gym.make; the panel's evaluations use the same."""
    max_turns: int
    panel: str
    tags: tuple[str, ...] = ("action",)
    """The tags of the environment's text channel (`ToolSpec.tags`)."""
    expert: str = "expert"
    """Who demonstrates: a name that `turngym train --expert` takes."""
    chat: ChatSettings
    """With a system message of its own: the environment's instructions would be many tokens to a phrase tokenizer."""
    phrases: Callable[[], Iterable[str]]
    """Everything that the world can say or hear, cut into the pieces that become single tokens."""
    recipes: Mapping[str, TinyRecipe]
    """`teacher` and `student`, and what they grow from."""
    distill: DistillRecipe = field(default_factory=DistillRecipe)

    def checkpoint(self, role: str) -> Path:
        """Folder of the shipped model, `teacher` or `student`."""
        return CHECKPOINTS / self.name / role

    def settings(self, split: str | None = None) -> dict[str, Any]:
        """Settings of `turngym.trainers.train` that put it into this world."""
        return {
            "env": self.env_id,
            "split": split or self.split,
            "env_kwargs": dict(self.make),
            "max_turns": self.max_turns,
        }

    def make_tokenizer(self) -> Any:
        """One token for each phrase of the world, of the system message and of the text channel's tags."""
        tags = [piece for tag in self.tags for piece in (f"<{tag}>", f"</{tag}>")]
        return build_phrase_tokenizer([*self.phrases(), self.chat.system or "", *tags])


def loop_recipes(start: str, mistakes: float = 0.5) -> dict[str, TinyRecipe]:
    """`student` and `teacher`, and what they grow from, which grows from `start`; `mistakes` as in `TinyRecipe`."""
    mixture = TinyRecipe(
        steps=110,
        lr=1.5e-3,
        start=start,
        players="expert:.35,noisy:.2,repeat:.2,cycle:.25",
        mistakes=mistakes,
        loop_after=1.6,
        # a model samples, so its loops have slips; without these it is thrown out of them, and the two disagree
        loop_slips=0.1,
        dtype="float16",
    )
    student = replace(
        mixture, steps=55, lr=1.2e-3, seed=1, start="mixture", players="expert:.3,noisy:.3,repeat:.25,cycle:.15"
    )
    skilled = replace(
        mixture,
        steps=180,
        seed=2,
        start="student",
        players="expert:.45,noisy:.5,repeat:.03,cycle:.02",
        noise=(0.02, 0.4),
        # by episode: a loop that lasts to the end would outweigh an expert's few turns
        weight="episode_mean",
    )
    # skilled as it is, it has all but forgotten loops, and blames a player in one for every slip
    teacher = replace(
        skilled, steps=60, lr=1e-3, seed=3, start="skilled", players="expert:.4,noisy:.4,repeat:.12,cycle:.08"
    )
    return {"mixture": mixture, "student": student, "skilled": skilled, "teacher": teacher}
