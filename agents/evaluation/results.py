"""The results file of an evaluation, with one schema (docs/results.schema.json) whoever played the episodes."""

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
IDENTITY = ("panel", "panel_sha256", "env_id", "tasks", "limit", "agent", "samples", "seed")
"""Settings at the top level of every results file; the others are under `settings`."""
ABOUT = ("chat", "preset_values", "panel_max_turns")
"""Names in `Episode.meta` that are recorded, but may differ between calls that play into one trace."""
PER_EPISODE = (*EACH, "panel", *ABOUT)
"""Names in `Episode.meta` that are not settings of the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode in a results file: enough to score and compare it, without its text."""

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
    """Number of ids that were not sampled, each counted once; None for text-only agents."""
    response_tokens: int | None = None
    """Number of ids of the responses; None for text-only agents."""

    @property
    def is_error(self) -> bool:
        """Whether the episode failed for reasons outside the agent; such rows count in no score."""
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
        """Reads a row; unknown fields are ignored. Raises KeyError for a missing one."""
        optional = ("prompt_tokens", "response_tokens")
        known: dict[str, Any] = {f.name: row.get(f.name) if f.name in optional else row[f.name] for f in fields(cls)}
        return cls(**known)


def token_counts(outcomes: Outcomes) -> dict[str, int] | None:
    """Number of `prompt` and `response` ids of all episodes; None if no episode has ids."""
    response, prompt = outcomes.column("response"), outcomes.column("prompt")
    known = response >= 0
    if not known.any():
        return None
    return {"prompt": int(prompt[known].sum()), "response": int(response[known].sum())}


def results_json(settings: Mapping[str, Any], scores: Scores, seconds: float, outcomes: Outcomes) -> dict[str, Any]:
    """The content of a results file without the rows of its episodes."""
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
    """Write `head` and the rows of the episodes one by one; the file is the same as if it were written at once."""
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
