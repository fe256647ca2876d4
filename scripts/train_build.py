"""From the options of `turngym train` to a trainer; `train_models` loads the models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from turngym.agents.collect import ExpertCollect, LiveCollect, SharedEnv
from turngym.agents.environments import env_maker, json_object
from turngym.agents.evaluation.panel_evaluation import PanelEvaluation
from turngym.agents.executor import CancellableRollout, ParallelRollout
from turngym.agents.judges.hint_prompts import HintPrompts
from turngym.agents.judges.hinted_env import HintedEnv
from turngym.agents.judges.make_judge import make_judge
from turngym.agents.judges.traces import JudgedTraces
from turngym.agents.local_engine.mixed_policy import MixedPolicy, mixed_player
from turngym.agents.models import weights_hash
from turngym.agents.player import Player
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rollout import PlayJobs, rollout
from turngym.agents.scripted import named_player
from turngym.agents.sglang.scorer import SglangScorer
from turngym.envs.core import TurngymError
from turngym.envs.panels import assert_disjoint, load_panel
from turngym.envs.trace import read_trace
from turngym.scripts.train import Options
from turngym.scripts.train_models import has_teacher, load_reference, load_student, load_teacher, server_engine
from turngym.trainers.algorithm import Algorithm, Term
from turngym.trainers.algorithms import grpo, grpo_kd, luffy, opd, opd_hints, ppo_kd, prm_rl, sft, tcod, turnopd
from turngym.trainers.judge.collect import JudgedCollect
from turngym.trainers.losses.lm_loss import LmLoss
from turngym.trainers.models.lora import add_adapters
from turngym.trainers.models.scorer import LocalScorer
from turngym.trainers.run.async_rollout import AsyncRollout, WeightSnapshot, frozen_copy
from turngym.trainers.run.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.run.offline_rollouts import DatasetCollect
from turngym.trainers.run.progress import LiveProgress
from turngym.trainers.run.rollout_schedule import RolloutSchedule, Synchronous
from turngym.trainers.trainer import Trainer

JUDGED: Mapping[str, Literal["score", "hint"]] = {"prm-rl": "score", "opd-hints": "hint"}
"""Algorithms that learn from a judge, and what they ask it."""


def build_algorithm(options: Options, tokenizer: Any = None) -> Algorithm:
    """The composition that `options.algorithm` names; algorithms that read text need the student's tokenizer."""

    def text() -> tuple[Term, ...]:
        def encode(document: str) -> list[int]:
            return list(tokenizer.encode(document, add_special_tokens=False))

        return (LmLoss(options.lm_loss, encode, micro_tokens=run.micro_tokens, autocast=run.autocast != "off"),)

    run, distill = options.run, options.distill
    builders: dict[str, Callable[[], Algorithm]] = {
        "sft": lambda: sft.build(options.sft, run),
        "opd": lambda: opd.build(options.opd, distill, run),
        "turnopd": lambda: turnopd.build(options.turnopd, distill, run),
        "tcod": lambda: tcod.build(options.tcod, distill, run),
        "grpo": lambda: grpo.build(options.grpo, run),
        "luffy": lambda: luffy.build(options.luffy, run),
        "prm-rl": lambda: prm_rl.build(options.prm_rl, run),
        "opd-hints": lambda: opd_hints.build(options.opd_hints, distill, run, teacher=has_teacher(options)),
        "grpo-kd": lambda: grpo_kd.build(options.grpo_kd, run),
        "grpo-minillm": lambda: grpo_kd.build(options.grpo_kd, run, text()),
        "ppo-kd": lambda: ppo_kd.build(options.ppo_kd, run),
        "ppo-minillm": lambda: _ppo_minillm(options, text),
    }
    return builders[options.algorithm]()


def _ppo_minillm(options: Options, text: Callable[[], tuple[Term, ...]]) -> Algorithm:
    bonus = options.lm_loss.in_reward
    if not bonus:
        return ppo_kd.build(options.ppo_kd, options.run, text())
    warnings.warn("--lm-loss.in-reward adds a constant to every reward: it carries no gradient", stacklevel=2)
    return ppo_kd.build(options.ppo_kd, options.run, bonus=bonus)


