"""Who plays for a run: its environments, the student that plays them, its evaluations, and the judge of its turns.

`StudentRollouts` is opened once for a run, from `RolloutConfig` (what the settings say) and `RunInfo` (what the trainer
knows). The training loop only gets callables of it: a rollout source, an evaluation, a judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turngym.agents.agent_options import TEMPERATURE
from turngym.agents.demonstrations import Demonstrations
from turngym.agents.evaluation.evaluate import AGENT_FACING, SAMPLES, PanelEvaluation, check_panel, eval_note
from turngym.agents.evaluation.original import departures
from turngym.agents.evaluation.play_panel import TaskEvaluation
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.worker_count import Workload
from turngym.agents.executor.workers import CancellableRollout, open_workers
from turngym.agents.judges.env_judges import ENV_JUDGES, ExpertJudge, SkillsJudge
from turngym.agents.judges.hints import HintedEnv, HintPrompts, ToldEnv
from turngym.agents.judges.judges import BothQuestions, is_plain, make_judge
from turngym.agents.mixed_policy import guided_player, mixed_player
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.model_server import RunServer
from turngym.agents.models import load_tokenizer
from turngym.agents.playing.agent import system_message
from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import MakeEnv, PlayJobs
from turngym.agents.playing.scripted import PlayerMix, named_player
from turngym.agents.presets import Preset, find_preset
from turngym.agents.rendering.chat_settings import FILE, ChatSettings, describe
from turngym.agents.rendering.examples import Examples, read_examples
from turngym.agents.rendering.open_renderer import complete_settings, renderer_of
from turngym.agents.rendering.renderer import ChatRenderer, TextEpisodes
from turngym.agents.rendering.skills import PREFIX, Skills, read_skills
from turngym.agents.rendering.text_encoder import TextEncoder
from turngym.agents.rollout_sources import (
    DemonstrationSource,
    ExpertSource,
    KeptSource,
    LiveSource,
    SharedEnv,
    write_step,
)
from turngym.agents.servers.open_servers import train_policy
from turngym.agents.servers.weights import SyncedPolicy
from turngym.envs.base import TextEnv
from turngym.envs.channels import make_channel
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.protocols import Judge, Question, RolloutSource
from turngym.envs.core.rollout_request import RolloutRequest
from turngym.envs.core.strict_json import json_object
from turngym.envs.core.task import Task, plain_id
from turngym.envs.core.trace import read_episodes
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.retrieval.redaction import excerpt
from turngym.trainers.algorithm import ExpertPlay, Told
from turngym.trainers.open_demonstrations import open_demonstrations, text_writer
from turngym.trainers.recorded_source import ENVIRONMENT, check_logprobs, check_recorded, other_systems
from turngym.trainers.scorer import ModelWeights
from turngym.trainers.train_config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedModel:
    """A model that plays, with its tokenizer."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What the rollout side must know about a run."""

    folder: Path
    """Folder of the untrained student."""
    out: Path
    """Folder of the run."""
    learner: PlayedModel
    """The student; evaluations are always its own."""
    actor: PlayedModel | None = None
    """A copy that plays ahead while the student learns; None: the student plays."""
    seed: int = 0
    episodes: int = 0
    """Episodes that the whole run is to play; 0: unknown."""
    max_turns: int = 50
    explicit_turns: bool = False
    """Whether `max_turns` was asked for; otherwise a panel's own limit goes before it."""
    device: str = "auto"
    reward: str | None = None
    """The run's own reward, as `--reward` names it."""
    imitates: ExpertPlay | None = None
    """How an expert plays the episodes of a step; None: the student plays them."""
    judge: Question | None = None
    """What a judge is asked about their turns."""
    told: Told | None = None
    """What becomes of its hints."""


