"""What a server takes and what it answers, found out before the first episode: `shake_hands`.

A fixed conversation of two turns, in the channel that will be played:

    1  system    the rules of the channel                       (and the tool, a seed, stop strings, log-probabilities)
       user      "Test 1 of 2. Answer with exactly this: <action>look</action>"
       assistant what the server answers
    2  tool      the result of its call, where it called        (else role user)
       assistant nothing: a model may well be silent in a turn
       user      "Test 2 of 2. ..."
       assistant what the server answers

A request that the server refuses costs nothing. It is sent again with the first of `TRAITS` changed that the refusal
names, else with each that could be meant, else with all of them. A change that brings the same refusal is taken back.
What is left of two answered requests is the `EndpointProfile` that the client keeps to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turngym.agents.endpoint.answer_reader import ChatAnswer
from turngym.agents.endpoint.client import ContextOverflow, EndpointClient, EndpointError
from turngym.agents.endpoint.completion_fields import Noticed
from turngym.agents.endpoint.error_reader import RequestFailed, blames
from turngym.agents.endpoint.messages import Transcript, content_of
from turngym.agents.endpoint.profile import EndpointProfile
from turngym.agents.endpoint.usage import Usage
from turngym.core.redaction import redacted
from turngym.core.spec import changed
from turngym.core.tools import Tools
from turngym.envs.channels import Channel

ACTION = "look"
LEAST_TOKENS = 64
"""Fewest tokens to ask for when the context is nearly full."""
ASIDE = {"X-Turn-Type": "side"}
"""Header with which `turngym serve proxy` does not train on a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One way in which servers differ."""

    name: str
    """The field of `EndpointProfile`."""
    values: tuple[Any, ...]
    """What is tried in place of the default, in this order."""
    turn: int
    """The first of the two requests at which it matters."""
    words: re.Pattern[str] | None = None
    """Matches the words, in lower case, of a refusal that means it; None: one that names the field of this name."""
    guessed: bool = True
    """Whether it is tried if a refusal names nothing that is known."""
    but: re.Pattern[str] | None = None
    """Matches refusals that name it and that no change of it would meet."""

    def meant(self, failed: RequestFailed) -> bool:
        """Whether a refusal says that this is at fault."""
        if self.but is not None and self.but.search(failed.reason.lower()):
            return False
        if self.words is None:
            return blames(failed, self.name) or re.search(rf"\b{self.name}\b", failed.reason.lower()) is not None
        return self.words.search(f"{failed.reason} {failed.param}".lower()) is not None


SIZE = r"(between|\brange\b|too|exceed|greater|less|at (most|least)|(posi|nega)tive|m(ax|in)imum|limit|[<>]|in [\[(])"
TRAITS = (
    Trait(
        name="limit",
        values=("max_completion_tokens",),
        turn=1,
        words=re.compile(r"\bmax_(completion_)?tokens\b"),
        guessed=False,
        # a number that is too large is too large by any name
        but=re.compile(rf"max_tokens\b.{{0,80}}{SIZE}"),
    ),
    Trait(
        name="temperature",
        values=(False,),
        turn=1,
        # one that is out of range, or may not stand beside the user's top_p, is the user's to change: without it the
        # model would be drawn from at another
        but=re.compile(rf"temperature.{{0,80}}({SIZE}|\bboth\b)"),
    ),
    Trait(name="seed", values=(False,), turn=1),
    Trait(name="stop", values=(False,), turn=1),
    Trait(
        name="system",
        values=("user",),
        turn=1,
        words=re.compile(r"\broles?\b(?!:\w)|system.{0,20}(message|prompt|instruction)|developer instruction"),
    ),
    Trait(
        name="tool_name",
        values=(True,),
        turn=2,
        words=re.compile(
            r"function_?response|\bname\b.{0,40}(empty|required|missing)|(missing|required|need).{0,40}\bname\b"
        ),
    ),
    Trait(
        name="reasoning",
        values=(True, False),
        turn=2,
        words=re.compile(r"reasoning|thinking.?(block|content)|\bthoughts?\b"),
    ),
    Trait(
        name="own_fields",
        values=(False,),
        turn=2,
        words=re.compile(r"extra|not permitted|not allowed|unsupported|unknown|unrecognized|unexpected|propert"),
    ),
    Trait(
        name="call_ids",
        values=(False,),
        turn=2,
        words=re.compile(r"\b(call|use)[ _.]?ids?\b|tool_calls\S{0,20}\bid\b"),
    ),
    Trait(
        name="silence",
        values=("words",),
        turn=2,
        words=re.compile(r"empty|blank|whitespace|no content|not none|must (have|contain)"),
    ),
    Trait(
        name="blank",
        values=("empty", "null", "left out", "words"),
        turn=2,
        words=re.compile(
            r"content.{0,80}(null|none|string|requir|missing|must|invalid|type)|(null|none|invalid).{0,60}content"
        ),
    ),
)
SAID = {
    "limit": "calls the limit of tokens max_completion_tokens",
    "temperature": "takes no temperature, so the model samples at the server's own",
    "seed": "takes no seed",
    "stop": "is sent no stop strings, which it refuses, or which would end its thoughts",
    "system": "takes no message of role system, so the rules stand in front of the first message",
    "tool_name": "wants the tool's name in results",
    "blank": "does not take its own messages with calls back as they came",
    "silence": "refuses a turn without text, for which some words stand",
    "call_ids": "refuses its own ids of calls, which get others",
    "own_fields": "refuses fields that came with its own answers, which are left out of conversations",
    "reasoning": "decides itself whether earlier reasoning goes back",
}
"""What is said of a server that differs from most, by the field of its `EndpointProfile`."""
Change = Mapping[str, Any]
"""Fields of a `EndpointProfile` with other values."""
Form = tuple[Any, ...]
"""The values of all traits."""
MOST_FORMS = 40
"""Requests that may be refused before a server is given up."""


async def fit(
    client: EndpointClient,
    body: Mapping[str, Any],
    rng: np.random.Generator,
    where: str,
    *,
    turn: int = 1,
    guess: bool = False,
) -> ChatAnswer:
    """The answer to `body`, in the form that the server takes; the client keeps to that form.

    Raises EndpointError, that of the first refusal if no form is taken.

    Args:
        client: asks, and learns. Others may ask it at the same time.
        turn: which traits matter, those of a first or of a second turn.
        guess: whether every trait is tried if those that a refusal names are no help.
    """
    initial, seen, first = client.profile, set[Form](), None
    # forms whose refusals say something new, each with one change more than the one before
    path: list[tuple[EndpointProfile, RequestFailed]] = []
    combined: Change = {}
    while True:
        profile = client.profile
        seen.add(_form(profile))
        try:
            answer = await client.attempts(body, rng, where)
            return await _with_less(client, body, rng, where, answer, combined, initial) if combined else answer
        except RequestFailed as failed:
            # another form of a request is tried where the form is refused; templates that refuse one end in a 500, and
            # in mlx_lm.server, as all that is wrong, in a 404
            if not failed.rejected and failed.code not in (404, 500):
                raise await client.given_up(failed, where) from None
            if client.profile is not profile:
                # another request has learned something meanwhile
                continue
            first = first or failed
            if not path or _said(failed) != _said(path[-1][1]):
                path.append((profile, failed))
            change = None
            while path and change is None and len(seen) < MOST_FORMS:
                base, why = path[-1]
                candidates = _changes(client, base, why, turn, guess)
                change = next((fields for fields in candidates if _form(replace(base, **fields)) not in seen), None)
                if change is None:
                    path.pop()
            if change is None:
                client.profile = initial
                raise await client.given_up(first, where) from None
            client.profile, combined = replace(base, **change), change if len(change) > 1 else combined


async def _with_less(
    client: EndpointClient,
    body: Mapping[str, Any],
    rng: np.random.Generator,
    where: str,
    answer: ChatAnswer,
    combined: Change,
    initial: EndpointProfile,
) -> ChatAnswer:
    """The last answer, and the client keeps to a form without what `combined` changes for nothing.

    Each changed trait is tried once more with other values, that of the `initial` profile first.
    """
    for trait in TRAITS:
        for value in (getattr(initial, trait.name), *trait.values) if trait.name in combined else ():
            fitted = client.profile
            if value == getattr(fitted, trait.name):
                break
            client.profile = replace(fitted, **{trait.name: value})
            try:
                again = await client.attempts(body, rng, where)
            except RequestFailed:
                client.profile = fitted
                continue
            answer = replace(again, lost=again.lost + answer.lost + changed(answer.usage, answers=0, unreported=0))
            break
    return answer


def _form(profile: EndpointProfile) -> Form:
    return tuple(getattr(profile, trait.name) for trait in TRAITS)


def _said(failed: RequestFailed) -> str:
    """A refusal's text without the parts that change each time: gateways number requests and give the time."""
    return re.sub(r"(?=[\w-]*\d)[\w-]{6,}", "", failed.reason)


