"""Judged episodes by hand, and a judge that says what it is told to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turngym.agents.judges.judge_settings import AnyJudge, JudgeSettings
from turngym.core.episode import Episode
from turngym.core.protocols import JudgeRequest, Judgment
from turngym.core.spec import Spec, read


class _Alone(Spec):
    judge: AnyJudge


def judge_of(text: str, **settings: Any) -> AnyJudge:
    """The judge that a text names, with settings of its kind. Raises SettingsError for one that its kind lacks."""
    return read(_Alone, {"judge": {**JudgeSettings.table_of(text), **settings}}, f"judge {text}").judge


@dataclass(slots=True)
class Says:
    """Answers every request with `votes(request)`; keeps what it was asked."""

    votes: Callable[[JudgeRequest], tuple[str | None, ...]]
    asked: list[JudgeRequest] = field(default_factory=list)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        self.asked.extend(requests)
        answers = [self.votes(request) for request in requests]
        return [Judgment(votes=votes, error="it is asleep" if None in votes else "") for votes in answers]


def boxed(*scores: int) -> tuple[str, ...]:
    return tuple(f"\\boxed{{{score}}}" for score in scores)


def with_texts(episode: Episode, observations: Sequence[str], final: str = "", **turns: Sequence[Any]) -> Episode:
    """`episode` with these observations; further keywords give a field of every turn."""
    changed = [
        replace(turn, observation=text, response=f"say {turn.index}", **{k: v[turn.index] for k, v in turns.items()})
        for turn, text in zip(episode.turns, observations, strict=True)
    ]
    return replace(episode, turns=tuple(changed), final_observation=final)


def whispered(episodes: Sequence[Episode]) -> list[Episode]:
    """Prompts with the last two ids of the observation said once more, as if somebody had pointed at them."""
    hinted = []
    for episode in episodes:
        turns = [
            turn if turn.hint is None else replace(turn, hint_prompt_ids=np.repeat(episode.prompt_ids(turn), 2)[-9:])
            for turn in episode.turns
        ]
        hinted.append(replace(episode, turns=tuple(turns)))
    return hinted
