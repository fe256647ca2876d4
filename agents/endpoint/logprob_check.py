"""Whether the log-probabilities that an endpoint gives are those of the distribution that it drew from.

A trainer divides the student's probability of a sampled id by the one that it was drawn with. Two things falsify the
latter without a word. Servers take top_k, top_p and penalties that a request leaves open from the model's
generation_config.json; so every request for ids names the values that change nothing (`NEUTRAL`). And many servers give
log-probabilities before the temperature (vLLM by default); so at a temperature other than 1 two short
requests of one prompt are compared (`SampledCheck`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turngym.agents.endpoint.answer_reader import ChatAnswer
from turngym.agents.endpoint.client import EndpointClient, EndpointError
from turngym.core.errors import AgentError
from turngym.core.redaction import brief

NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields that change what is drawn, with the values at which they do not."""
DISTORTING = (
    *("logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "typical_p", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Further fields that change what is drawn; a request for ids has none of them."""
ALTERNATIVES = 5
"""How many of the likeliest tokens are compared; some servers give no more."""
LEAST_SPREAD = 0.1
"""Nats by which they must differ, as the root of their squared distances: equal numbers say nothing."""


def sampled_fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with which a request asks for ids and for the log-probabilities that they were drawn with.

    Raises AgentError where `extra`, the fields of --extra-body, would change what is drawn.
    """
    for name, value in extra.items():
        # top_k has two neutral values
        allowed = (NEUTRAL[name], *([0] if name == "top_k" else ())) if name in NEUTRAL else None
        if value is not None and (name in DISTORTING or (allowed is not None and value not in allowed)):
            valid = "leave it out" if allowed is None else f"leave it out, or set {NEUTRAL[name]:g}"
            raise AgentError(
                f"--extra-body sets {name} to {brief(value, 40)} with --token-ids: ids would be drawn from another "
                f"distribution than the model's own, which a trainer learns by; {valid}"
            )
    return {"return_token_ids": True, "logprobs": True, **NEUTRAL}


@dataclass(slots=True)
class SampledCheck:
    """Finds out, at the first answer, whether an endpoint's log-probabilities are those at `temperature`.

    At temperature 1 and 0 (greedy, whose ids are scored at 1) there is nothing to find out. Elsewhere a server may say
    it itself (`temperature` beside the log-probabilities, as `turngym serve proxy` does). Else the first token's
    alternatives are asked for at `temperature` and at 1: their distances are 1 / temperature times as large at the
    former, or the same where the temperature is not in them.
    """

    name: str
    """The agent's, for what is said."""
    temperature: float
    holds: bool | None = None
    """True: they are. False: nobody knows, so they are not recorded. None: nothing was found out yet."""
    _failure: AgentError | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(
        self, client: EndpointClient, body: Mapping[str, Any], answer: ChatAnswer, rng: np.random.Generator, where: str
    ) -> None:
        """Looks at the first `answer`, to `body`. Raises AgentError where its log-probabilities are at another
        temperature."""
        async with self._lock:
            if self.holds is None and self._failure is None and answer.ids is not None:
                try:
                    self.holds = await self._find(client, body, answer.ids.temperature, rng, where)
                except AgentError as error:
                    # those who wait for the lock need not ask again
                    self._failure = error
            if self._failure is not None:
                raise self._failure

    async def _find(
        self,
        client: EndpointClient,
        body: Mapping[str, Any],
        stated: float | None,
        rng: np.random.Generator,
        where: str,
    ) -> bool:
        wanted = self.temperature or 1.0
        if stated is not None and (stated or 1.0) != wanted:
            raise AgentError(
                f"{self.name}: the server drew at temperature {stated:g} and not at {self.temperature:g}: take "
                f"--temperature {stated:g}, or leave out --token-ids"
            )
        if stated is not None or wanted == 1.0:
            return True
        request = {**body, "top_logprobs": ALTERNATIVES, "max_tokens": 1}
        try:
            hot, plain = [
                await client.ask({**request, "temperature": value}, rng, f"{where}, check of log-probabilities")
                for value in (wanted, 1.0)
            ]
        except EndpointError as error:
            return self._unknown(str(error))
        factor = slope(*({} if answer.ids is None else answer.ids.alternatives for answer in (plain, hot)))
        if factor is None:
            return self._unknown(f"it names no {ALTERNATIVES} alternatives (top_logprobs) that differ")
        if abs(factor - 1.0 / wanted) < 0.5 * abs(1.0 - 1.0 / wanted):
            print(f"{self.name}: log-probabilities are those at temperature {wanted:g} (checked)", file=sys.stderr)
            return True
        raise AgentError(
            f"{self.name}: log-probabilities are not those at temperature {wanted:g}, at which ids are drawn (two "
            f"requests differ by a factor of {factor:.2f} and not {1.0 / wanted:.2f}; vLLM's default is before "
            "temperature): start the server with --logprobs-mode processed_logprobs, take --temperature 1, or leave "
            "out --token-ids"
        )

    def _unknown(self, why: str) -> bool:
        print(
            f"{self.name}: whether log-probabilities are those at temperature {self.temperature:g} cannot be checked, "
            f"so they are not recorded (ids are): {why}",
            file=sys.stderr,
        )
        return False


def slope(plain: Mapping[str, float], hot: Mapping[str, float]) -> float | None:
    """How many times as far apart log-probabilities are in `hot` as in `plain`, by least squares; None if unknown."""
    shared = sorted(plain.keys() & hot.keys())
    # servers write -9999 for a probability of 0
    pairs = np.array([(plain[name], hot[name]) for name in shared if min(plain[name], hot[name]) > -1000.0])
    if len(pairs) < 2:
        return None
    plain_gaps, hot_gaps = (pairs - pairs.mean(axis=0)).T
    size = float(plain_gaps @ plain_gaps)
    return float(plain_gaps @ hot_gaps) / size if size > LEAST_SPREAD**2 else None