def _changes(
    client: EndpointClient, base: EndpointProfile, failed: RequestFailed, turn: int, guess: bool
) -> Iterator[Change]:
    """Yields the changes of `base` to try after a refusal, the likeliest first: of what it names, of anything, of all
    at once."""
    # those of the first request were taken in it
    relevant = sorted((trait for trait in TRAITS if trait.turn <= turn), key=lambda trait: -trait.turn)
    meant = [trait for trait in relevant if trait.meant(failed)]
    # a refusal with advice of its own is no matter of form
    may_guess = guess and failed.rejected and (meant or not client.advice(failed))
    guesses = [trait for trait in relevant if may_guess and trait.guessed and trait not in meant]
    for trait in (*meant, *guesses):
        for value in trait.values:
            yield {trait.name: value}
    if may_guess:
        # two things that are refused in the same words
        for index in (-1, 0):
            yield {trait.name: trait.values[index] for trait in relevant if trait.guessed}


async def shake_hands(
    client: EndpointClient,
    fields: Mapping[str, Any],
    channel: Channel,
    tool: Tools,
    rng: np.random.Generator,
    sampled: Callable[..., Awaitable[None]] | None,
) -> tuple[EndpointProfile, Usage, list[str]]:
    """Find out what the server of `client` takes and answers; the client keeps to it.

    Returns its profile, what the handshake used, and how the server differs from most, a clause each. `fields` are
    those of a request beside its messages, as an episode's have them, its `max_tokens` included; `sampled` looks at the
    first answer where ids are asked for.

    Raises EndpointError, in one line with what would help, for a server that cannot be played.
    """
    initial, used, answers, transcript = client.profile, Usage(), list[ChatAnswer](), Transcript()
    action = tool.sample(ACTION)
    ask = f"Answer with exactly this: <{tool.tags[0]}>{action}</{tool.tags[0]}>"
    if "tools" in fields:
        name, arguments = tool.call(action)
        arguments_text = " and ".join(f'"{key}" set to {json.dumps(value)}' for key, value in arguments.items())
        ask = f"Call the tool {name} with {arguments_text or 'no arguments'}."

    async def request(number: int) -> None:
        """Adds the answer to the transcript so far, asked for with fewer tokens if both do not fit the context."""
        nonlocal used
        tokens = fields["max_tokens"]
        while True:
            body = {**fields, "messages": transcript.messages, "max_tokens": tokens}
            try:
                answer = await fit(client, body, rng, f"handshake, request {number} of 2", turn=number, guess=True)
            except ContextOverflow:
                if tokens <= LEAST_TOKENS:
                    raise
                tokens = max(tokens // 4, LEAST_TOKENS)
                continue
            used += answer.usage + answer.lost
            answers.append(answer)
            return

    client.headers = ASIDE
    try:
        rules = f"This is a short test of the connection.\n{channel.instructions(tool)}"
        transcript.observe(rules, f"Test 1 of 2. {ask}")
        await request(1)
        ids = "not asked for"
        if sampled is not None:
            await sampled(client, {**fields, "messages": transcript.messages}, answers[0], rng, "handshake")
            has_logprobs = answers[0].ids is not None and answers[0].ids.logprobs is not None
            ids = "with log-probabilities" if has_logprobs else "without log-probabilities"
        transcript.answer(answers[0], content_of(answers[0], channel))
        transcript.observe("", "Test 1 is done.")
        transcript.answer(ChatAnswer(content=""), "")
        transcript.observe("", f"Test 2 of 2. {ask}")
        # a context of a few hundred tokens may be full: then what one answer tells is known
        with suppress(ContextOverflow):
            await request(2)
    finally:
        client.headers = {}
    profile = replace(client.profile, **_answered(answers, "tools" in fields), ids=ids)
    # many servers look for stop strings in thoughts, too, where a model quotes the form of an action
    profile = client.profile = replace(profile, stop=profile.stop and not (profile.thoughts and "stop" in fields))
    findings = [text for name, text in SAID.items() if getattr(profile, name) != getattr(initial, name)]
    if "tools" in fields and profile.calls == "none came":
        findings.append("passed no call on in the handshake, which asked for one")
    return profile, used, findings


def _answered(answers: list[ChatAnswer], offered: bool) -> dict[str, Any]:
    """The fields of a server's profile that its answers show; `offered` says whether a tool was offered."""
    noticed = tuple(dict.fromkeys(words for answer in answers for words in answer.noticed))
    calls = "not asked for"
    if offered:
        notices: dict[str, str] = {Noticed.OLD_CALL: "in function_call", Noticed.OTHER_CHOICE: "in another choice"}
        calls = next((notices[words] for words in noticed if words in notices), "")
        written = next((answer.written for answer in answers if answer.written is not None), None)
        if written is not None:
            calls = f"in the text ({written.dialect})"
        elif not calls:
            calls = "parsed" if any(answer.calls for answer in answers) else "none came"
    thoughts = [name for answer in answers for name, thought in answer.thoughts.items() if thought]
    return {
        "model": answers[0].model,
        "finish": tuple(dict.fromkeys(answer.ending for answer in answers if answer.ending)),
        "usage": tuple(sorted({name for answer in answers for name in answer.counted})),
        "thoughts": thoughts[0] if thoughts else "",
        "calls": calls,
        "noticed": noticed,
    }


def check_needs(
    profile: EndpointProfile, used: Usage, *, name: str, prices: bool, max_context: bool, token_ids: bool
) -> None:
    """Raises EndpointError, which names the agent, for what an option needs and the server does not give: counts for
    prices and for a limit of the context, log-probabilities for token ids."""
    reported = not used.unreported
    usage = "reports only a part of its usage" if profile.usage else "reports no usage"
    for wanted, offered, option, lacks, instead in (
        (prices, reported, "--price-in", usage, "leave the prices out"),
        (
            max_context,
            reported,
            "--max-context",
            f"{usage}, by which it is counted",
            "leave it out: the server says itself when its context is full",
        ),
        (
            token_ids,
            profile.ids != "without log-probabilities",
            "--token-ids",
            "gives ids without log-probabilities",
            "leave it out, or start the server with log-probabilities",
        ),
        (
            token_ids,
            profile.temperature,
            "--token-ids",
            "takes no temperature, so that nobody knows at which ids are drawn",
            "leave it out",
        ),
    ):
        if wanted and not offered:
            raise EndpointError(f"{redacted(name)}: {option} cannot hold, because the server {lacks}: {instead}")
