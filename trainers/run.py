"""Read this first: how the settings of a run become a trainer, and how the run goes.

    train(...)        settings from keywords or a TOML file -> `TrainConfig` -> run_training
    run_training      locks the run's folder, builds the trainer, divides it among the processes, trains
    build_trainer     what a run consists of, from top to bottom: student, algorithm, environments, teacher, where
                      episodes come from, evaluations, what a resume compares, records: a `Trainer`

`turngym train` and `train()` come here, and so does the proxy whose clients train a model (`trainers.live.run`), which
has another source of episodes but makes algorithm and teacher by the same functions. Whoever plays otherwise
builds a `Trainer` with its own `source`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turngym.agents.executor.worker_count import RayActors
from turngym.agents.models import find_device, hub_folder, require_plain
from turngym.agents.play_spec import EvalSpec
from turngym.agents.playing.env_maker import env_class
from turngym.agents.playing.scripted import PLAYERS
from turngym.agents.presets import find_preset
from turngym.agents.saved_model import companion_writer
from turngym.agents.servers.server_options import StartedServer
from turngym.core.errors import SettingsError, TurngymError, checked_choice
from turngym.core.nested import at
from turngym.core.plugins import find_reward, installed, is_path
from turngym.core.protocols import DivisibleEvaluation, RolloutSource, Scorer
from turngym.core.provenance import CONFIG_FILE, write_config
from turngym.core.resolve import Layer, Resolved
from turngym.core.setting import kind_of
from turngym.core.settings import read_toml
from turngym.core.spec import changed, to_table
from turngym.core.user_files import user_path
from turngym.envs.panels import load_panel
from turngym.trainers import content_hashes
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import BUILT_IN, BuildContext, find_algorithm
from turngym.trainers.checked_parts import built
from turngym.trainers.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.distributed import distribute_trainer, local_device, open_ranks
from turngym.trainers.learning_rate import unmoved_loss, unsuited_lr
from turngym.trainers.lora import add_adapters
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import vocabulary_size
from turngym.trainers.open_demonstrations import open_demonstrations
from turngym.trainers.panel_evaluation import eval_spec, panel_evaluation, run_panel
from turngym.trainers.progress import LiveProgress, Progress
from turngym.trainers.ranks import Ranks, on_all_ranks
from turngym.trainers.recorded_source import RecordedSource, recorded_episodes
from turngym.trainers.rewards import RewardedSource
from turngym.trainers.rollout_order import AsyncRollout, RolloutSchedule, WeightSnapshot, frozen_copy, truncated
from turngym.trainers.run_config import PASS_TOKENS_CPU, RunConfig
from turngym.trainers.run_folder import lock_run, with_saved_settings
from turngym.trainers.run_spec import spec_of_run
from turngym.trainers.scorer import LocalScorer, load_student
from turngym.trainers.several_envs import (
    EachPanel,
    FurtherEnv,
    RoutedTeachers,
    SeveralSources,
    further_envs,
    shares_of,
    with_teacher_folder,
)
from turngym.trainers.student_player import PlayedModel, RunEnv, RunInfo, StudentPlayer, teachers_reader
from turngym.trainers.student_sources import played_source
from turngym.trainers.teacher import (
    check_teacher,
    find_translation,
    further_teachers,
    open_frozen,
    scoring_of,
    teachers_length,
)
from turngym.trainers.token_losses import bounded
from turngym.trainers.train_config import DEFAULT, TrainConfig, beyond, resolve_training
from turngym.trainers.train_loop import RunResult, Trainer, check_groups


def train(
    algorithm: str | None = None,
    *,
    config: Path | str | Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Trains a student as `turngym train` does: same settings, defaults, progress and resumption.

        train("turnopd", student="models/student", teacher="models/teacher", out="runs/turnopd", steps=50)

    Args:
        algorithm: a name (`turnopd`), `package.module:NAME`, or an entry point of `turngym.algorithms`; by default the
            one that `config` names, else turnopd.
        config: a TOML file, or its content: settings that `settings` override. A run's own `config.toml` repeats it.
        settings: what `turngym train ALGORITHM --help` lists, under the same names with underscores: `student` and
            `out` must be given, `resume=True` goes on. A group (`optimizer`, the algorithm's own) is a dict or an
            object of its class. Where several processes train (`torchrun`), each of them calls this.

    Raises:
        SettingsError: a setting that does not exist, or has a value that it cannot have.
        TurngymError: models, environment or folder that do not fit.
    """
    table = dict(read_toml(config, provenance=True) if isinstance(config, str | Path) else config or {})
    named = str(algorithm or table.get("algorithm") or DEFAULT)
    where = str(config) if isinstance(config, str | Path) else "config"
    layers = [(where, table), (f"train({named!r})", settings)]
    # settings are read first: a mistake in them is said at once, without waiting for other processes
    asked_layers = [Layer(name=name, table=given, asked=True) for name, given in layers]
    resolved = resolve_training(named, asked_layers, fetch=True)
    # the call as it stands in the run's provenance
    call = f"train({', '.join([repr(named), *(f'{name}={value!r}' for name, value in settings.items())])})"
    with open_ranks() as ranks:
        return run_training(resolved.spec, ranks, progress=progress, command=call, resolved=resolved)


