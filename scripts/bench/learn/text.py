"""Text for L_PT without a download: what an embedded world's expert sees and does, one document per episode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.episode import Episode


def write_text(world: EmbeddedWorld, path: Path, episodes: int = 64, seed: int = 0) -> Path:
    """Let the expert play `episodes` training tasks of `world` and write them to `path`, unless that exists.

    Blank lines separate documents, so an episode has none within.
    """
    if path.exists():
        return path
    make_env = env_maker(world.env_id, split=world.split, max_turns=world.max_turns, **world.make)
    ids = probe(world.env_id, {"split": world.split, **world.make}).task_ids()
    jobs = [Job(task_id=ids[place % len(ids)], sample=place, group=place, seed=seed) for place in range(episodes)]
    played = rollout(jobs, make_env, ExpertAgent(expert=named_player(world.expert)), max_turns=world.max_turns)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".writing")
    scratch.write_text("\n\n".join(document(episode, world.tags) for episode in played) + "\n", encoding="utf-8")
    return scratch.replace(path)


def document(episode: Episode, tags: Sequence[str] = ("action",)) -> str:
    """The observations and actions of an episode as lines; an action whose tag is its verb already carries it."""
    form = "<action>{}</action>" if "action" in tags else "{}"
    lines = [line for turn in episode.turns for line in (turn.observation, form.format(turn.action))]
    return re.sub(r"\n\s*\n", "\n", "\n".join([*lines, episode.final_observation or ""])).strip()
