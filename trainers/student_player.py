"""The student at play: its environment, the model that plays in it, and who computes (this process, workers, servers).

`StudentPlayer` is opened once for each environment of a run, from `TrainConfig` (what the settings say) and `RunInfo`
(what the run knows). It keeps no settings: what is played is in `student_sources`, how it is evaluated in
`panel_evaluation`, how it is judged in `open_judge`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from turngym.agents.evaluation.open_play import scored
from turngym.agents.executor.worker_count import PlayWorkload
from turngym.agents.executor.workers import CancellableRollout, open_workers
from turngym.agents.local_engine.positions import position_limit
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.models import load_tokenizer
from turngym.agents.named_agent import chat_settings, completed_chat, open_examples
from turngym.agents.playing.agent import system_message
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import MakeEnv, PlayJobs
from turngym.agents.rendering.chat_settings import CHAT_FILE, ChatSettings, describe
from turngym.agents.rendering.open_renderer import complete_settings, renderer_of
from turngym.agents.rendering.renderer import ChatRenderer, TextEpisodes
from turngym.agents.resolve_play import make_arguments
from turngym.agents.rollout_sources import SharedEnv
from turngym.agents.servers.server_options import Here, StartedServer, rollout_dtype
from turngym.core.errors import TurngymError
from turngym.core.protocols import Question
from turngym.core.spec import changed
from turngym.core.task import Task
from turngym.envs.base import TextEnv
from turngym.envs.channels import make_channel
from turngym.envs.panels import Panel
from turngym.trainers.algorithm import ExpertPlay
from turngym.trainers.scorer import ModelWeights
from turngym.trainers.teacher import no_longer_than
from turngym.trainers.train_config import TrainConfig

if TYPE_CHECKING:
    from turngym.agents.executor.parallel import ParallelRollout
    from turngym.agents.servers.weights import SyncedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedModel:
    """A model that plays, with its tokenizer."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a student at play must know about a run."""

    out: Path
    """Folder of the run."""
    learner: PlayedModel
    """The student; evaluations are always its own."""
    actor: PlayedModel | None = None
    """A copy that plays ahead while the student learns; None: the student plays."""
    seed: int = 0
    episodes: int = 0
    """Episodes that the whole run is to play; 0: unknown."""
    imitates: ExpertPlay | None = None
    """How an expert plays the episodes of a step; None: the student plays them."""
    vocab_size: int | None = None
    """Number of ids that count where the student is scored; it draws no others. None: all."""
    longest: int | None = None
    """Most ids of a row that every teacher can read; None: no teacher says."""
    judge: Question | None = None
    """What a judge is asked about their turns."""


