"""A teacher takes part: whole answers, or single ids, and from what distribution these are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import tiny

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.sampling import uniforms
from turngym.agents.mixed_policy import GuidedPolicy, MixedPolicy
from turngym.core.errors import AgentError
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure, Sampling


class Urn:
    """Draws every id from fixed probabilities; id `stop` ends a request that names it."""

    def __init__(self, *probabilities: float, max_length: int = 100) -> None:
        self.p, self.max_length = np.array(probabilities), max_length
        self.asked: list[GenerateRequest] = []
        self.released: list[str] = []
        self.policy_version = 0
        self.fails = ""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.asked += requests
        found: list[Any] = [self._one(request) for request in requests]
        found = [
            RuntimeError("lost") if request.session == self.fails else one
            for request, one in zip(requests, found, strict=True)
        ]
        if any(isinstance(one, RuntimeError) for one in found):
            raise PartialFailure(found)
        return found

    def _one(self, request: GenerateRequest) -> Generation:
        sampling = request.sampling
        room = min(sampling.max_new_tokens, self.max_length - len(request.prompt_ids))
        ids = np.searchsorted(self.p.cumsum(), uniforms(request.stream, room), side="right")
        ends = np.flatnonzero(np.isin(ids, sampling.stop_ids))
        ids = ids[: ends[0] + 1] if len(ends) else ids
        logprobs = np.log(self.p[ids]).astype(np.float32)
        finish = "stop" if len(ends) else "length"
        return Generation(
            ids=ids.astype(np.int32), logprobs=logprobs, finish=finish, policy_version=self.policy_version
        )

    def release(self, session: str) -> None:
        self.released.append(session)

    def weights_changed(self, version: int) -> None:
        self.policy_version = version


def request(number: int, room: int = 1, session: str = "s", **more: Any) -> GenerateRequest:
    sampling = Sampling(temperature=1.0, max_new_tokens=room, **more)
    return GenerateRequest(session=session, prompt_ids=np.array([9], np.int32), sampling=sampling, stream=(5, number))


STUDENT, TEACHER = (0.7, 0.2, 0.1, 0.0), (0.1, 0.1, 0.4, 0.4)


def test_ids_are_drawn_from_the_mixture() -> None:
    mixed = MixedPolicy(Urn(*STUDENT), Urn(*TEACHER), 0.2)
    found = mixed.generate([request(number, room=8) for number in range(2500)])
    counts = np.bincount(np.concatenate([one.ids for one in found]), minlength=4)
    # 0.8 student + 0.2 teacher = 0.58, 0.18, 0.16, 0.08 of 20,000; four standard deviations are at most 1.4 points
    np.testing.assert_allclose(counts / counts.sum(), [0.58, 0.18, 0.16, 0.08], atol=0.014)
    own = np.concatenate([one.ids[np.isfinite(one.logprobs)] for one in found])
    assert len(own) / counts.sum() == pytest.approx(0.8, abs=0.012)
    np.testing.assert_allclose(np.bincount(own, minlength=4) / len(own), STUDENT, atol=0.016)


def test_weights_of_the_mixture_have_mean_one() -> None:
    from turngym.trainers.algorithms.kd_reward import mixture_weight

    mixed = MixedPolicy(Urn(*STUDENT), Urn(*TEACHER), 0.2)
    ids = np.concatenate([one.ids for one in mixed.generate([request(n, room=8) for n in range(2500)])])
    with np.errstate(divide="ignore"):
        p, q = np.log(STUDENT)[ids], np.log(TEACHER)[ids]
    weights = mixture_weight(np.maximum(p, -60.0), q, 0.2)
    assert weights.mean() == pytest.approx(1.0, abs=0.01)
    # an id's weighted share is the student's own
    shares = np.bincount(ids, weights=weights, minlength=4) / len(ids)
    np.testing.assert_allclose(shares, STUDENT, atol=0.015)


def test_runs_go_to_the_one_whose_turn_it_is() -> None:
    student, teacher = Urn(1.0), Urn(0.0, 1.0)
    mixed = MixedPolicy(student, teacher, 0.4)
    (found,) = mixed.generate([request(3, room=12)])
    theirs = uniforms((5, 3, 0), 12) < 0.4
    assert 0 < theirs.sum() < 12
    assert found.ids.tolist() == theirs.astype(int).tolist()
    assert np.isnan(found.logprobs).tolist() == theirs.tolist()
    assert found.finish == "length"
    for one in (*student.asked, *teacher.asked):
        place = one.stream[2] - 1
        assert one.stream[:2] == (5, 3)
        assert one.prompt_ids.tolist() == [9, *theirs[:place].astype(int).tolist()]
    asked = sorted((*student.asked, *teacher.asked), key=lambda one: one.stream[2])
    assert sum(one.sampling.max_new_tokens for one in asked) == 12
    assert len(asked) == 1 + int((theirs[1:] != theirs[:-1]).sum())


@pytest.mark.parametrize(("share", "who"), [(0.0, 0), (1.0, 1)])
def test_a_share_of_none_or_all_is_one_request(share: float, who: int) -> None:
    urns = Urn(1.0), Urn(0.0, 1.0)
    (found,) = MixedPolicy(*urns, share).generate([request(1, room=6)])
    assert set(found.ids.tolist()) == {who}
    assert [len(urn.asked) for urn in urns] == [1 - who, who]


def test_the_same_whatever_comes_along() -> None:
    def mixed() -> MixedPolicy:
        return MixedPolicy(Urn(*STUDENT), Urn(*TEACHER), 0.3)

    requests = [request(number, room=9, stop_ids=(2,)) for number in range(20)]
    alone = [mixed().generate([one])[0] for one in requests]
    for together, one in zip(mixed().generate(requests), alone, strict=True):
        assert together.ids.tolist() == one.ids.tolist()
        assert together.finish == one.finish
        assert (one.finish == "stop") == (one.ids[-1] == 2)
        assert 2 not in one.ids[:-1]


def test_a_full_context_ends_an_answer() -> None:
    mixed = MixedPolicy(Urn(1.0, max_length=50), Urn(1.0, max_length=6), 0.5)
    assert mixed.max_length == 6
    long, full = mixed.generate([request(1, room=20), GenerateRequest(**_full())])
    assert (len(long.ids), long.finish) == (5, "length")
    assert (len(full.ids), full.finish) == (0, "length")


def _full() -> dict[str, Any]:
    return {"session": "f", "prompt_ids": np.zeros(6, np.int32), "sampling": Sampling(), "stream": (1,)}


def test_what_fails_fails_for_itself() -> None:
    student, teacher = Urn(1.0), Urn(1.0)
    teacher.fails = "b"
    with pytest.raises(PartialFailure) as caught:
        MixedPolicy(student, teacher, 0.5).generate([request(n, room=9, session="abc"[n]) for n in range(3)])
    first, second, third = caught.value.results
    assert isinstance(second, RuntimeError)
    assert [len(one.ids) for one in (first, third) if isinstance(one, Generation)] == [9, 9]


def test_new_weights_are_the_students_and_sessions_are_forgotten_by_both() -> None:
    student, teacher = Urn(1.0), Urn(1.0)
    mixed = MixedPolicy(student, teacher, 0.5)
    mixed.weights_changed(4)
    assert (student.policy_version, teacher.policy_version) == (4, 0)
    assert mixed.generate([request(1, room=9)])[0].policy_version == 4
    mixed.release("s")
    assert student.released == teacher.released == ["s"]
    with pytest.raises(AgentError, match=r"share of the ids is 1\.5"):
        MixedPolicy(student, teacher, 1.5)
    with pytest.raises(AgentError, match="needs decoding"):
        mixed.generate([request(1, stop_text=("x",))])


class Letters:
    """Id 0 is `a`, id 1 is `b`."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> str:
        return "".join("ab"[token] for token in token_ids)


