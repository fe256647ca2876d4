"""Opens what `--demonstrations` names, for a student in training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turngym.agents.demonstrations.filters import DemonstrationFilter, left_out
from turngym.agents.demonstrations.plans import Demonstrations
from turngym.agents.demonstrations.sources import APART, LiveDemonstrator, RecordedDemonstrator
from turngym.agents.model_player import ModelPlayer
from turngym.agents.named_agent import OpenedAgent, open_agent
from turngym.agents.rendering.text_episodes import TextEpisodes
from turngym.agents.rollout import MakeEnv, PlayJobs
from turngym.agents.scripted import ExpertAgent, named_player
from turngym.agents.training.options import RolloutConfig
from turngym.envs.base import TextEnv
from turngym.envs.channels import make_channel
from turngym.envs.common.rewards import find_reward
from turngym.envs.common.rollout_side import StudentRun
from turngym.envs.core import Task, TurngymError
from turngym.envs.episode import Episode
from turngym.envs.panels import assert_disjoint
from turngym.envs.trace import read_trace

TRACES = (".jsonl", ".json")
"""How a trace file's name may end, to be told from the name of an agent even where it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationStage:
    """Where demonstrations are played, and what may be played."""

    make_env: Callable[[str | None], MakeEnv]
    """From a channel to what makes the run's environment with it."""
    env: TextEnv
    """The run's environment, to be asked."""
    play: PlayJobs
    held_out: Sequence[Task] = ()


def text_writer(player: ModelPlayer) -> TextEpisodes:
    """Writes other agents' episodes as the ids of the student that `player` is."""
    return TextEpisodes(
        renderer=player.renderer,
        channel=make_channel(player.settings.channel, player.tool),
        tool=player.tool,
        system=player.settings.system,
        max_context=player.engine.max_length,
    )


def open_demonstrations(
    config: RolloutConfig, run: StudentRun, player: ModelPlayer, stage: DemonstrationStage
) -> tuple[Demonstrations, dict[str, Any]]:
    """The demonstrations for the student that `player` is, and what a resumed run must share of them.

    Raises TurngymError for an unknown agent, a missing file, or a file without a demonstration of any of the tasks.
    """
    writer, which = text_writer(player), config.demonstrations
    # a memory rewrites prompts turn by turn: their sum is no conversation that must fit
    fits = writer.fits if which.demonstration_fits and player.settings.memory == "all" else None
    keep = DemonstrationFilter(
        success=which.demonstration_success,
        least=which.demonstration_reward,
        reward=None if run.reward is None else find_reward(run.reward),
        fits=fits,
    )
    identity = {f"collect.{name}": value for name, value in asdict(which).items()}
    name = which.demonstrations
    trace = _trace(name or "")
    if trace is not None:
        recorded = _recorded(trace, keep, stage)
        # by name alone, for folders may have moved; filtered as they were read
        return Demonstrations(source=recorded, writer=writer), identity | {"collect.demonstrations": trace.name}
    shared: dict[str, Any] = {"slots": config.play.slots, "play": stage.play}
    if name is None or name == "expert" or name in stage.env.players:
        agent = ExpertAgent(expert=named_player(name or config.play.expert))
        source = LiveDemonstrator(agent=agent, make_env=stage.make_env(player.settings.channel), **shared)
    else:
        options = config.demonstrator.agent(name, device=run.device, slots=config.play.slots)
        opened = open_agent(options, lambda: stage.env)
        played: dict[str, Any] = {"make_env": stage.make_env(opened.channel), "system": opened.system, "apart": APART}
        source = LiveDemonstrator(agent=opened.agent, **played, **shared)
        identity |= {"collect.demonstrations": _named(name, opened), **config.demonstrator.identity}
    said = f"demonstrations of {name or config.play.expert}"
    return Demonstrations(source=source, keep=keep, writer=writer, name=said), identity


def _trace(name: str) -> Path | None:
    """The file of recorded demonstrations, if that is what is named."""
    path = Path(name.removeprefix("replay:"))
    return path if name and (path.suffix in TRACES or path.is_file()) else None


def _named(name: str, opened: OpenedAgent) -> str:
    """A model by its content, since folders move; others by name."""
    return name if opened.fingerprint is None else f"{name.partition(':')[0]}:{opened.fingerprint}"


def _recorded(path: Path, keep: DemonstrationFilter, stage: DemonstrationStage) -> RecordedDemonstrator:
    episodes: list[Episode] = read_trace(path)[0]
    assert_disjoint([episode.task for episode in episodes], stage.held_out)
    found = RecordedDemonstrator.of(episodes, keep)
    tasks = set(stage.env.task_ids())
    known = sum(task in tasks for task in found.by_task)
    print(f"demonstrations in {path}: {left_out(found.counts)}, for {known} of {len(tasks)} tasks", file=sys.stderr)
    if not known:
        example = episodes[0].task.task_id if episodes else "none"
        raise TurngymError(
            f"--demonstrations {path}: none of its {len(episodes)} episodes is a demonstration of one of the "
            f"{len(tasks)} tasks of this split (the first is of {example}); record others, or filter less"
        )
    return found
