"""Refuse to distill between models that do not share a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngym.envs.core import TurngymError

SHOWN = 5


class VocabularyError(TurngymError):
    """Teacher and student give different meanings to the same id."""


def common_vocabulary(student: Any, teacher: Any, student_size: int, teacher_size: int) -> int:
    """Number of ids that both models can score, after checking that every id means the same token to both.

    `student` and `teacher` are tokenizers (`get_vocab()`, `special_tokens_map`), the sizes are the rows of each model's
    LM head. Padded sizes may differ: both sides are then cut to the smaller one (padding a side with zeros would
    give the invented ids probability). Raises VocabularyError naming the first ids or special tokens that differ.
    """
    mine, theirs = _by_id(student), _by_id(teacher)
    wrong = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    if wrong:
        rows = "; ".join(f"id {i}: student {mine.get(i)!r}, teacher {theirs.get(i)!r}" for i in wrong[:SHOWN])
        raise VocabularyError(
            f"teacher and student have different vocabularies ({len(wrong)} ids differ): {rows}. "
            "Distillation needs one tokenizer for both"
        )
    _same_special_tokens(student, teacher)
    size = min(student_size, teacher_size)
    if mine and max(mine) >= size:
        raise VocabularyError(
            f"the tokenizer uses ids up to {max(mine)}, but the smaller LM head has {size} rows "
            f"(student {student_size}, teacher {teacher_size})"
        )
    return size


def _by_id(tokenizer: Any) -> Mapping[int, str]:
    return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}


def _same_special_tokens(student: Any, teacher: Any) -> None:
    """Special tokens decide where turns end, so the same string must play the same role on both sides."""
    mine, theirs = _special(student), _special(teacher)
    for role in sorted(mine.keys() | theirs.keys()):
        if mine.get(role) != theirs.get(role):
            raise VocabularyError(
                f"special token {role} differs: student {mine.get(role)!r}, teacher {theirs.get(role)!r}. "
                "Make both tokenizers the same"
            )


def _special(tokenizer: Any) -> dict[str, str]:
    found = getattr(tokenizer, "special_tokens_map", {}) or {}
    return {role: str(token) for role, token in found.items()}