def run_training(
    config: TrainConfig,
    ranks: Ranks,
    *,
    progress: bool = True,
    command: str | Sequence[str] = (),
    resolved: Resolved[TrainConfig] | None = None,
) -> RunResult:
    """Builds the trainer that `config` describes and trains on all `ranks`.

    The run's folder keeps `config` and `command`, from which the run can be repeated; with what people asked for where
    that is known (`resolved`).
    """
    if ranks.size > 1:
        if isinstance(config.engine, StartedServer):
            raise TurngymError(
                f"--engine {kind_of(type(config.engine))} with {ranks.size} training processes: start servers with "
                "`turngym serve policy`, and name them with --policy-server"
            )
        if isinstance(config.workers, RayActors) and config.workers.ray_address is None:
            raise TurngymError(
                f"--workers ray with {ranks.size} training processes: each would start a Ray of its own; name the "
                "cluster with --ray-address (auto, HOST:PORT)"
            )
        if config.models.device == "auto":
            config = changed(config, models=changed(config.models, device=local_device()))
    config = _with_folders(config)
    with ExitStack() as opened:
        # before anything is loaded or started: servers write into the folder, too
        lock_run(config.models.out, ranks, opened)
        trainer = on_all_ranks(ranks, lambda: build_trainer(config, opened))
        trainer.locked = True
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        for warning in (unsuited_lr(config.optimizer.lr, size, adapters=config.lora is not None), beyond(config)):
            if warning and not ranks.rank:
                print(warning, file=sys.stderr)
        # not yet: until the folder is open it may belong to another run
        trainer.on_start = lambda: _keep_config(config, resolved, command, trainer.players)
        if not progress:
            trainer.progress = Progress()
        shared = distribute_trainer(trainer, ranks, shard_teacher=config.part("frozen").shard_teacher)
        result = shared.train(resume=config.models.resume)
        # of other losses, those of policy gradients, nobody expects that they fall
        if not ranks.rank and find_algorithm(config.algorithm).reads & {"imitates", "distill"}:
            rows = [row for row in read_metrics(config.models.out) if row["kind"] == "train"]
            losses = [row["loss"] for row in rows if row.get("loss") is not None]
            if losses and (warning := unmoved_loss(losses, config.optimizer.lr)):
                print(warning, file=sys.stderr)
        return result


def _keep_config(
    config: TrainConfig, resolved: Resolved[TrainConfig] | None, command: str | Sequence[str], players: str
) -> None:
    """Writes config.toml. A resumed run leaves the file of the run that it continues, unless it is to be longer or
    that file is missing."""
    models, path = config.models, config.models.out / CONFIG_FILE
    if models.resume:
        # a run may have been killed between its first checkpoint and this file
        if path.exists() and at(read_toml(path), "run.steps") in (None, config.run.steps):
            return
        config = changed(config, models=changed(models, resume=False))
    about: dict[str, Any] = {"seed": config.run.seed, **({"players": players} if players else {})}
    if content := content_hashes.of_all(to_table(config)):
        about[content_hashes.CONTENTS] = content
    write_config(path, config, command or None, resolved, **about)


