"""A sync is done when a canary says so: the log-probabilities of a few fixed ids, by own weights and by each server.

No server is believed. A CPU build of vLLM that is told to reload a folder says success and then computes with neither
the old weights nor the new ones; and the wrong teacher is the commonest mistake of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.server_connection import DrawRequest, Score, ServerError
from turngym.core.protocols import Sampling, Scorer

SHORT, LONG, DRAWN = 8, 160, 8
"""Numbers of ids: a short row, one longer than a block of the servers' prefix caches, and what is drawn after it."""
TEMPERATURE = 0.7
"""Temperature of what is drawn."""
MARGIN = 5.0
"""How many times the rounding that is measured here a server's numbers may differ from ours."""
ROUNDING = {"float32": 1e-4, "float16": 4e-3}
"""The least that counts as rounding, by the server's precision: its kernels sum in another order than ours."""
HALF = 2e-2
"""The least that counts as rounding in bfloat16, and where the server's precision is not known."""
Logprobs = list[NDArray[np.float32]]
"""Log-probabilities of rows of ids, float32 [R] each."""


class CanaryError(ServerError):
    """A server does not compute what it should."""


@dataclass(slots=True, kw_only=True)
class Canary:
    """Compares what servers compute with the weights that they should have.

    The ids are of both ends of the vocabulary: common ones, and those added last. The tolerance is measured: `MARGIN`
    times the mean difference that the server's precision and other kernels make to our own numbers of the same ids.
    """

    fleet: Fleet
    vocabulary: int
    scorer: Callable[[float], Scorer]
    """Scores with the weights that are meant, as they are now, at a temperature."""
    rounding: Callable[[str], AbstractContextManager[object]]
    """While it is open, scores are rounded as a server in that precision rounds them."""
    meant: str = ""
    """Which weights are meant, for errors; by default the policy's version."""
    tolerance: float = field(default=0.0, init=False)
    """Mean difference that counted as rounding in the last check."""
    difference: float = field(default=0.0, init=False)
    """Largest mean difference of a server in the last check."""
    _mine: Logprobs = field(default_factory=list, init=False)
    _rounded: Logprobs = field(default_factory=list, init=False)
    _theirs: dict[str, Logprobs] = field(default_factory=dict, init=False)

    def check(self) -> None:
        """Asks every server. Raises CanaryError, which names the server, the version, and both numbers."""
        mine = self.scorer(1.0).logprobs(self._rows, self._places)
        with self.rounding(self._dtype):
            rounded = self.scorer(1.0).logprobs(self._rows, self._places)
        moved = bool(self._rounded) and _changed(rounded, self._rounded) > 0.5
        self._mine, self._rounded, before = mine, rounded, dict(self._theirs)
        floor = ROUNDING.get(self._dtype, HALF)
        self.tolerance, self.difference = MARGIN * max(floor, _difference(mine, rounded)), 0.0
        for server in self.fleet.servers:
            self.check_scores(server.url)
            theirs = self._theirs[server.url]
            if moved and server.url in before and not _changed(theirs, before[server.url]):
                raise CanaryError(f"{server.url} computes with the weights before {self._meant}: not a bit has changed")
            self._check_drawn(server.url)

    def check_scores(self, url: str) -> None:
        """Asks the server at `url` about the fixed ids, and compares with our numbers of the last `check`."""
        dialect, theirs = self.fleet.dialect, list[NDArray[np.float32]]()
        for row, places in zip(self._rows, self._places, strict=True):
            ask = Score(where=url, ids=row, start=0, vocabulary=self.vocabulary, positions=places)
            answer = self._ask(url, ask)
            scores, weights = dialect.read_scores(answer, ask)
            self.fleet.versions.read(((weights, 0, 0),), self.fleet.versions.place, ask.where)
            theirs.append(scores[1:])
        self._theirs[url] = theirs
        self._compare(url, theirs, self._mine, "given", self.tolerance)

    def _check_drawn(self, url: str) -> None:
        """What it draws after the long row, whose keys and values it may have kept from other weights."""
        sampling, prompt = Sampling(temperature=TEMPERATURE, max_new_tokens=DRAWN), self._rows[-1]
        ask = DrawRequest(
            where=url,
            prompt=prompt,
            sampling=sampling,
            stream=(0,),
            count=DRAWN,
            vocabulary=self.vocabulary,
            shared=self.vocabulary,
        )
        part = self.fleet.dialect.read_generation(self._ask(url, ask), ask)
        self.fleet.versions.read(part.spans, self.fleet.versions.place, ask.where)
        row, places = np.append(prompt, part.ids), np.arange(len(prompt), len(prompt) + len(part.ids))
        mine = self.scorer(TEMPERATURE).logprobs([row], [places])
        # one of few ids may be rounded by more than the mean of many
        self._compare(url, [part.logprobs], mine, f"drawn (temperature {TEMPERATURE})", 4 * self.tolerance)

    def _compare(self, url: str, theirs: Logprobs, mine: Logprobs, role: str, limit: float) -> None:
        gap = _difference(theirs, mine)
        self.difference = max(self.difference, gap)
        if not gap <= limit:
            raise CanaryError(
                f"{url} gives {sum(map(len, mine))} {role} ids log-probabilities that differ by {gap:.3g} on average "
                f"from those of {self._meant}; rounding makes at most {limit:.3g}. It has other weights (old ones, "
                "another adapter, another model), or computes in another way (quantized, scaled)"
            )

    def _ask(self, url: str, ask: DrawRequest | Score) -> object:
        dialect, name = self.fleet.dialect, "turngym-canary"
        make = dialect.generate_body if isinstance(ask, DrawRequest) else dialect.score_body
        body = make(ask, name, self.fleet.model)  # type: ignore[arg-type]
        return self.fleet.call_one(url, ("POST", dialect.generate_path, body), limit=dialect.answer_limit(ask))

    @property
    def _meant(self) -> str:
        return self.meant or f"version {self.fleet.versions.version} of the policy"

    @property
    def _dtype(self) -> str:
        return self.fleet.servers[0].dtype

    @property
    def _rows(self) -> list[NDArray[np.int32]]:
        long = min(LONG, self.fleet.max_prompt - DRAWN - 1)
        rng, size = np.random.default_rng(0), self.vocabulary
        ids = rng.integers(0, size, max(long, 2)).astype(np.int32)
        # every fourth id is one of the last hundred
        ids[::4] = rng.integers(max(size - 100, 0), size, len(ids[::4]))
        return [ids[: min(SHORT, len(ids))], ids]

    @property
    def _places(self) -> list[NDArray[np.int64]]:
        return [np.arange(1, len(row)) for row in self._rows]


def _difference(left: Logprobs, right: Logprobs) -> float:
    """Mean absolute difference; NaN where one of the numbers is NaN."""
    gaps = np.concatenate(left).astype(np.float64) - np.concatenate(right).astype(np.float64)
    return float(np.abs(gaps).mean()) if len(gaps) else math.inf


def _changed(left: Logprobs, right: Logprobs) -> float:
    """Share of numbers that are not the same to the bit."""
    return float((np.concatenate(left) != np.concatenate(right)).mean())
