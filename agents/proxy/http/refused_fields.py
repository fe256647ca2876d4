"""Fields that ask for another distribution or form than the policy's own: refused, unless they change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngym.agents.proxy.errors import invalid
from turngym.agents.proxy.http.read_messages import shown

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
"""Fields of the sampling, and the values that change nothing."""


def check_sampling(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for what would be drawn or written otherwise than the policy does."""
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        # True equals 1
        if value is not None and (isinstance(value, bool) or value not in neutral):
            raise invalid(
                f"{name} is {shown(value)}; this server draws from the policy's whole distribution, which it learns "
                f"by: leave {name} out, or send {shown(neutral[0])}",
                name,
                "unsupported_value",
            )
    form = fields.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise invalid(
            f'response_format is {shown(form)}; this server has no grammars: leave it out, or send {{"type": "text"}}',
            "response_format",
            "unsupported_value",
        )
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice is {shown(choice)}; the policy decides itself whether it calls: send auto or none",
            "tool_choice",
            "unsupported_value",
        )
