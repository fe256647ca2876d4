"""The models that the options of `turngym train` name: student, teacher, initial policy, here or on servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.sglang.open_servers import teacher_scorer, train_policy
from turngym.agents.sglang.scorer import SglangScorer
from turngym.agents.sglang.weights.synced_policy import SyncedPolicy
from turngym.envs.core import TurngymError
from turngym.scripts.train import Options
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.models.model import load_model, vocabulary_size
from turngym.trainers.models.prefix_sharing import supports_prefix_sharing
from turngym.trainers.models.scorer import LocalScorer
from turngym.trainers.models.vocab_check import common_vocabulary
from turngym.trainers.models.weight_source import ModelWeights


def load_student(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """A model to train and its tokenizer."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = load_model(folder, dtype=dtype, device=target)
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TurngymError(f"no tokenizer in {folder}: {str(error).strip().splitlines()[0]}") from error


def load_teacher(
    options: Options, student: Any, tokenizer: Any, algorithm: Algorithm
) -> tuple[LocalScorer | SglangScorer | None, int | None]:
    """The teacher as a scorer, here or on servers, and the number of ids that it shares with the student."""
    if not algorithm.needs_teacher:
        return None, None
    if options.servers.teacher_server:
        size, heat = vocabulary_size(student), algorithm.distill_temperature
        return teacher_scorer(options.servers, options.teacher, tokenizer, size, heat)
    if options.teacher is None:
        return None, None
    model, other = load_student(options.teacher, options.teacher_dtype, options.device)
    size = common_vocabulary(tokenizer, other, vocabulary_size(student), vocabulary_size(model))
    return _scorer(options, model, algorithm, size), size


def has_teacher(options: Options) -> bool:
    """Whether another model than the student teaches."""
    return options.teacher is not None or bool(options.servers.teacher_server)


def server_engine(options: Options, model: Any, tokenizer: Any, settings: ChatSettings) -> SyncedPolicy | None:
    """The servers that play with the student's weights; None where it plays in this process."""
    if not options.servers.policy_server:
        return None
    weights = ModelWeights(model)
    return train_policy(options.servers, model, tokenizer, settings.max_context, options.out, weights=weights)


def load_reference(options: Options, algorithm: Algorithm, vocab_size: int | None) -> LocalScorer | None:
    """The initial policy: --student names it, in a resumed run too."""
    if not algorithm.needs_reference:
        return None
    model, _ = load_student(options.student, options.teacher_dtype, options.device)
    return _scorer(options, model, algorithm, vocab_size)


def _scorer(options: Options, model: Any, algorithm: Algorithm, vocab_size: int | None) -> LocalScorer:
    return LocalScorer(
        model=model,
        vocab_size=vocab_size,
        temperature=algorithm.distill_temperature,
        max_tokens=options.run.micro_tokens,
        share_prefixes=algorithm.shared_prefixes and supports_prefix_sharing(model),
    )
