"""What to say where a model fails silently: its answers are cut, or none of them can be read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from turngym.agents.evaluation.scores import Scores
from turngym.envs.core.episode import Episode
from turngym.envs.core.task import Verdict
from turngym.envs.spaces import printable

MOST_MALFORMED = 0.9
"""From this share of malformed answers on, a model does not write actions in the form that is asked for."""
_TAG = r"<((?!think\b|information\b)\w+)>"
EXAMPLES = (re.compile(rf"{_TAG}(?! and </)[^<>]*</\1>"), re.compile(rf"{_TAG} and </\1>"))
"""How a system message shows an action: whole, or by its tags. Thoughts and search results stand in tags, too."""


def hints(
    scores: Scores, episodes: Iterable[Episode], channel: str | None, made: Mapping[str, Any] | None = None
) -> list[str]:
    """Paragraphs about the answers of these episodes; [] where there is nothing to say.

    What `made`, the environment's arguments, has already is not recommended.
    """
    said = []
    if scores.cut_rate:
        said.append(
            f"{100 * scores.cut_rate:.0f} % of the answers were cut at the limit on new tokens, so that their ends are "
            "lost: raise --max-new-tokens, or let the model answer in fewer words (--thinking off, another --system)."
        )
    malformed = scores.verdicts[Verdict.MALFORMED.value]
    if malformed >= MOST_MALFORMED:
        found = ((episode, turn) for episode in episodes for turn in episode.turns)
        episode, turn = next(pair for pair in found if pair[1].verdict is Verdict.MALFORMED)
        called = channel is not None and channel.startswith("tool")
        whole, tags = (form.search(episode.system or "") for form in EXAMPLES)
        example = whole[0] if whole else f"<{tags[1]}>...</{tags[1]}>" if tags else ""
        expected = "a call of the environment's tool" if called else "an action in tags"
        expected += f", as in {example}" if example and not called else ""
        answer = textwrap.shorten(printable(turn.response), 200, placeholder=" ...") or "(nothing)"
        made = made or {}
        lists = turn.admissible is not None and not made.get("show_admissible")
        helps = [
            *(["--show-admissible on, or a preset that has it (--preset list)"] if lists else []),
            f"--channel {'text' if called else 'tool'}",
            *([] if made.get("reading") == "lenient" else ["--reading lenient"]),
            "--examples FILE",
            *([] if made.get("on_invalid") == "reject" else ['--env-kwargs \'{"on_invalid": "reject"}\'']),
        ]
        said.append(
            f"{100 * malformed:.0f} % of the answers could not be read as an action. Expected is {expected}. Instead, "
            f"turn {turn.index} of {episode.task.task_id} said: {answer!r}. What may help: {'; '.join(helps)}. "
            "`turngym trace print --prompt` shows what the model read."
        )
    return said
