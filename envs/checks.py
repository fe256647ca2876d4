"""Small checks that the environment contract and other tests of environments share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from turngym.envs.core import Verdict

INFO_TYPES: Mapping[str, tuple[type, ...]] = {
    "task_id": (str,),
    "task_sha": (str,),
    "category": (str,),
    "turn": (int,),
    "env_steps": (int,),
    "verdict": (str,),
    "action": (str, type(None)),
    "admissible_actions": (list, type(None)),
    "success": (bool,),
    "score": (float,),
}
"""The keys of `info` and their exact types, at reset and at every step."""

NONSENSE = ("", " ", "\n", "\x00", "no such action", "LOOK!", "<action>", "</action>", "{", '{"name": 1}', "[" * 5000)
HARD_TEXT = ("Ünïcödé 漢字 🚪", "\ud800", "a\u2028b", "e\u0301", "{0} %s \\n", "x" * 200_000, "\r\n\t")


def expect(error: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """Assert that `call(*args)` raises `error` and return its text."""
    try:
        result = call(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"expected {error.__name__}, got the result {result!r:.200}")


def check_info(info: dict[str, Any]) -> None:
    """Assert that `info` has the keys and exact types of the interface and can be written as JSON."""
    for key, types in INFO_TYPES.items():
        assert key in info, f"info lacks {key!r}"
        assert type(info[key]) in types, f"info[{key!r}] is {type(info[key]).__name__}, not one of {types}"
    assert all(type(action) is str for action in info["admissible_actions"] or ()), "admissible actions must be str"
    assert 0.0 <= info["score"] <= 1.0, f"score {info['score']} is outside 0..1"
    Verdict(info["verdict"])
    json.dumps(info)
