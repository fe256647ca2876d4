"""The results file of an evaluation: one schema (docs/results.schema.json) for whoever played the episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.scores import EACH, Outcome, Outcomes, Scores
from turngym.envs.core.episode import Episode
from turngym.envs.core.settings import loaded_versions
from turngym.envs.core.tables import atomic_write

FORMAT, VERSION = "turngym-results", 2
"""Version 1 had neither of the two, nor versions, date, tokens and episodes; its settings stood at the top."""
IDENTITY = ("panel", "panel_sha256", "env_id", "tasks", "limit", "agent", "samples", "seed")
"""Of an evaluation's settings, those that every results file has at its top; the others are under `settings`."""
ABOUT = ("chat", "preset_values", "panel_max_turns")
"""Names in `Episode.meta` that the evaluation recorded, and in which calls that went into one trace may differ."""
PER_EPISODE = (*EACH, "panel", *ABOUT)
"""Names in `Episode.meta` that are no settings of the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode in a results file: enough to score again and to compare, without what was said."""

    task_id: str
    sha256: str
    category: str
    sample: int
    seed: int
    status: str
    success: bool
    score: float
    episode_return: float
    turns: int
    invalid: int
    """Turns whose action did not reach the environment."""
    prompt_tokens: int | None = None
    """Ids that were not sampled, each counted once; None for text-only agents."""
    response_tokens: int | None = None
    """Ids of the responses; None for text-only agents."""

    @property
    def is_error(self) -> bool:
        """It says nothing about the agent, and no number has it in it."""
        return self.status.startswith("error_")

    @classmethod
    def of(cls, episode: Episode | Outcome) -> EpisodeRow:
        if isinstance(episode, Episode):
            (episode,) = Outcomes.of((episode,))
        return cls(
            task_id=episode.task.task_id,
            sha256=episode.task.sha256,
            category=episode.task.category,
            sample=episode.sample,
            seed=episode.seed,
            status=episode.status.value,
            success=episode.success,
            score=episode.score,
            episode_return=episode.episode_return,
            turns=episode.depth,
            invalid=episode.invalid,
            prompt_tokens=episode.prompt_tokens,
            response_tokens=episode.response_tokens,
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> EpisodeRow:
        """Fields that a later version added are left out. Raises KeyError for one that is missing."""
        optional = ("prompt_tokens", "response_tokens")
        known: dict[str, Any] = {f.name: row.get(f.name) if f.name in optional else row[f.name] for f in fields(cls)}
        return cls(**known)


def token_counts(outcomes: Outcomes) -> dict[str, int] | None:
    """Ids of all episodes by who wrote them, `prompt` and `response`; None where no episode has ids."""
    response, prompt = outcomes.column("response"), outcomes.column("prompt")
    known = response >= 0
    if not known.any():
        return None
    return {"prompt": int(prompt[known].sum()), "response": int(response[known].sum())}


def results_json(settings: Mapping[str, Any], scores: Scores, seconds: float, outcomes: Outcomes) -> dict[str, Any]:
    """The content of a results file, but for the rows of its episodes. The date says when it was made; nothing reads
    it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: settings.get(name) for name in IDENTITY},
        "settings": {name: value for name, value in settings.items() if name not in IDENTITY},
        "versions": loaded_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "tokens": token_counts(outcomes),
        "scores": scores.to_json(),
    }


def episode_rows(outcomes: Outcomes) -> Iterator[dict[str, Any]]:
    """The rows of a results file's episodes."""
    return (asdict(EpisodeRow.of(outcome)) for outcome in outcomes)


def write_results(path: str | Path, head: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Write `results_json` with the rows of its episodes, one after the other, as `write_json` would all of it."""
    before, after = _indented({**head, "episodes": []}, 0).split('\n "episodes": []', 1)
    with atomic_write(path) as file:
        file.write(f'{before}\n "episodes": [')
        comma = ""
        for row in episode_rows(outcomes):
            file.write(f"{comma}\n{_indented(row, 2)}")
            comma = ","
        file.write(("\n ]" if comma else "]") + after + "\n")


def _indented(value: Any, by: int) -> str:
    text = json.dumps(value, indent=1, sort_keys=True)
    return text if not by else " " * by + text.replace("\n", "\n" + " " * by)