def test_a_stop_text_that_both_wrote() -> None:
    theirs = uniforms((5, 3, 0), 12) < 0.4  # the teacher writes b, the student a
    first = next(n for n in range(11) if not theirs[n] and theirs[n + 1])
    mixed = MixedPolicy(Urn(1.0), Urn(0.0, 1.0), 0.4, tokenizer=Letters())
    (found,) = mixed.generate([request(3, room=12, stop_text=("ab",))])
    assert (len(found.ids), found.finish) == (first + 2, "stop")


def test_two_local_engines() -> None:
    def model(seed: int) -> Any:
        return tiny("Qwen3", seed, head_dim=8, initializer_range=0.25)

    requests = [request(number, room=10, session=f"s{number}") for number in range(3)]
    student, teacher = LocalEngine(model(1)), LocalEngine(model(2))
    found = MixedPolicy(student, teacher, 0.3).generate(requests)
    (again,) = MixedPolicy(LocalEngine(model(1)), LocalEngine(model(2)), 0.3).generate(requests[1:2])
    assert found[1].ids.tolist() == again.ids.tolist()
    # what lies in the cache is not computed again: an id is fed when it was not drawn by the same model just before
    assert student.fed_tokens + teacher.fed_tokens <= 3 * 2 * 11
    for one in found:
        ids = torch.from_numpy(np.append(9, one.ids).astype(np.int64))
        logp = model(1)(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach().numpy()
        own = np.isfinite(one.logprobs)
        assert 0 < own.sum() < 10
        np.testing.assert_allclose(one.logprobs[own], logp[own], atol=1e-5)


def voices() -> tuple[Urn, Urn]:
    """A student that says 0 and a teacher that says 1."""
    return Urn(1.0), Urn(0.0, 1.0)


def guided(number: int, session: str = "s") -> GenerateRequest:
    return request(number, 3, session)


def test_a_coin_of_the_requests_own_stream_decides_about_all_of_an_answer() -> None:
    student, teacher = voices()
    requests = [guided(number) for number in range(40)]
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
    alone = [GuidedPolicy(*voices(), 0.3).generate([one])[0].ids.tolist() for one in requests]
    assert alone == [one.ids.tolist() for one in found]


@pytest.mark.parametrize(("share", "who"), [(0.0, 0), (1.0, 1)])
def test_none_or_all(share: float, who: int) -> None:
    both = voices()
    found = GuidedPolicy(*both, share).generate([guided(number) for number in range(20)])
    assert {word for one in found for word in one.ids.tolist()} == {who}
    assert [len(voice.asked) for voice in both] == [20 * (1 - who), 20 * who]


def test_the_share_is_met() -> None:
    found = GuidedPolicy(*voices(), 0.3).generate([guided(number) for number in range(4000)])
    # four standard deviations of a coin of 0.3, thrown 4000 times
    assert np.mean([one.ids[0] for one in found]) == pytest.approx(0.3, abs=0.029)


def test_an_answer_that_fails_fails_for_itself() -> None:
    student, teacher = voices()
    teacher.fails = "7"
    policy = GuidedPolicy(student, teacher, 0.5)
    number = next(n for n in range(20) if uniforms((5, n, 1), 1)[0] < 0.5)
    with pytest.raises(PartialFailure) as caught:
        policy.generate([guided(n, "7" if n == number else "x") for n in range(20)])
    lost = [place for place, one in enumerate(caught.value.results) if isinstance(one, BaseException)]
    assert lost == [number]
    with pytest.raises(AgentError, match=r"share of the turns is 1\.5"):
        GuidedPolicy(student, teacher, 1.5)
