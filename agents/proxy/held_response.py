"""A response that was broken off: the ids drawn so far, and by which weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from turngym.agents.sglang.client.stop_strings import StopFinder
from turngym.envs.protocols import GenerateRequest, Generation

Span = tuple[int, int, int]


@dataclass(slots=True)
class HeldResponse:
    """Parts of one response, each drawn by other weights, and what they are together."""

    parts: list[Generation] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Ids drawn so far."""
        return sum(len(part.ids) for part in self.parts)

    def add(self, part: Generation) -> None:
        self.parts.append(part)

    def drawn(self) -> list[tuple[int, float]]:
        """All ids so far, with their log-probabilities."""
        return [pair for part in self.parts for pair in zip(part.ids.tolist(), part.logprobs.tolist(), strict=True)]

    def rest_of(self, request: GenerateRequest) -> GenerateRequest:
        """What is left to ask for: what was drawn becomes prompt. The rest has a random stream of its own."""
        if not self.length:
            return request
        ids = np.concatenate([request.prompt_ids, *(part.ids for part in self.parts)]).astype(np.int32)
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - self.length)
        return replace(request, prompt_ids=ids, sampling=sampling, stream=(*request.stream, self.length))

    def ended_by(self, last: Generation, request: GenerateRequest, stops: StopFinder | None) -> Generation:
        """The whole response; `last` is its end. A stop text across a seam ends it there, as it would have without."""
        if not self.length:
            return last
        before = self.length
        whole = _joined([*self.parts, last], last.finish)
        if stops is None or not request.sampling.stop_text:
            return whole
        length = stops.first_hit(whole.ids.tolist(), before, request.sampling.stop_text)
        return whole if length is None else _first(whole, length)

    def aborted(self) -> Generation:
        """What there is, for a client that is gone."""
        return _joined(self.parts, "aborted")


def _joined(parts: list[Generation], finish: str) -> Generation:
    spans: list[Span] = []
    place = 0
    for part in parts:
        own = part.version_spans or ((part.policy_version, 0, len(part.ids)),)
        for version, start, end in own:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], place + end)
            elif end > start:
                spans.append((version, place + start, place + end))
        place += len(part.ids)
    return Generation(
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish=finish,
        policy_version=min((version for version, _, _ in spans), default=parts[-1].policy_version),
        version_spans=tuple(spans) if len(spans) > 1 else (),
    )


def _first(whole: Generation, length: int) -> Generation:
    """The first `length` ids of a response, ended by a stop text."""
    spans = tuple((version, start, min(end, length)) for version, start, end in whole.version_spans if start < length)
    return replace(
        whole,
        ids=whole.ids[:length],
        logprobs=whole.logprobs[:length],
        finish="stop",
        version_spans=spans if len(spans) > 1 else (),
    )
