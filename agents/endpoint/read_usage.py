"""The usage of one answer, whatever a server calls its numbers: `read_usage`."""

from __future__ import annotations

from typing import Any

from turngym.agents.endpoint.completion_fields import NAME_SHOWN, Counts, Details, Noticed, Reading
from turngym.agents.endpoint.usage import Usage
from turngym.core.redaction import excerpt
from turngym.envs.spaces import printable

MOST_TOKENS = 1 << 32
"""Most tokens that a server may report for one answer; larger reports are ignored."""
MOST_NAMES = 40
"""Most names of fields that are kept."""


def read_usage(reported: Any, reading: Reading | None = None) -> tuple[Usage, tuple[str, ...]]:
    """(the usage of one answer, names of its fields); it is `unreported` if a number is missing.

    OpenAI counts cached tokens in the prompt and reasoning in the completion. Others count them beside those (xAI, and
    gateways to Gemini and Claude), which their total shows. They are added here.
    """
    reading = reading or Reading()
    counts = reading.take(Counts, reported, "usage.")
    given = [_count(counts.prompt_tokens, counts.input_tokens), _count(counts.completion_tokens, counts.output_tokens)]
    total = _count(counts.total_tokens)
    of_prompt, of_completion = (
        [reading.take(Details, getattr(counts, name), f"usage.{name}.") for name in names]
        for names in (
            ("prompt_tokens_details", "input_tokens_details"),
            ("completion_tokens_details", "output_tokens_details"),
        )
    )
    cached = most(
        *(table.cached_tokens for table in of_prompt),
        *(counts.cached_tokens, counts.prompt_cache_hit_tokens, counts.cache_read_input_tokens),
    )
    # SGLang reports it beside the other counts
    reasoning = most(*(table.reasoning_tokens for table in of_completion), counts.reasoning_tokens)
    names = [printable(excerpt(name, NAME_SHOWN)) for name, value in (reported or {}).items() if value is not None]
    named = tuple(sorted(names)[:MOST_NAMES])
    prompt, completion = (number or 0 for number in given)
    created = most(counts.cache_creation_input_tokens)
    if total is not None and total < prompt + completion:
        reading.note(Noticed.USAGE_SUM)
    # the total tells the number that is missing
    if total and given[0] is None and completion:
        prompt = max(total - completion, 0)
    part = given[1] is None and not total
    # a part that is larger than its whole was counted beside it
    prompt += cached if cached > prompt else 0
    completion += reasoning if reasoning > completion else 0
    if not prompt or part:
        if named:
            reading.note(Noticed.USAGE_PART)
        return Usage(answers=1, unreported=1, prompt_tokens=prompt, completion_tokens=completion), named
    beside = (total or 0) - prompt - completion
    # Claude: what was written into the cache is counted beside the prompt, too
    if created and beside in (created, created + cached):
        prompt, beside = prompt + created, beside - created
    if beside in (cached, cached + reasoning) and beside != reasoning:
        prompt, beside = prompt + cached, beside - cached
    # the rest is reasoning, whether it is reported or not
    completion += max(beside, 0)
    return (
        Usage(
            answers=1,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
        ),
        named,
    )


def _count(*given: Any) -> int | None:
    """The first of `given` that is a number of tokens; None if none is."""
    return next((value for value in given if type(value) is int and 0 <= value <= MOST_TOKENS), None)


def most(*given: Any) -> int:
    """The largest number of tokens in `given`; 0 if there is none: the names of one number differ, not its value."""
    return max((number for value in given if (number := _count(value)) is not None), default=0)