def build_trainer(config: TrainConfig, opened: ExitStack | None = None) -> Trainer:
    """Loads models and environments and puts the run together; nothing is written yet.

    What must be closed after the run (workers, connections) is put on `opened`.
    """
    opened, config = opened or ExitStack(), _with_folders(config)
    models, run = config.models, run_of(config)
    if models.threads:
        torch.set_num_threads(models.threads)

    # The student, and with --staleness the copy of it that plays while it learns.
    learner, actor = _students(config, run.seed)
    model, tokenizer = learner.model, learner.tokenizer

    # The algorithm: how deep is played, targets, weights of tokens, losses.
    algorithm = build_algorithm(config, tokenizer)
    check_teacher(config.algorithm, algorithm, has_teacher=config.has_teacher)
    vocabulary = config.distill.vocabulary
    translation = find_translation(vocabulary)
    if translation is not None and config.served_teacher:
        raise SettingsError(f"distill vocabulary is {vocabulary} with --teacher-server; valid: one in this process")

    # Who scores: the teacher, and the initial policy for algorithms that stay near it. Both come before the player, who
    # draws no id and plays no row that they could not score.
    scoring = scoring_of(run, dtype=config.part("frozen").teacher_dtype, device=models.device)
    student_parts, translated = (model, tokenizer), translation is not None
    teacher, reference, vocab_size = open_frozen(
        config, models.student, models.dtype, algorithm, student_parts, translated, **scoring
    )

    # The environments in which the student plays: that of --env is "", those of --also have names.
    further = further_envs(config, algorithm)
    info = RunInfo(
        out=models.out,
        learner=learner,
        actor=actor,
        seed=run.seed,
        episodes=run.steps * run.episodes,
        imitates=algorithm.imitates,
        vocab_size=vocab_size,
        longest=teachers_length(algorithm, teacher, config.teacher, further, other=translated),
        judge=algorithm.judge,
    )
    envs = _open_envs(config, info, further, opened)
    student = envs[""].student

    def on_update(version: int) -> None:
        # for all who play with the student's weights
        for env in envs.values():
            env.student.learner.engine.weights_changed(version)

    if models.resume and list_checkpoints(models.out):
        # versions count the steps of the run, not of this process
        on_update(read_state(latest_checkpoint(models.out))["step"])

    # Where a step's episodes come from: recorded or played, judged, rewarded.
    source = _source(config, algorithm, envs, further, teacher)

    # Evaluations, in each environment on its own panel.
    panels = {name: panel_evaluation(env.panel, env) for name, env in envs.items() if env.panel is not None}
    evaluate: DivisibleEvaluation | None = panels.get("")
    if evaluate is not None and len(panels) > 1:
        evaluate = EachPanel(first=evaluate, others={name: panel for name, panel in panels.items() if name})

    # What a run that goes on with this one must share with it.
    spec = spec_of_run(config, envs, further, panels)
    preset = find_preset(config.play.preset, config.play.env.id)

    # Targets of several teachers, or of a teacher that reads other ids.
    teachers = further_teachers(algorithm, further, student_parts, vocab_size, **scoring)
    if teachers:
        algorithm = replace(algorithm, target_fn=RoutedTeachers(target_fn=algorithm.target_fn, teachers=teachers))
    if translation is not None and vocab_size is None and isinstance(teacher, LocalScorer):
        if config.play.also:
            raise SettingsError(f"distill vocabulary is {vocabulary} with --also; valid: same")
        assert config.teacher is not None
        algorithm = translation(
            algorithm,
            config.distill,
            student=student.actor.renderer,
            reader=teachers_reader(student, teacher.model, config.teacher),
            sizes=(vocabulary_size(model), vocabulary_size(teacher.model)),
        )

    # When is played: before each step, or with --staleness while the student learns.
    order = RolloutSchedule()
    if actor is not None and config.stale is not None:
        order = AsyncRollout(
            staleness=config.stale.staleness,
            last=run.steps,
            snapshot=WeightSnapshot(model, actor.model, student.actor.engine.weights_changed),
            cancel=student.cancel,
        )

    return Trainer(
        model=model,
        algorithm=algorithm,
        source=source,
        out=models.out,
        run=run,
        optimizer=config.optimizer,
        teacher=teacher,
        reference=reference,
        evaluate=evaluate,
        on_update=on_update,
        save_extra=companion_writer(user_path(models.student), student.settings),
        vocab_size=vocab_size,
        spec=spec,
        contents=content_hashes.of_run(spec, teacher, preset),
        progress=LiveProgress(config.algorithm, run.steps),
        order=order,
        servers=student.servers,
        players=student.players,
    )


def _source(
    config: TrainConfig,
    algorithm: Algorithm,
    envs: Mapping[str, RunEnv],
    further: Sequence[FurtherEnv],
    teacher: Scorer | None,
) -> RolloutSource:
    """Where a step's episodes come from: recorded or played (in each environment a share), judged, and worth the run's
    own reward in the place of the environment's return."""
    source: RolloutSource
    demonstrations = open_demonstrations(envs[""])
    if config.play.traces:
        episodes = recorded_episodes(envs)
        if algorithm.teacher_mix:
            raise SettingsError("teacher_mix is a way of playing: it cannot be used with --traces")
        source = RecordedSource(episodes=episodes, seed=config.run.seed, cut=algorithm.cut_recorded)
    else:
        teacher_model = teacher.model if isinstance(teacher, LocalScorer) else None
        guided, share = algorithm.guide is not None, algorithm.teacher_mix
        source = played_source(envs[""], demonstrations, teacher=teacher_model, share=share, guided=guided)
    if algorithm.judge is not None:
        from turngym.trainers.open_judge import judged_source

        source = judged_source(source, envs[""], algorithm)
    if further and not config.play.traces:
        sources = {name: played_source(env, open_demonstrations(env)) for name, env in envs.items() if name}
        source = SeveralSources(sources={"": source, **sources}, shares=shares_of(further))
    reward, kind = config.part("reward"), getattr(config.own, "reward", "return")
    if reward is None:
        return source
    if kind in ("success", "score"):
        raise SettingsError(
            f"--reward {reward} takes the place of the return, but {find_algorithm(config.algorithm).table}.reward "
            f"is {kind}: leave one of them out"
        )
    return RewardedSource(source=source, reward=find_reward(reward), timeout=config.workers.step_timeout)


