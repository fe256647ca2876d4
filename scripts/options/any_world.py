"""Options of `turngym pretrain` for an environment by its id, and how often its players succeed, before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from turngym.agents import play_episodes
from turngym.agents.environments import json_object, probe
from turngym.agents.evaluation.scores import Scores, score
from turngym.agents.evaluation.tables import columns, success_table, table_text
from turngym.agents.worlds.any_world import TEACHER_STEPS, AnyWorld
from turngym.envs.core import TurngymError

FILE = "success.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOptions:
    """What is played of an environment by its id, and by whom."""

    split: str = "train"
    """Split to train on."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON; an invalid action is a turn without effect unless they say otherwise."""
    max_turns: int = 24
    """Turns of an episode."""
    expert: str = "expert"
    """Who is imitated: the environment's expert, or another player by name."""
    student_steps: int = 60
    """Updates of the student."""
    batch: int = 32
    """Expert episodes per update."""
    vocabulary_episodes: int = 256
    """Episodes played to learn the vocabulary, where the environment has no `phrases()`."""
    eval_split: str | None = None
    """Split on which successes are counted at the end; by default the one that was trained on."""
    eval_episodes: int = 200
    """Episodes of each player for that; 0 counts nothing."""

    def refuse(self, world: str) -> None:
        """Raises TurngymError where an option is given with an embedded world, which has its own answer."""
        for item in fields(self):
            if getattr(self, item.name) != item.default:
                option = f"--{item.name.replace('_', '-')}"
                raise TurngymError(f"{option} is for an environment by its id; {world} is embedded, and has its own")

    def world(self, env_id: str, *, steps: int | None, seed: int) -> AnyWorld:
        """What is asked of the environment."""
        return AnyWorld(
            env_id=env_id,
            split=self.split,
            make={"on_invalid": "noop", **json_object("--env-kwargs", self.env_kwargs)},
            max_turns=self.max_turns,
            expert=self.expert,
            episodes=self.vocabulary_episodes,
            steps=(TEACHER_STEPS if steps is None else steps, self.student_steps),
            batch=self.batch,
            seed=seed,
        )

    def measured(self, asked: AnyWorld, models: Mapping[str, Path], out: Path) -> str:
        """A table of how often models, a random player and the expert succeed; the numbers are kept in `out`."""
        kwargs = {**asked.make, "split": self.eval_split or self.split, "max_turns": self.max_turns}
        base = probe(asked.env_id, kwargs)
        agents = {name: f"model:{folder}" for name, folder in models.items()} | {"expert": self.expert}
        found = {name: self._played(asked, agent, kwargs, len(base.task_ids())) for name, agent in agents.items()}
        numbers = {name: scores.overall for name, scores in found.items()}
        table = {
            name: {"avg": row.avg.mean, "low": row.avg.low, "high": row.avg.high, "episodes": row.episodes}
            for name, row in numbers.items()
        }
        (out / FILE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return table_text(columns(success_table(found)))

    def _played(self, asked: AnyWorld, agent: str, kwargs: Mapping[str, Any], tasks: int) -> Scores:
        many = min(tasks, self.eval_episodes)
        samples = max(self.eval_episodes // many, 1)
        more: dict[str, Any] = {"tasks": many, "samples": samples, "seed": asked.seed, "env_kwargs": kwargs}
        # where every task is played, drawing would only change their order
        more |= {"draw": many < tasks, "progress": False, "threads": 1}
        return score(play_episodes(asked.env_id, agent, **more).episodes)