class StudentPlayer:
    """A student in training plays an environment: in this process, in workers, or on servers.

    Raises TurngymError for an environment or server that does not fit. Close it when the run is over.
    """

    def __init__(self, config: TrainConfig, run: RunInfo) -> None:
        play, folder = config.play, config.models.student
        self._env_id = play.env.id
        self.settings = chat_settings(config.chat, ChatSettings.load(folder), self._env_id)
        if run.judge in ("hint", "both") and self.settings.memory != "all":
            raise TurngymError(
                f"--memory {self.settings.memory}: hints are read in the whole conversation; an algorithm that teaches "
                "by hints needs --memory all"
            )

        # Workers. `--workers auto` starts them only where the student plays the run's episodes in this process.
        self._closing = ExitStack()
        served = not isinstance(config.engine, Here)
        elsewhere = served or play.traces or run.imitates is not None
        workload = PlayWorkload(
            episodes=run.episodes, model=None if elsewhere else run.learner.model, ahead=run.actor is not None
        )
        choice = config.workers.count(workload)
        self.players = str(choice)
        """Who plays the episodes, in words, for those who read the run's settings."""
        self.play: PlayJobs = self._closing.enter_context(open_workers(config.workers, workload))
        parallel = cast("ParallelRollout", self.play) if choice.workers else None
        self._cancel: Callable[[], None] | None = None
        if run.actor is not None and parallel is not None:
            self._cancel = parallel.cancel
        elif run.actor is not None:
            self.play = in_process = CancellableRollout(config.workers.step_timeout)
            self._cancel = in_process.cancel

        # One environment stays open: what all environments of a process share (a shop, an index) is built once.
        self.data = {} if play.data is None else {"data": play.data}
        """Where the environment's data are, as an argument for gym.make; empty: where it looks for them."""
        self._arguments = make_arguments(play, play.data)
        self.shared = SharedEnv(env_maker(self._env_id, **self._arguments))
        self.settings = complete_settings(self.settings, run.learner.tokenizer, self.env.tool)
        self._played_with = no_longer_than(run.longest, self.settings, run.learner.model)
        if not (folder / CHAT_FILE).exists():
            print(describe(self.settings), file=sys.stderr)
        self.game = scored(play, self.env)
        """What is played, with what the environment says of its scoring."""
        if why := self.game.scoring.get("approximate"):
            print(f"the rewards of {self._env_id} are approximate ({why})", file=sys.stderr)

        channel = make_channel(self.settings.channel, self.env.tool)
        self.examples = open_examples(config.chat.examples, self.env, channel)
        self.chat = completed_chat(config.chat, self.settings.remembers, self.examples, self.settings)
        """How it is spoken to, with what its chat template decides and the hashes of the files that are named."""

        # Models. With an actor the learner only evaluates, in this process, and the servers follow the actor.
        self.servers: SyncedPolicy | None
        """Engine servers that play with the student's weights, or None."""
        self.learner, self.servers = self._player(config, run, run.learner, served=run.actor is None)
        """The student, which is evaluated."""
        self.actor = self.learner
        """The student or its copy, which plays episodes to learn from."""
        if run.actor is not None:
            self.actor, self.servers = self._player(config, run, run.actor, served=True)
        if parallel is not None:
            # now: where several processes train, the model is soon divided among them and cannot be copied any more
            for player in {id(player): player for player in (self.learner, self.actor)}.values():
                parallel.prepare(player.engine)

    def _player(
        self, config: TrainConfig, run: RunInfo, played: PlayedModel, *, served: bool
    ) -> tuple[ModelPlayer, SyncedPolicy | None]:
        engine = None
        if served and not isinstance(config.engine, Here):
            from turngym.agents.servers.open_servers import train_policy

            weights, server = ModelWeights(played.model), None
            if isinstance(config.engine, StartedServer):
                from turngym.agents.server_process import RunServer

                server = RunServer(
                    config.engine, config.models.student, run.out / "server.log", adapters=weights.adapter
                )
                self._closing.enter_context(server)
            engine = train_policy(
                config.engine,
                played.model,
                played.tokenizer,
                # what servers draw is scored by the student, whose positions they may be started beyond
                self._played_with.max_context or position_limit(played.model.config),
                run.out,
                weights=weights,
                vocab_size=run.vocab_size,
                own=server,
            )
            # what plays ahead is never idle
            engine.sleeps = engine.sleeps and run.actor is None
            self._closing.callback(engine.close)
        player = ModelPlayer.of(
            played.model,
            played.tokenizer,
            self._played_with,
            self.env.tool,
            slots=config.play.slots,
            dtype=rollout_dtype(config.engine),
            vocab_size=run.vocab_size,
            engine=engine,
            examples=self.examples.episodes,
            skills=self.examples.skills,
        )
        if self.examples.text:
            # in what is played alone: the settings that are saved with the model stay without
            system = self.examples.in_system(_system(self.env, player.settings, player.renderer))
            player = replace(player, settings=changed(player.settings, system=system))
        return player, engine

    @property
    def env(self) -> TextEnv:
        """The environment that stays open, to be asked for its tasks, its tool and its players."""
        env: TextEnv = self.shared.env.unwrapped
        return env

    @property
    def make_env(self) -> MakeEnv:
        """Makes environments to train on, in the student's channel."""
        return self.make_env_in(self.settings.channel)

    def make_env_in(self, channel: str | None) -> MakeEnv:
        """Makes environments to train on, in the `channel` of another agent; None: responses are bare actions."""
        return env_maker(self._env_id, **self._arguments, channel=channel)

    @property
    def system(self) -> str:
        """The system message that the student is given."""
        return _system(self.env, self.actor.settings, self.actor.renderer)

    def cancel(self) -> None:
        """Breaks off what is being played."""
        if self._cancel is not None:
            self._cancel()

    def close(self) -> None:
        """Ends worker processes."""
        self._closing.close()


def _system(env: TextEnv, settings: ChatSettings, renderer: ChatRenderer) -> str:
    """The system message: that of the settings, or what the environment says to their channel."""
    if settings.system is not None:
        return settings.system
    return system_message(env, make_channel(settings.channel, env.tool), renderer)


def teachers_reader(student: StudentPlayer, model: Any, folder: Path) -> TextEpisodes:
    """Writes the student's episodes as the ids of another `model`, from `folder`: in its own chat template and with
    its own system message, but in the student's channel. Raises TurngymError for histories that are rewritten."""
    if student.settings.memory != "all":
        raise TurngymError(
            f"--memory {student.settings.memory}: a teacher with another vocabulary reads the whole conversation; it "
            "needs --memory all"
        )
    tokenizer, tool = load_tokenizer(folder), student.env.tool
    settings = changed(ChatSettings.load(folder), channel=student.settings.channel)
    settings = complete_settings(settings, tokenizer, tool)
    renderer = renderer_of(model, tokenizer, settings, tool, student.examples.episodes, student.examples.skills)
    system = _system(student.env, settings, renderer)
    return TextEpisodes(
        renderer=renderer,
        channel=make_channel(settings.channel, tool),
        tool=tool,
        system=student.examples.in_system(system) if student.examples.text else system,
        max_context=settings.max_context or position_limit(model.config),
    )


def text_writer(player: ModelPlayer) -> TextEpisodes:
    """Writes other agents' episodes as the ids of the student that `player` is."""
    return TextEpisodes(
        renderer=player.renderer,
        channel=make_channel(player.settings.channel, player.tool),
        tool=player.tool,
        system=player.settings.system,
        max_context=player.engine.max_length,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnv:
    """An environment of a run, with the student that plays it and the panel that it is evaluated on."""

    config: TrainConfig
    info: RunInfo
    student: StudentPlayer
    panel: Panel | None = None
    """None: the run is not evaluated in this environment."""

    @property
    def held_out(self) -> Sequence[Task]:
        """The tasks of the panel, which must not be trained on."""
        return () if self.panel is None else self.panel.tasks
