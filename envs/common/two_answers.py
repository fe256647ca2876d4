"""A vote that answers two questions: was the turn good, and what should the policy have been told?"""

from __future__ import annotations

import json


def joined(score: str | None, hint: str | None) -> str | None:
    """One vote of the two answers as they were written; None where neither came."""
    return None if score is None and hint is None else json.dumps({"score": score, "hint": hint})


def separate(vote: str) -> tuple[str | None, str | None]:
    """(the answer about the score, that about the hint) of a `joined` vote; (None, None) for any other text."""
    try:
        answers = json.loads(vote)
    except ValueError:
        return None, None
    if not isinstance(answers, dict):
        return None, None
    score, hint = answers.get("score"), answers.get("hint")
    return score if isinstance(score, str) else None, hint if isinstance(hint, str) else None
