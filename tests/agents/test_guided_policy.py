"""Turns of a teacher among those of a student: who answers which request, and with what mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the local engine needs turngym[train]")

from turngym.agents.local_engine.sampling import uniforms
from turngym.agents.mixed_policy import GuidedPolicy
from turngym.envs.core.errors import AgentError
from turngym.envs.core.protocols import GenerateRequest, Generation, PartialFailure, Sampling


class Voice:
    """Answers with its own id, as often as it is allowed to."""

    def __init__(self, word: int, max_length: int = 50, fails: str = "") -> None:
        self.word, self.max_length, self.fails = word, max_length, fails
        self.asked: list[GenerateRequest] = []
        self.released: list[str] = []
        self.version = 0

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.asked += requests
        found: list[Any] = [
            RuntimeError("lost") if one.session == self.fails else self._one(one.sampling.max_new_tokens)
            for one in requests
        ]
        if any(isinstance(one, RuntimeError) for one in found):
            raise PartialFailure(found)
        return found

    def _one(self, room: int) -> Generation:
        ids, logprobs = np.full(room, self.word, np.int32), np.full(room, -0.5, np.float32)
        return Generation(ids=ids, logprobs=logprobs, finish="length", policy_version=self.version)

    def release(self, session: str) -> None:
        self.released.append(session)

    def weights_changed(self, version: int) -> None:
        self.version = version


def request(number: int, session: str = "s") -> GenerateRequest:
    prompt = np.array([9], np.int32)
    return GenerateRequest(session=session, prompt_ids=prompt, sampling=Sampling(max_new_tokens=3), stream=(5, number))


def test_a_coin_of_the_requests_own_stream_decides_about_all_of_an_answer() -> None:
    student, teacher = Voice(0), Voice(1)
    requests = [request(number) for number in range(40)]
    found = GuidedPolicy(student, teacher, 0.3).generate(requests)
    theirs = [uniforms((5, number, 1), 1)[0] < 0.3 for number in range(40)]
    assert 4 < sum(theirs) < 22
    for one, taught in zip(found, theirs, strict=True):
        assert one.ids.tolist() == [int(taught)] * 3
        assert one.origin == ("demonstration" if taught else "policy")
        assert np.isnan(one.logprobs).tolist() == [taught] * 3
    # the student draws from the stream that it has without a teacher; the teacher from one of its own
    assert [one.stream for one in student.asked] == [(5, n) for n in range(40) if not theirs[n]]
    assert [one.stream for one in teacher.asked] == [(5, n, 2) for n in range(40) if theirs[n]]
    alone = [GuidedPolicy(Voice(0), Voice(1), 0.3).generate([one])[0].ids.tolist() for one in requests]
    assert alone == [one.ids.tolist() for one in found]


@pytest.mark.parametrize(("share", "who"), [(0.0, 0), (1.0, 1)])
def test_none_or_all(share: float, who: int) -> None:
    voices = Voice(0), Voice(1)
    found = GuidedPolicy(*voices, share).generate([request(number) for number in range(20)])
    assert {word for one in found for word in one.ids.tolist()} == {who}
    assert [len(voice.asked) for voice in voices] == [20 * (1 - who), 20 * who]


def test_the_share_is_met() -> None:
    found = GuidedPolicy(Voice(0), Voice(1), 0.3).generate([request(number) for number in range(4000)])
    # four standard deviations of a coin of 0.3, thrown 4000 times
    assert np.mean([one.ids[0] for one in found]) == pytest.approx(0.3, abs=0.029)


def test_what_fails_fails_for_itself_and_both_forget() -> None:
    student, teacher = Voice(0, max_length=30), Voice(1, max_length=20, fails="7")
    policy = GuidedPolicy(student, teacher, 0.5)
    number = next(n for n in range(20) if uniforms((5, n, 1), 1)[0] < 0.5)
    with pytest.raises(PartialFailure) as caught:
        policy.generate([request(n, "7" if n == number else "x") for n in range(20)])
    lost = [place for place, one in enumerate(caught.value.results) if isinstance(one, BaseException)]
    assert lost == [number]
    policy.weights_changed(4)
    policy.release("s")
    assert (student.version, teacher.version, policy.max_length) == (4, 0, 20)
    assert student.released == teacher.released == ["s"]
    with pytest.raises(AgentError, match=r"share of the turns is 1\.5"):
        GuidedPolicy(student, teacher, 1.5)
