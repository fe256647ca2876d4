"""The models of a run from their folders: the student, and scorers for teacher and initial policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turngym.envs.core import TurngymError
from turngym.trainers.config import Packing
from turngym.trainers.models.model import load_model, vocabulary_size
from turngym.trainers.models.packing import resolved
from turngym.trainers.models.prefix_sharing import supports_prefix_sharing
from turngym.trainers.models.scorer import LocalScorer
from turngym.trainers.models.vocab_check import common_vocabulary


def load_student(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """A model to train and its tokenizer. Raises TurngymError for a folder that lacks one of them."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = load_model(folder, dtype=dtype, device=device)
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # readers of damaged files raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TurngymError(f"no tokenizer in {folder}: {first}") from error


def load_scorer(
    folder: Path,
    *,
    dtype: str,
    device: str,
    temperature: float,
    max_tokens: int,
    vocab_size: int | None = None,
    student: tuple[Any, Any] | None = None,
    shared_prefixes: bool = False,
    packing: Packing = "off",
) -> LocalScorer:
    """A model that scores ids at `temperature`. Of a teacher, only the ids that `student` (a model with its tokenizer)
    knows too are scored; TurngymError where the two differ in them. A model that cannot have `packing` goes without."""
    model, tokenizer = load_student(folder, dtype, device)
    if student is not None:
        sizes = vocabulary_size(student[0]), vocabulary_size(model)
        vocab_size = common_vocabulary(student[1], tokenizer, *sizes)
    return LocalScorer(
        model=model,
        vocab_size=vocab_size,
        temperature=temperature,
        max_tokens=max_tokens,
        # a teacher is not what --packing on was said of: one that cannot have it scores padded rows
        packing=packing if packing != "off" and resolved("auto", model) == "auto" else "off",
        share_prefixes=shared_prefixes and supports_prefix_sharing(model),
    )