def build_trainer(options: Options, play: PlayJobs = rollout) -> Trainer:
    """Load models and environment and put the run together; nothing is written yet. `play` plays the episodes."""
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = ChatSettings.load(options.student)
    model, tokenizer = load_student(options.student, options.dtype, options.device)
    if options.lora.rank:
        add_adapters(model, options.lora, base=str(options.student), seed=options.run.seed)
    algorithm = options.stale.corrected(build_algorithm(options, tokenizer))
    if algorithm.needs_teacher and not has_teacher(options):
        raise TurngymError(f"--algorithm {options.algorithm} distils from a teacher: name its folder with --teacher")
    room, ahead = SharedEnv(_make_env(options)), options.stale.staleness > 0
    tool = room.env.unwrapped.tool
    engine = None if ahead else server_engine(options, model, tokenizer, settings)
    player = Player.of(model, tokenizer, settings, tool, slots=options.slots, engine=engine)
    actor, order, play = (
        _playing_ahead(options, model, tokenizer, player, play) if ahead else (player, Synchronous(), play)
    )
    if options.resume and list_checkpoints(options.out):
        player.engine.weights_changed(read_state(latest_checkpoint(options.out))["step"])
    evaluation = _evaluation(options, player, play)
    teacher, vocab_size = load_teacher(options, model, tokenizer, algorithm)
    reference = load_reference(options, algorithm, vocab_size)

    def save_extra(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        settings.save(folder)

    identity = {"env": options.env, "split": options.split, "make": options.make, "chat": asdict(settings)}
    if options.teacher is not None and algorithm.needs_teacher:
        identity["teacher"] = weights_hash(options.teacher)
    elif isinstance(teacher, SglangScorer):
        identity["teacher"] = teacher.fleet.servers[0].model
    if options.lora.rank:
        adapters = {**asdict(options.lora), "targets": list(options.lora.targets)}
        identity |= {"lora": adapters, "student": weights_hash(options.student)}
    if options.algorithm in JUDGED:
        identity["judge"] = {**asdict(options.judging), "judge_every": None, "expert": options.expert}
    partner = teacher.model if isinstance(teacher, LocalScorer) else None
    playing = mixed_player(actor, algorithm.teacher_mix, partner, tokenizer, slots=options.slots, play=play)
    return Trainer(
        model=model,
        algorithm=algorithm,
        collect=_judged(options, actor, _collect(options, playing, evaluation, play, room)),
        out=options.out,
        run=options.run,
        optimizer=options.optimizer,
        teacher=teacher,
        reference=reference,
        evaluate=evaluation,
        on_update=player.engine.weights_changed,
        save_extra=save_extra,
        vocab_size=vocab_size,
        identity=identity,
        progress=LiveProgress(options.algorithm, options.run.steps),
        order=order,
        servers=engine,
    )


def _playing_ahead(
    options: Options, student: Any, tokenizer: Any, learner: Player, play: PlayJobs
) -> tuple[Player, RolloutSchedule, PlayJobs]:
    """Who plays while the learner learns: a copy of the student with an engine, or servers, of its own."""
    settings = learner.settings
    model, words = frozen_copy(student), copy.deepcopy(tokenizer)  # another thread uses them
    engine = server_engine(options, model, words, settings)
    actor = Player.of(model, words, settings, learner.tool, slots=options.slots, engine=engine)
    if not isinstance(play, ParallelRollout):
        play = CancellableRollout()
    snapshot = WeightSnapshot(student, model, actor.engine.weights_changed)
    order = AsyncRollout(
        staleness=options.stale.staleness, last=options.run.steps, snapshot=snapshot, cancel=play.cancel
    )
    return actor, order, play


def _make_env(options: Options, **more: Any) -> Callable[[], Any]:
    kwargs = {"split": options.split, "max_turns": options.run.max_turns, **json_object("--make", options.make)}
    if options.data is not None:
        kwargs["data"] = options.data
    return env_maker(options.env, **kwargs, **more)


def _evaluation(options: Options, player: Player, play: PlayJobs) -> PanelEvaluation | None:
    if options.panel is None:
        return None
    panel = load_panel(options.panel)
    more = {key: value for key, value in json_object("--make", options.make).items() if key in ("on_invalid", "engine")}
    kwargs = {"max_turns": options.run.max_turns, **more, **panel.make_kwargs, "channel": player.settings.channel}
    if options.data is not None:
        kwargs["data"] = options.data
    return PanelEvaluation(
        panel=panel,
        player=player,
        make_env=env_maker(panel.env_id, **kwargs),
        folder=options.out / "eval",
        samples=options.eval_samples,
        temperature=options.eval_temperature,
        seed=options.run.seed,
        slots=options.slots,
        limit=options.eval_limit,
        play=play,
    )


def _collect(
    options: Options, player: Player, evaluation: PanelEvaluation | None, play: PlayJobs, room: SharedEnv
) -> Any:
    held_out = () if evaluation is None else evaluation.panel.tasks
    if options.traces:
        if isinstance(player.engine, MixedPolicy):
            raise TurngymError("teacher_mix is a way of playing: it cannot be used with --traces")
        episodes = [episode for path in options.traces for episode in read_trace(path)[0]]
        assert_disjoint([episode.task for episode in episodes], held_out)
        return DatasetCollect(episodes=episodes, seed=options.run.seed, cut=options.algorithm != "sft")
    make_env = _make_env(options, channel=player.settings.channel)
    shared = {
        "make_env": make_env,
        "task_ids": room.env.unwrapped.task_ids(),
        "seed": options.run.seed,
        "slots": options.slots,
        "held_out": held_out,
        "expert": options.expert,
        "play": play,
        "shared": room,
    }
    if options.algorithm == "sft":
        if options.hints:
            shared["make_env"] = HintedEnv(make_env, options.hints, named_player(options.expert))
        return ExpertCollect(
            renderer=player.renderer, settings=player.settings, noise=options.noise, mistakes=options.mistakes, **shared
        )
    return LiveCollect(player=player, **shared)


def _judged(options: Options, player: Player, collect: Any) -> Any:
    """`collect` itself, or for the algorithms that learn from a judge its episodes with votes and hints."""
    kind = JUDGED.get(options.algorithm)
    if kind is None:
        return collect
    hints = HintPrompts(
        renderer=player.renderer,
        position=options.opd_hints.hint_position,
        max_context=player.engine.max_length,
    )
    judge = make_judge(
        options.judging,
        kind,
        make_env=_make_env(options, channel=player.settings.channel),
        expert=options.expert,
        seed=options.run.seed,
        device=options.device,
    )
    return JudgedCollect(
        collect=collect,
        judge=judge,
        kind=kind,
        next_role=player.settings.observation_role,
        enhance=hints if kind == "hint" else None,
        record=JudgedTraces(options.out / "judged", options.judging.judge_every),
    )
