"""Opens what `--demonstrations` names: recorded episodes, or an agent that plays the tasks for the student."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from turngym.agents.demonstrations import (
    APART,
    DemonstrationFilter,
    Demonstrations,
    LiveDemonstrator,
    RecordedDemonstrator,
    left_out,
)
from turngym.agents.named_agent import open_agent
from turngym.agents.play_spec import EnvPlayer, Local, RecordedAgent
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.core.errors import TurngymError
from turngym.core.plugins import find_reward
from turngym.core.spec import changed
from turngym.core.task import Task
from turngym.core.trace import read_episodes
from turngym.core.user_files import user_path
from turngym.envs.base import tasks_of
from turngym.envs.panels import assert_disjoint
from turngym.trainers.student_player import RunEnv, text_writer


def open_demonstrations(env: RunEnv) -> Demonstrations | None:
    """Opens what `--demonstrations` names, for the student in `env`; without a name the environment's expert.

    None where the run needs none: its episodes are recorded, or an expert plays them itself. Raises TurngymError for an
    unknown agent, a missing file, or a file without a demonstration of any of the tasks.
    """
    config, run, student = env.config, env.info, env.student
    demonstrator = config.part("demonstrations").demonstrator
    if config.play.traces or (run.imitates is not None and demonstrator is None):
        return None
    player, base, play = student.actor, student.env, student.play
    reward = config.part("reward")
    writer, options = text_writer(player), config.part("demonstrations")
    # a memory rewrites prompts turn by turn: their sum is no conversation that must fit
    fits = writer.fits if options.demonstration_fits and player.settings.memory == "all" else None
    keep = DemonstrationFilter(
        success=options.demonstration_success,
        least=options.demonstration_reward,
        reward=None if reward is None else find_reward(reward),
        fits=fits,
    )

    # recorded episodes; they are filtered as they are read
    if isinstance(demonstrator, RecordedAgent):
        recorded = _recorded(user_path(demonstrator.trace), keep, tasks_of(base), env.held_out)
        return Demonstrations(source=recorded, writer=writer)

    slots = config.play.slots
    players = ("expert", *base.players)
    if demonstrator is None or (
        isinstance(demonstrator, EnvPlayer) and demonstrator.name in players and not demonstrator.noise
    ):
        # the environment's expert, or another player that it knows by name
        name = config.part("expert") if demonstrator is None else demonstrator.name
        agent = ExpertAgent(expert=named_player(name))
        source = LiveDemonstrator(agent=agent, make_env=student.make_env, slots=slots, play=play)
    else:
        # another agent: a model, an endpoint, somebody else's class
        engine = getattr(demonstrator, "engine", None)
        if isinstance(engine, Local) and engine.device == "auto":
            # it computes where the run does
            demonstrator = changed(demonstrator, engine=changed(engine, device=config.models.device))
        opened = open_agent(demonstrator, lambda: base, slots)
        source = LiveDemonstrator(
            agent=opened.agent,
            make_env=student.make_env_in(opened.channel),
            system=opened.system,
            apart=APART,
            slots=slots,
            play=play,
        )
        named = (getattr(demonstrator, attribute, None) for attribute in ("name", "folder", "model"))
        name = next((name for name in named if name is not None), "random")
    return Demonstrations(source=source, keep=keep, writer=writer, name=f"demonstrations of {name}")


def _recorded(
    path: Path, keep: DemonstrationFilter, tasks: Sequence[str], held_out: Sequence[Task]
) -> RecordedDemonstrator:
    # the ids may be another tokenizer's, but none may be negative
    episodes = read_episodes(path, vocabulary=1 << 31)
    assert_disjoint([episode.task for episode in episodes], held_out)
    recorded = RecordedDemonstrator.of(episodes, keep)
    covered = len(recorded.by_task.keys() & set(tasks))
    print(
        f"demonstrations in {path}: {left_out(recorded.counts)}, for {covered} of {len(tasks)} tasks", file=sys.stderr
    )
    if not covered:
        example = episodes[0].task.task_id if episodes else "none"
        raise TurngymError(
            f"--demonstrations {path}: none of its {len(episodes)} episodes is a demonstration of one of the "
            f"{len(tasks)} tasks of this split (the first is of {example}); record others, or filter less"
        )
    return recorded
