"""From the options of `turngym serve proxy` to a service and the training that goes on beside it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from turngym.agents.proxy.conversation.chat import ChatListRenderer
from turngym.agents.proxy.service import ProxyService
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.sglang.open_servers import teacher_scorer
from turngym.envs.common.weights_hash import weights_hash
from turngym.envs.core import TurngymError
from turngym.envs.protocols import Scorer
from turngym.scripts.options.serve_proxy import ServeProxy, named
from turngym.scripts.serve.live.engine import open_engine
from turngym.scripts.serve.live.judge import make_session_judge
from turngym.scripts.serve.live.training import Lines, Training
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.losses.dual_clip import bounded
from turngym.trainers.losses.truncated_importance import TruncatedImportance
from turngym.trainers.models.load import load_scorer, load_student
from turngym.trainers.models.model import vocabulary_size
from turngym.trainers.models.scorer import LocalScorer
from turngym.trainers.registry import find_algorithm
from turngym.trainers.run.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.trainer import Trainer


def build(config: ServeProxy) -> tuple[ProxyService, Training | None]:
    """Load the models and put the run together; a folder that holds a run goes on.

    Raises TurngymError for a judge, a teacher or a folder that does not fit.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    chat = ChatSettings.load(config.student)
    model, tokenizer = load_student(config.student, config.dtype, config.device)
    settings = named(config.proxy, config.student, chat)
    serving = open_engine(config, model, tokenizer, chat.max_context, settings.max_batch)
    engine = serving.engine
    renderer = ChatListRenderer(tokenizer, thinking=chat.thinking, stop_ids=_stop_ids(model))
    seed, max_context = config.run.seed, engine.max_length
    if not config.train:
        return ProxyService(engine, renderer, config.out, settings, max_context=max_context, seed=seed), None
    algorithm = _algorithm(config, tokenizer)
    teacher, vocab_size = _teacher(config, algorithm, model, tokenizer)
    judge = make_session_judge(config, algorithm, renderer, max_context)
    checkpoint = latest_checkpoint(config.out) if list_checkpoints(config.out) else None
    step = 0 if checkpoint is None else read_state(checkpoint)["step"]
    training = Training(out=config.out, algorithm=algorithm, resume=checkpoint is not None, step=step)
    service = ProxyService(
        engine,
        renderer,
        config.out,
        settings,
        max_context=max_context,
        temperature=config.run.temperature,
        seed=seed,
        resumed_from=step,
        on_episode=training.put,
        on_turn=training.turn,
        on_feedback=training.feedback,
        on_close=serving.close,
    )
    source = training.connect(service, judge, serving.behind(service.engine), config)

    def save_extra(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        chat.save(folder)

    training.trainer = Trainer(
        model=model,
        algorithm=algorithm,
        collect=source,
        out=config.out,
        run=config.run,
        optimizer=config.optimizer,
        teacher=teacher,
        reference=_scorer(config, algorithm, config.student, vocab_size) if algorithm.needs_reference else None,
        on_update=training.updated,
        save_extra=save_extra,
        vocab_size=vocab_size,
        identity=_identity(config, chat),
        progress=Lines(),
    )
    return service, training


def _stop_ids(model: Any) -> tuple[int, ...]:
    """Ids that end an answer beside the tokenizer's own."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or ()
    return (more,) if isinstance(more, int) else tuple(more)


def _identity(config: ServeProxy, chat: ChatSettings) -> dict[str, Any]:
    """What must not change when a run goes on."""
    identity = {"env": "proxy", "chat": chat.identity, "batch_turns": config.batch_turns}
    if config.teacher is not None:
        identity["teacher"] = weights_hash(config.teacher)
    elif config.servers.teacher_server:
        identity["teacher"] = config.servers.teacher_server
    if config.lora.rank:
        # adapters are only right on the weights that they were trained on
        adapters = {**asdict(config.lora), "targets": list(config.lora.targets)}
        identity |= {"lora": adapters, "student": weights_hash(config.student)}
    return identity


def _algorithm(config: ServeProxy, tokenizer: Any) -> Algorithm:
    spec = find_algorithm(config.algorithm)
    teaches = config.teacher is not None or bool(config.servers.teacher_server)
    context = BuildContext(run=config.run, distill=config.distill, has_teacher=teaches, tokenizer=tokenizer)
    # sessions end long after their first turn, and wait for the judge: the student has learned in between
    algorithm = bounded(spec.build(getattr(config, spec.table), context), config.run.dual_clip, stale=True)
    if config.staleness is not None:
        algorithm = _corrected(algorithm, config.staleness, config.importance_cap)
    if algorithm.needs_teacher and not teaches:
        raise TurngymError(f"--algorithm {config.algorithm} distills from a teacher: name its folder with --teacher")
    return algorithm


def _corrected(algorithm: Algorithm, staleness: int, cap: float) -> Algorithm:
    """`algorithm` with its importance ratios truncated; what was drawn is stale here even if no update is allowed for:
    the engine is never quite the trainer."""
    if staleness < 0 or not cap >= 1:
        raise TurngymError(f"--staleness is {staleness} and --importance-cap {cap}; valid: 0 or more, and at least 1")
    loss = TruncatedImportance(loss=algorithm.token_loss, cap=cap)
    settings = {**algorithm.settings, "staleness": staleness, "importance_cap": cap}
    return replace(algorithm, token_loss=loss, settings=settings)


def _teacher(config: ServeProxy, algorithm: Algorithm, model: Any, tokenizer: Any) -> tuple[Scorer | None, int | None]:
    """The teacher as a scorer, here or on servers, and the number of ids that it shares with the student."""
    if not algorithm.needs_teacher:
        return None, None
    if config.servers.teacher_server:
        size, heat = vocabulary_size(model), algorithm.distill_temperature
        return teacher_scorer(config.servers, config.teacher, tokenizer, size, heat)
    assert config.teacher is not None  # one of the two is there
    scorer = _scorer(config, algorithm, config.teacher, None, student=(model, tokenizer))
    return scorer, scorer.vocab_size


def _scorer(
    config: ServeProxy,
    algorithm: Algorithm,
    folder: Path,
    vocab_size: int | None,
    student: tuple[Any, Any] | None = None,
) -> LocalScorer:
    return load_scorer(
        folder,
        dtype=config.teacher_dtype,
        device=config.device,
        temperature=algorithm.distill_temperature,
        max_tokens=config.run.micro_tokens,
        vocab_size=vocab_size,
        student=student,
        shared_prefixes=algorithm.shared_prefixes,
    )
