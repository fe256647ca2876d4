"""Who plays the episodes of a training step: the student, a demonstrator, or an expert with noise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turngym.agents.collect import DemonstrationCollect, ExpertCollect, KeptRollouts, LiveCollect, SharedEnv
from turngym.agents.demonstrations import (
    APART,
    DemonstrationFilter,
    Demonstrations,
    LiveDemonstrator,
    RecordedDemonstrator,
    left_out,
)
from turngym.agents.judges.hints import HintedEnv
from turngym.agents.mixed_policy import guided_player, mixed_player
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.open_agent import OpenedAgent, open_agent
from turngym.agents.playing.rollout import MakeEnv, PlayJobs
from turngym.agents.playing.scripted import ExpertAgent, PlayerMix, named_player
from turngym.agents.rendering.renderer import TextEpisodes
from turngym.envs.base import TextEnv
from turngym.envs.channels import make_channel
from turngym.envs.core.episode import SHORT, Episode, Status
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import find_reward
from turngym.envs.core.protocols import Collect, CollectRequest
from turngym.envs.core.task import Task
from turngym.envs.core.trace import read_trace
from turngym.envs.panels import assert_disjoint, task_order
from turngym.trainers.train_config import PlayConfig, RolloutConfig, StudentRun

# Opens what `--demonstrations` names, for a student in training.

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


# A rollout source that plays nothing: recorded episodes, shuffled epoch by epoch.


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCollect:
    """Implements `Collect` over a fixed list, in `task_order`; temperature and prefixes are as recorded.

    Where a step wants groups, attempts at one task that follow each other are one; attempts left over are not used.
    """

    episodes: Sequence[Episode]
    seed: int = 0
    cut: bool = False
    """End longer episodes at a step's depth cap, as if they had been played for it."""

    def __call__(self, request: CollectRequest) -> list[Episode]:
        """`request.episodes` episodes.

        Raises TurngymError without episodes, without a whole group of one task, or for a curriculum that begins with
        an expert's turns: that needs an environment.
        """
        if not self.episodes:
            raise TurngymError("the data set has no episodes; give a trace file with at least one")
        if request.demonstration_turns is not None:
            raise TurngymError("a curriculum that begins with an expert's turns plays them: it cannot use trace files")
        groups = [[episode] for episode in self.episodes] if request.group == 1 else self._groups(request.group)
        places = task_order(len(groups), seed=self.seed, step=request.step, batch=request.episodes // request.group)
        chosen = [
            episode if request.group == 1 else replace(episode, group=number)
            for number, place in enumerate(places)
            for episode in groups[place]
        ]
        capped = zip(chosen, request.caps[: len(chosen)], strict=True)
        return [self._cut(episode, cap, request.max_turns) for episode, cap in request.own(list(capped))]

    def _cut(self, episode: Episode, cap: int, full: int) -> Episode:
        """`episode` as if it had been played for this step, marked where its cap lies below that of the step."""
        mark = {SHORT: cap} if self.cut and cap < full else {}
        if mark or SHORT in episode.meta:
            meta = {name: value for name, value in episode.meta.items() if name != SHORT}
            episode = replace(episode, meta={**meta, **mark})
        return _first_turns(episode, cap if self.cut else None)

    def _groups(self, size: int) -> list[list[Episode]]:
        tasks: dict[tuple[str, str], list[Episode]] = {}
        for episode in self.episodes:
            tasks.setdefault((episode.task.env_id, episode.task.task_id), []).append(episode)
        groups = [found[i : i + size] for found in tasks.values() for i in range(0, len(found) - size + 1, size)]
        if not groups:
            most = max(len(found) for found in tasks.values())
            raise TurngymError(
                f"no task of the {len(tasks)} in the data set has {size} episodes to compare, at most {most}; record "
                "more samples per task or make groups smaller"
            )
        return groups


def _first_turns(episode: Episode, cap: int | None) -> Episode:
    """`episode` as if it had been broken off after `cap` turns; itself if it is no longer."""
    if cap is None or episode.depth <= cap:
        return episode
    turns = episode.turns[:cap]
    # later turns overwrite earlier ones: a segment ends with its last response that is kept
    ends = {turn.segment: turn.response_span[1] for turn in turns}
    return replace(
        episode,
        turns=turns,
        segments=tuple(ids[: ends.get(number, 0)] for number, ids in enumerate(episode.segments[: max(ends) + 1])),
        status=Status.TRUNCATED_DEPTH,
        success=False,
        episode_return=float(sum(turn.reward for turn in turns)),
        score=turns[-1].progress or 0.0,
        final_observation=episode.turns[cap].observation,
    )
