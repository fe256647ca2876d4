"""Another value than a setting's default, for tests that change one setting at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from turngym.core.settings import Setting

OTHER: Mapping[str, Any] = {
    "reference_rate": 0.5,
    "temperature": 0.3,
    "noise": 0.3,
    "extra_body": '{"a": 1}',
    "env_kwargs": '{"split": "train"}',
    "channel": "tool",
    "sampling": "published",
    "staleness": 1,
    "betas": [0.8, 0.9],
    "host": "127.0.0.2",
    "panel": "y",
    "parameters": {"nprobe": 3.0},
    "clip": [0.1, 0.1],
    "importance": [0.5, 2.0],
    "dual_clip": 4.0,
    "judge": "http://127.0.0.1:1/v1",
    "workers": 2,
    "adaptive_depth": False,
    "prompt": "Say {question}",
    "vocabulary": "other",
}
"""Settings whose other value cannot be made from their type."""


def other_value(setting: Setting) -> Any:
    """Another value than the default."""
    if setting.name in OTHER:
        return OTHER[setting.name]
    kind, kinds, default = setting.type, get_args(setting.type), setting.default
    if get_origin(kind) is Literal:
        return next(value for value in kinds if value != default)
    if kind is bool:
        return not default
    if get_origin(kind) is tuple:
        value: Any = {int: 7, float: 0.7}.get(kinds[0], "x")
        return [value] if ... in kinds else [value] * len(kinds)
    if int in (kind, *kinds):
        return 1 if default is None else default + 1
    if float in (kind, *kinds):
        return default / 2 if default else 0.5
    return "x"
