"""Who plays the episodes of a training step: the student, a demonstrator, or an expert with noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.collect import ExpertCollect, KeptRollouts, LiveCollect, SharedEnv
from turngym.agents.demonstrations.collect import DemonstrationCollect
from turngym.agents.demonstrations.plans import Demonstrations
from turngym.agents.judges.hinted_env import HintedEnv
from turngym.agents.local_engine.guided_policy import guided_player
from turngym.agents.local_engine.mixed_policy import mixed_player
from turngym.agents.model_player import ModelPlayer
from turngym.agents.players.mix import PlayerMix
from turngym.agents.rollout import MakeEnv, PlayJobs
from turngym.agents.scripted import named_player
from turngym.agents.training.options import PlayConfig
from turngym.envs.core import Task
from turngym.envs.protocols import Collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """Makes the rollout source of a run."""

    play: PlayConfig
    by: PlayJobs
    actor: ModelPlayer
    tokenizer: Any
    make_env: MakeEnv
    env: SharedEnv
    task_ids: Sequence[str]
    seed: int
    folder: Path
    """Of the run."""
    held_out: Sequence[Task] = ()
    demonstrations: Callable[[], Demonstrations]

    def student(self, teacher: Any, share: float, *, guided: bool) -> Collect:
        """The student plays; see `Rollouts.collect`."""
        slots = self.play.slots
        shown: dict[str, Any] = {"demonstrations": self.demonstrations()}
        if guided:
            shown["guided"] = guided_player(self.actor, teacher, self.tokenizer, slots=slots, play=self.by)
        player = mixed_player(self.actor, share, teacher, self.tokenizer, slots=slots, play=self.by)
        return self._kept(LiveCollect(player=player, make_env=self.make_env, **self._live, **shown))

    def demonstrated(self) -> Collect:
        """What --demonstrations names is imitated."""
        return self._kept(DemonstrationCollect(demonstrations=self.demonstrations(), **self._tasks))

    def expert(self) -> Collect:
        """The environment's expert plays, with noise, or a mixture of players."""
        play = self.play
        hinted = HintedEnv(self.make_env, play.hints, named_player(play.expert)) if play.hints else self.make_env
        expert = ExpertCollect(
            renderer=self.actor.renderer,
            settings=self.actor.settings,
            make_env=hinted,
            noise=play.noise,
            mistakes=play.mistakes,
            players=_players(play),
            **self._live,
        )
        return self._kept(expert)

    @property
    def _tasks(self) -> dict[str, Any]:
        return {"task_ids": self.task_ids, "seed": self.seed, "held_out": self.held_out, "shared": self.env}

    @property
    def _live(self) -> dict[str, Any]:
        return {**self._tasks, "slots": self.play.slots, "expert": self.play.expert, "play": self.by}

    def _kept(self, collect: Collect) -> Collect:
        last = self.play.keep_rollouts
        return KeptRollouts(collect=collect, folder=self.folder / "rollouts", last=last) if last else collect


def _players(play: PlayConfig) -> PlayerMix | None:
    if not play.players:
        return None
    return PlayerMix.parse(play.players, loop_after=play.loop_after, loop_slips=play.loop_slips)
