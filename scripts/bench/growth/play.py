"""Measures of playing without a model: turns of an episode, environments in a vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngym.scripts.bench.growth.measure import Measure, Work

ACTION = "look"
"""Always possible, and never the end of a task."""
STEPS = 200
"""Of every environment of a vector."""


class Looker:
    """An agent that looks around, turn after turn."""

    name = "looker"

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def respond(self, waiting: Sequence[Any]) -> list[Any]:
        return [self.writer.write(conversation, ACTION) for conversation in waiting]

    def release(self, conversation: Any) -> None:
        """It holds nothing."""


def open_turns(folder: Path, size: int, *, rendered: bool) -> Work:
    """One episode of `size` turns; `rendered` with token ids, its history growing to that."""
    from turngym.agents.playing.agent import ResponseWriter
    from turngym.agents.playing.environments import env_maker
    from turngym.agents.playing.rollout import Job, Rollout

    writer, channel = _rendered() if rendered else (ResponseWriter(), None)
    make_env = env_maker("turngym/ALFWorld-v0", max_turns=size, channel=channel)
    env: Any = make_env()
    (task, *_) = env.unwrapped.task_ids()
    env.close()
    driver = Rollout(make_env, Looker(writer))
    driver.run([Job(task_id=task, sample=0, group=0)])  # the game is read

    def work() -> None:
        (episode,) = driver.run([Job(task_id=task, sample=1, group=0)])
        assert episode.depth == size, episode.status

    return work


def _rendered() -> tuple[Any, str]:
    from turngym.agents.models import load_policy, renderer_of
    from turngym.agents.playing.agent import ResponseWriter
    from turngym.agents.playing.environments import probe
    from turngym.agents.rendering.chat_settings import ChatSettings
    from turngym.agents.worlds.alfworld import WORLD
    from turngym.agents.worlds.worlds import CHECKPOINTS

    folder = CHECKPOINTS / "alfworld" / "student"
    settings = ChatSettings.load(folder)
    model, tokenizer = load_policy(str(folder), "cpu", "float32")
    tool = probe(WORLD.env_id, {"split": WORLD.split, **WORLD.make}).tool
    return ResponseWriter(renderer_of(model, tokenizer, settings, tool)), settings.channel


def open_vector(folder: Path, size: int, *, lists: bool) -> Work:
    """`STEPS` steps of `size` environments, as Gymnasium's vector or in plain lists."""
    import gymnasium as gym

    import turngym.envs  # noqa: F401 - registers the ids

    envs: Any = gym.make_vec("turngym/ALFWorld-v0", size)
    envs.reset(seed=0)
    step, actions = envs.unwrapped.step_lists if lists else envs.step, [ACTION] * size
    step(actions)

    def work() -> None:
        for _ in range(STEPS):
            step(actions)

    return work


TURNS: dict[str, Any] = {"per": "turns", "sizes": (100, 400, 1600), "full": (100, 1000, 10_000)}
ENVS: dict[str, Any] = {
    "per": "environments",
    "sizes": (1, 8, 64, 256),
    "full": (1, 8, 64, 256),
    "holds": "a game each",
}
MEASURES = (
    Measure(
        name="turns of an episode",
        open=lambda folder, size: open_turns(folder, size, rendered=False),
        holds="what was said",
        **TURNS,
    ),
    Measure(
        name="turns with token ids",
        open=lambda folder, size: open_turns(folder, size, rendered=True),
        holds="what was said",
        needs="transformers",
        **TURNS,
    ),
    Measure(name="make_vec step", open=lambda folder, size: open_vector(folder, size, lists=False), **ENVS),
    Measure(name="make_vec step_lists", open=lambda folder, size: open_vector(folder, size, lists=True), **ENVS),
)