class StudentRollouts:
    """A student in training plays an environment: in this process, in workers, or on servers.

    Raises TurngymError for an environment, panel or server that does not fit. Close it when the run is over.
    """

    def __init__(self, config: RolloutConfig, run: RunInfo) -> None:
        self.config, self.run = config, run
        play = config.play
        # What follows without an underscore is read by `trainers/identity.py`, too.
        self.preset = find_preset(play.preset, play.env_id)
        self._env_kwargs = json_object("--env-kwargs", play.env_kwargs)
        settings = ChatSettings.load(run.folder)
        if self.preset is not None:
            settings = self.preset.settings(settings, self._env_kwargs)
        self.settings = config.chat.applied(settings, play.env_id)
        if run.judge in ("hint", "both") and self.settings.memory != "all":
            raise TurngymError(
                f"--memory {self.settings.memory}: hints are read in the whole conversation; an algorithm that teaches "
                "by hints needs --memory all"
            )

        # Workers. `--workers auto` starts them only where the student plays the run's episodes in this process.
        self._closing = ExitStack()
        elsewhere = config.servers.elsewhere or play.traces or run.imitates is not None
        workload = Workload(
            episodes=run.episodes, model=None if elsewhere else run.learner.model, ahead=run.actor is not None
        )
        self.players = str(config.workers.choice(workload))
        """Who plays the episodes, in words, for those who read the run's settings."""
        self._play: PlayJobs = self._closing.enter_context(open_workers(config.workers, workload))
        self._cancel: Callable[[], None] | None = None
        if run.actor is not None:
            if not isinstance(self._play, ParallelRollout):
                self._play = CancellableRollout(config.workers.step_timeout)
            self._cancel = self._play.cancel

        # One environment stays open: what all environments of a process share (a shop, an index) is built once.
        self._env = SharedEnv(self._maker())
        self.settings = complete_settings(self.settings, run.learner.tokenizer, self._env.env.unwrapped.tool)
        if not (Path(run.folder) / FILE).exists():
            print(describe(self.settings), file=sys.stderr)
        self.scoring: dict[str, str] = self._env.env.unwrapped.scoring
        if why := self.scoring.get("approximate"):
            print(f"the rewards of {play.env} are approximate ({why})", file=sys.stderr)

        shots, tool = config.few_shots, self._env.env.unwrapped.tool
        self.examples = Examples()
        if shots.examples is not None:
            channel = make_channel(self.settings.channel, tool)
            how = shots.examples_as, play.env_id, channel, tool, shots.examples_for
            self.examples = read_examples(shots.examples, *how)
            if self.examples.skills is not None:
                self.examples.skills.check(self._env.env.unwrapped)

        # Models. With an actor the learner only evaluates, in this process, and the servers follow the actor.
        self.servers: SyncedPolicy | None
        """Engine servers that play with the student's weights, or None."""
        self._learner, self.servers = self._player(run.learner, served=run.actor is None)
        self._actor = self._learner
        if run.actor is not None:
            self._actor, self.servers = self._player(run.actor, served=True)
        if isinstance(self._play, ParallelRollout):
            # now: where several processes train, the model is soon divided among them and cannot be copied any more
            for player in {id(player): player for player in (self._learner, self._actor)}.values():
                self._play.prepare(player.engine)

        self._panel = None if play.panel is None else load_panel(play.panel)
        if self._panel is not None:
            assert_disjoint(self.examples.tasks, self._panel.tasks)
            check_panel(self._panel, self._eval_kwargs(self._panel), play.env_id, self._env.env.unwrapped.tool)
        self._demonstrations_opened: Demonstrations | None = None
        self.demonstrated: dict[str, Any] = {}

    def _player(self, played: PlayedModel, *, served: bool) -> tuple[ModelPlayer, SyncedPolicy | None]:
        config, engine = self.config, None
        if served and config.servers.elsewhere:
            weights, own = ModelWeights(played.model), None
            if config.servers.engine != "local":
                log = self.run.out / "server.log"
                own = RunServer(
                    config.servers, self.run.folder, log, adapters=weights.adapter, dtype=config.play.rollout_dtype
                )
                self._closing.enter_context(own)
            engine = train_policy(
                config.servers,
                played.model,
                played.tokenizer,
                self.settings.max_context,
                self.run.out,
                weights=weights,
                own=own,
            )
            # what plays ahead is never idle
            engine.sleeps = engine.sleeps and self.run.actor is None
            self._closing.callback(engine.close)
        player = ModelPlayer.of(
            played.model,
            played.tokenizer,
            self.settings,
            self._env.env.unwrapped.tool,
            slots=config.play.slots,
            dtype=config.play.rollout_dtype,
            engine=engine,
            examples=self.examples.episodes,
            skills=self.examples.skills,
        )
        if self.examples.text:
            # in what is played alone: the settings that are saved with the model stay without
            said = player.settings.system
            if said is None:
                channel = make_channel(self.settings.channel, player.tool)
                said = system_message(self._env.env.unwrapped, channel, player.renderer)
            player = replace(player, settings=replace(player.settings, system=self.examples.in_system(said)))
        return player, engine

    def _maker(self, **more: Any) -> MakeEnv:
        """Makes the environment that is trained on."""
        preset = {} if self.preset is None else self.preset.make(training=True)
        run: dict[str, Any] = {"max_turns": self.run.max_turns}
        if self.config.play.split is not None:
            run["split"] = self.config.play.split
        return env_maker(self.config.play.env_id, **{**preset, **run, **self._env_kwargs, **self._data}, **more)

    @property
    def _data(self) -> dict[str, Any]:
        return {} if self.config.play.data is None else {"data": self.config.play.data}

    def _eval_kwargs(self, panel: Panel) -> dict[str, Any]:
        return eval_make(panel, self.config.play.preset, self._env_kwargs, self.run)

    @property
    def evaluate(self) -> PanelEvaluation | None:
        """Evaluates the learner after a step; None where the run has no panel."""
        if self._panel is None:
            return None
        play, panel = self.config.play, self._panel
        kwargs = self._eval_kwargs(panel)
        chat, preset = self._learner.settings, find_preset(play.preset, panel.env_id)
        own = (None, None) if preset is None else (preset.temperature, preset.samples)
        heats, counts = (play.eval_temperature, own[0], TEMPERATURE), (play.eval_samples, own[1], SAMPLES)
        temperature = next(heat for heat in heats if heat is not None)
        samples = next(count for count in counts if count is not None)
        scoring = probe(panel.env_id, {**kwargs, **self._data}).scoring
        if why := scoring.get("approximate"):
            print(f"evaluations: scores of {panel.full_name} are approximate ({why})", file=sys.stderr)
        evaluation = TaskEvaluation(
            panel,
            env_maker(panel.env_id, **{**kwargs, "channel": self.settings.channel, **self._data}),
            self._learner.agent(temperature),
            samples=samples,
            limit=play.eval_limit,
            temperature=temperature,
            seed=self.run.seed,
            slots=play.slots,
            system=chat.system,
            # the channel as `evaluate` records it: without it nobody could play the responses again
            settings={"channel": chat.channel, **eval_note(panel, play.preset, kwargs), **scoring},
            about=departures(
                panel.env_id,
                panel,
                preset,
                kwargs,
                played=self._told(chat, preset),
                channel=chat.channel,
                temperature=temperature,
                samples=samples,
                limit=play.eval_limit,
                scoring=scoring,
            ),
            play=self._play,
        )
        return PanelEvaluation(evaluation, self.run.out / "eval")

    def _told(self, chat: ChatSettings, preset: Preset | None) -> dict[str, Any]:
        """How the student is spoken to, as fields of `AgentOptions`; default limits are left out."""
        thinking = {None: "auto", True: "on", False: "off"}[chat.thinking]
        told = {"system": chat.system, "observation_role": chat.observation_role, "memory": chat.memory}
        prompts = self.config.chat.prompts or (None if preset is None else preset.prompts)
        limits = {"max_new_tokens": chat.max_new_tokens, "max_context": chat.max_context}
        short = {name: value for name, value in limits.items() if value != getattr(ChatSettings(), name)}
        return {**told, "thinking": thinking, "prompts": prompts, "examples": self.config.few_shots.examples, **short}

    @property
    def _held_out(self) -> Sequence[Task]:
        """The tasks of the panel, which must not be trained on."""
        return () if self._panel is None else self._panel.tasks

    @property
    def system(self) -> str:
        """The system message that the student is given."""
        player = self._actor
        if player.settings.system is not None:
            return player.settings.system
        channel = make_channel(self.settings.channel, player.tool)
        return system_message(self._env.env.unwrapped, channel, player.renderer)

    def recorded(self, others: Mapping[str, StudentRollouts] = MappingProxyType({})) -> list[Episode] | None:
        """Returns the episodes of `--traces`, to train on instead of playing; None without that option.

        `others` are the run's further environments, by name. Raises TurngymError for episodes of an environment that
        the run has not.
        """
        traces, rooms = self.config.play.traces, {"": self, **others}
        if not traces:
            return None
        size = int(self.run.learner.model.config.get_text_config().vocab_size)
        of_env = {plain_id(room.config.play.env_id): name for name, room in rooms.items()}
        episodes: list[Episode] = []
        for path in traces:
            found = read_episodes(path, size)
            check_recorded(found, str(path), self.config.play, of_env)
            check_logprobs(found, self.run.learner.model, str(path))
            episodes += found
        for room in rooms.values():
            assert_disjoint([episode.task for episode in episodes], room._held_out)
        # what another agent said is text; this student's ids are made of it, in the words of the episode's environment
        writers = {name: text_writer(room._actor) for name, room in rooms.items()}
        written = []
        for episode in episodes:
            name = of_env.get(episode.task.env_id, "")
            episode = writers[name].write(episode)
            written.append(replace(episode, meta={**episode.meta, ENVIRONMENT: name}) if name else episode)
        if said := other_systems(written, {name: room.system for name, room in rooms.items()}):
            print(said, file=sys.stderr)
        return written

    @property
    def renderer(self) -> ChatRenderer:
        """Makes the student's ids of a conversation."""
        return self._actor.renderer

    def reader(self, model: Any, folder: Path) -> TextEpisodes:
        """Writes the student's episodes as the ids of another `model`, from `folder`: in its own chat template and with
        its own system message, but in the student's channel. Raises TurngymError for histories that are rewritten."""
        if self.settings.memory != "all":
            raise TurngymError(
                f"--memory {self.settings.memory}: a teacher with another vocabulary reads the whole conversation; it "
                "needs --memory all"
            )
        tokenizer, tool = load_tokenizer(folder), self._env.env.unwrapped.tool
        settings = replace(ChatSettings.load(folder), channel=self.settings.channel)
        settings = complete_settings(settings, tokenizer, tool)
        renderer, channel = (
            renderer_of(model, tokenizer, settings, tool, self.examples.episodes, self.examples.skills),
            make_channel(settings.channel, tool),
        )
        said = settings.system
        if said is None:
            said = system_message(self._env.env.unwrapped, channel, renderer)
        return TextEpisodes(
            renderer=renderer,
            channel=channel,
            tool=tool,
            system=self.examples.in_system(said) if self.examples.text else said,
            max_context=settings.max_context or model.config.get_text_config().max_position_embeddings,
        )

    def source(self, teacher: Any, share: float, *, guided: bool = False) -> RolloutSource:
        """Returns who plays the episodes of a step: the student, or an expert whom it imitates.

        The model `teacher` chooses a `share` of the student's tokens, if that is not 0. Where `guided`, it plays whole
        turns: as many as each request says.
        """
        play, slots = self.config.play, self.config.play.slots
        make_env = self._maker(channel=self.settings.channel)
        known: Sequence[str] = self._env.env.unwrapped.task_ids()
        if self.config.demonstrations.demonstrated_tasks:
            known = self._demonstrations().tasks(known)
        tasks: dict[str, Any] = {
            "task_ids": known,
            "seed": self.run.seed,
            "held_out": self._held_out,
            "shared": self._env,
        }
        playing: dict[str, Any] = {"slots": slots, "expert": play.expert, "play": self._play}
        source: RolloutSource
        how = self.run.imitates
        if how is None:
            demonstrations, tokenizer = self._demonstrations(), self.run.learner.tokenizer
            guide = guided_player(self._actor, teacher, tokenizer, slots=slots, play=self._play) if guided else None
            source = LiveSource(
                player=mixed_player(self._actor, share, teacher, tokenizer, slots=slots, play=self._play),
                make_env=make_env,
                demonstrations=demonstrations,
                guided=guide,
                **tasks,
                **playing,
            )
        elif self.config.demonstrations.demonstrations is not None:
            source = DemonstrationSource(demonstrations=self._demonstrations(), **tasks)
        else:
            mix = None
            if how.players:
                mix = PlayerMix.parse(how.players, loop_after=how.loop_after, loop_slips=how.loop_slips)
            source = ExpertSource(
                renderer=self._actor.renderer,
                settings=self._actor.settings,
                make_env=self._told_while_played(make_env, how),
                noise=how.noise,
                mistakes=how.mistakes,
                players=mix,
                **tasks,
                **playing,
            )
        if play.keep_rollouts:
            return KeptSource(source=source, folder=self.run.out / "rollouts", last=play.keep_rollouts)
        return source

    def _told_while_played(self, make_env: MakeEnv, how: ExpertPlay) -> MakeEnv:
        """Makes environments that say what a student is to learn to read."""
        if how.hints:
            make_env = HintedEnv(make_env, how.hints, named_player(self.config.play.expert))
        if how.told:
            if not how.told.startswith(PREFIX):
                raise TurngymError(f"--sft.told is {how.told!r}; valid: {PREFIX}FOLDER")
            skills = read_skills(how.told.removeprefix(PREFIX))
            refuse_control_tokens(skills, self._actor.renderer.template.encoder)
            make_env = ToldEnv(make_env, tuple(sorted(skills.texts)))
        return make_env

    def _demonstrations(self) -> Demonstrations:
        # opened once, and only where somebody asks: a model that demonstrates is loaded for it
        if self._demonstrations_opened is None:
            opened = open_demonstrations(
                self.config,
                self._actor,
                make_env=lambda channel: self._maker(channel=channel),
                env=self._env.env.unwrapped,
                play=self._play,
                held_out=self._held_out,
                reward=self.run.reward,
                device=self.run.device,
            )
            self._demonstrations_opened, self.demonstrated = opened
        return self._demonstrations_opened

    def judge(self) -> Judge:
        """Returns the judge that the settings name. Raises TurngymError where the algorithm asks none."""
        if self.run.judge is None:
            raise TurngymError("the algorithm of this run asks no judge")
        judge = make_judge(
            self.config.judging,
            self.run.judge,
            ENV_JUDGES,
            make_env=self._maker(channel=self.settings.channel),
            expert=self.config.play.expert,
            seed=self.run.seed,
            device=self.run.device,
        )
        base = self._env.env.unwrapped
        asked = judge.one if isinstance(judge, BothQuestions) else judge
        knows = self.config.play.expert != "expert" or type(base).expert_action is not TextEnv.expert_action
        if isinstance(asked, ExpertJudge) and not knows:
            raise TurngymError(
                f"--judge {self.config.judging.judge} asks an expert, and {base.env_id} has none; valid: another judge"
            )
        if isinstance(judge, SkillsJudge):
            refuse_control_tokens(judge.skills, self._actor.renderer.template.encoder)
        return judge

    def add_hints(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the judged episodes with their hints in their prompts (`hint_prompt_ids`)."""
        player = self._actor
        limit, position = player.engine.max_length, (self.run.told or Told()).position
        return HintPrompts(renderer=player.renderer, position=position, max_context=limit)(episodes)

    def keep_judged(self, request: RolloutRequest, episodes: Sequence[Episode]) -> None:
        """Keeps the judged episodes of every so many steps as traces in the run's folder, to read."""
        every = self.config.judging.judge_every
        if every and (request.step - 1) % every == 0:
            write_step(self.run.out / "judged", request, episodes)

    def learner_changed(self, version: int) -> None:
        """The learner has new weights."""
        self._learner.engine.weights_changed(version)

    def actor_changed(self, version: int) -> None:
        """The actor has new weights."""
        self._actor.engine.weights_changed(version)

    def cancel(self) -> None:
        """Breaks off what is being played."""
        if self._cancel is not None:
            self._cancel()

    def close(self) -> None:
        """Ends worker processes."""
        self._closing.close()


def eval_make(panel: Panel, preset: str | None, given: Mapping[str, Any], run: RunInfo) -> dict[str, Any]:
    """Returns the arguments of `gym.make` for evaluations of `run` on `panel`; `given` are those for training.

    The limit of turns is --max-turns where that was given, else the preset's, the panel's, the run's.
    """
    found = find_preset(preset, panel.env_id)
    shared = {name: value for name, value in given.items() if name in AGENT_FACING}
    if found is None:
        kwargs = {"max_turns": run.max_turns, **shared, **panel.make_kwargs}
    else:
        kwargs = {**panel.make_kwargs, **found.make(shared)}
    if run.explicit_turns:
        kwargs["max_turns"] = run.max_turns
    return kwargs


def refuse_control_tokens(skills: Skills, encoder: TextEncoder) -> None:
    """Raises TurngymError for a text that no prompt would hold."""
    if forged := next((text for text in sorted(skills.texts) if not is_plain(text, encoder)), None):
        raise TurngymError(
            f"skills {skills.name}: the text {excerpt(forged, 40)!r} spells a control token of the student's "
            "tokenizer, or has control characters; no prompt would hold it"
        )
