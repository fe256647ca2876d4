"""One self-contained HTML page from episodes: data as escaped JSON inside a template, no network, no build."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from turngym.envs.channels import split_thought
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Turn
from turngym.envs.spaces import printable

TEMPLATE = Path(__file__).with_name("page.html")

Decode = Callable[[int], str]
"""The text of one token id."""


def load_decoder(name: str) -> Decode:
    """A function from token id to text, from a tokenizer's folder or name. Raises TurngymError without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TurngymError("--tokenizer needs transformers: pip install 'turngym[train]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TurngymError(f"no tokenizer can be loaded from {name!r}: {error}") from error
    return lambda token: str(tokenizer.decode([token]))


def write_page(path: Path, episodes: Iterable[Episode], *, title: str, decode: Decode | None = None) -> tuple[int, int]:
    """Write the page, one episode after the other, replacing what is there; (episodes, bytes)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch, count = path.with_name(path.name + ".part"), 0

    def counted() -> Iterator[Episode]:
        nonlocal count
        for episode in episodes:
            count += 1
            yield episode

    with scratch.open("wb") as file:
        size = sum(file.write(text.encode("utf-8")) for text in pieces(counted(), title=title, decode=decode))
    scratch.replace(path)
    return count, size


def page(episodes: Iterable[Episode], *, title: str, decode: Decode | None = None) -> str:
    """The page as text. The data can contain anything: the script puts every string in as text, never as markup."""
    return "".join(pieces(episodes, title=title, decode=decode))


def pieces(episodes: Iterable[Episode], *, title: str, decode: Decode | None = None) -> Iterator[str]:
    """The page in parts, of which each holds at most one episode."""
    before, after = TEMPLATE.read_text(encoding="utf-8").split("__DATA__")
    yield f'{before}{{"title":{_json(printable(title))},"episodes":['
    for number, episode in enumerate(episodes):
        yield ("," if number else "") + _json(episode_view(episode, decode))
    yield f"]}}{after}"


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # inside <script> only "<" could end the block or open a comment; \u003c is the same JSON string
    return text.replace("<", "\\u003c")


def episode_view(episode: Episode, decode: Decode | None = None) -> dict[str, Any]:
    """What the page shows of an episode: plain finite JSON."""
    return {
        "task": episode.task.task_id,
        "category": episode.task.category,
        "split": episode.task.split,
        "env": episode.task.env_id,
        "sample": episode.sample,
        "seed": episode.seed,
        "status": episode.status.value,
        "success": bool(episode.success),
        "ret": _finite(episode.episode_return),
        "score": _finite(episode.score),
        "system": episode.system,
        "final": episode.final_observation,
        "meta": json.dumps(dict(episode.meta), ensure_ascii=False, indent=1, default=str) if episode.meta else "",
        "turns": [_turn_view(episode, turn, decode) for turn in episode.turns],
    }


def _turn_view(episode: Episode, turn: Turn, decode: Decode | None) -> dict[str, Any]:
    thought, rest, _ = split_thought(turn.response)
    return {
        "observation": turn.observation,
        "admissible": None if turn.admissible is None else list(turn.admissible),
        "thought": thought,
        "rest": rest.strip(),
        "action": turn.action,
        "verdict": turn.verdict.value,
        "reward": _finite(turn.reward),
        "finish": turn.finish,
        "origin": turn.origin,
        "tokens": _tokens(episode, turn, decode),
        "scores": None if turn.judge_scores is None else [_finite(score) for score in turn.judge_scores],
        "hint": turn.hint,
    }


def _tokens(episode: Episode, turn: Turn, decode: Decode | None) -> list[list[Any]] | None:
    if turn.logprobs is None or not turn.response_length:
        return None
    rows = zip(episode.response_ids(turn).tolist(), turn.logprobs.tolist(), strict=True)
    return [[token, _finite(round(logp, 3)), None if decode is None else decode(token)] for token, logp in rows]


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