def _with_folders(config: TrainConfig) -> TrainConfig:
    models, method = changed(config.models, student=hub_folder(config.models.student)), config.method
    if teacher := config.part("teacher"):
        folder = None if config.teacher is None else hub_folder(config.teacher)
        method = changed(method, teacher=changed(teacher, teacher=folder))
    play = changed(config.play, also=tuple(with_teacher_folder(text) for text in config.play.also))
    return changed(config, models=models, play=play, method=method)


def _students(config: TrainConfig, seed: int) -> tuple[PlayedModel, PlayedModel | None]:
    """The student, and with --staleness the copy of it that plays while it learns."""
    models = config.models
    model, tokenizer = load_student(models.student, models.dtype, models.device)
    require_plain(model, models.student)
    if config.lora is not None:
        # absolute, for whoever reads the adapter stands elsewhere
        add_adapters(model, config.lora, base=str(user_path(models.student).resolve()), seed=seed)
    actor = None
    if config.stale is not None:
        # the tokenizer is copied, too: another thread uses it
        actor = PlayedModel(model=frozen_copy(model), tokenizer=copy.deepcopy(tokenizer))
    return PlayedModel(model=model, tokenizer=tokenizer), actor


def _open_envs(
    config: TrainConfig, info: RunInfo, further: Sequence[FurtherEnv], opened: ExitStack
) -> dict[str, RunEnv]:
    """Opens the run's environments, by name: its own is "", with those of --also after it.

    A further environment has its own folder in the run's. What must be closed after the run is put on `opened`.
    """
    envs = {}
    for item in (None, *further):
        name, played = ("", config) if item is None else (item.name, item.played(config))
        env_info = replace(info, out=info.out / name)
        student = StudentPlayer(played, env_info)
        # at once: what fails from here on must not leave workers or servers running
        opened.callback(student.close)
        envs[name] = RunEnv(config=played, info=env_info, student=student, panel=run_panel(played, student))
    return envs


def check_run(config: TrainConfig) -> None:
    """Raises TurngymError, before a model is loaded, where no run of these settings could begin.

    A study asks this for each of its runs: the last one is not to fail when all others are done.
    """
    # text needs the student's tokenizer, and so may the algorithm of another package
    if config.algorithm not in BUILT_IN or config.part("lm_loss").files:
        return
    algorithm = build_algorithm(config)
    check_teacher(config.algorithm, algorithm, has_teacher=config.has_teacher)
    check_groups(algorithm, config.run.episodes)
    if not is_path(expert := config.part("expert")):
        checked_choice("--expert", expert, ("expert", *env_class(config.play.env.id).players, *installed(PLAYERS)))


def evaluation_of(config: TrainConfig) -> EvalSpec | None:
    """What a run's evaluations play, before its student is loaded, who may say how it is spoken to; None where there
    are none. Raises TurngymError for a panel that is not there."""
    if config.evaluation is None:
        return None
    return eval_spec(load_panel(config.evaluation.panel), config)


def build_algorithm(config: TrainConfig, tokenizer: Any = None) -> Algorithm:
    """Builds the algorithm that `config` names; algorithms that read text need the student's tokenizer."""
    context = BuildContext(
        run=run_of(config),
        distill=config.distill,
        lm_loss=config.part("lm_loss"),
        has_teacher=config.has_teacher,
        tokenizer=tokenizer,
        env_id=config.play.env.id,
    )
    algorithm = built(find_algorithm(config.algorithm), config.own, context)
    stale = config.stale is not None or bool(config.play.traces)
    return truncated(bounded(algorithm, config.part("dual_clip"), stale=stale), config.stale)


def run_of(config: TrainConfig) -> RunConfig:
    """Returns the settings of the run, with as many tokens per pass as suit the device where they leave that open.

    Of a resumed run, how rows are packed is as it was when the run began.
    """
    run = with_saved_settings(config.loop, config.models.out) if config.models.resume else config.loop
    # a run may be planned on a machine that lacks its device
    device = find_device("auto") if config.models.device == "auto" else config.models.device
    tokens = PASS_TOKENS_CPU if run.micro_tokens is None and device.startswith("cpu") else run.pass_tokens
    return changed(run, micro_tokens=tokens)
