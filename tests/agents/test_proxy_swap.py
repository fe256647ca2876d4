"""New weights in the middle of answers: held, continued, every id with the version that drew it; nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import proxy_tools as tools
import pytest
import torch

from turngym.agents.proxy.api_errors import ProxyError
from turngym.agents.proxy.turn_records import TurnRecord, read_records
from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers.policy import PartialResponse
from turngym.core.protocols import GenerateRequest, Generation, Sampling
from turngym.trainers.live.serving import Serving

user, until = tools.user, tools.until


@pytest.fixture
def bench(make_bench: Callable[..., Any]) -> Any:
    return make_bench(policy=tools.StreamingEcho)


def ids_of(bench: Any, text: str) -> list[int]:
    found: list[int] = bench.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def swap(bench: Any, version: int, patience: float) -> threading.Thread:
    """New weights arrive, in a thread as the trainer's."""

    def publish() -> None:
        bench.service.engine.pause(patience)
        bench.policy.version = version
        bench.service.engine.resume()

    thread = threading.Thread(target=publish)
    thread.start()
    return thread


def test_an_answer_that_takes_long_is_continued_by_the_new_weights(bench: Any) -> None:
    bench.policy.answer = lambda request: "abcdef" if bench.policy.asked == 1 else "xyz"
    bench.policy.paced = True
    asked = bench.begin([user("hi")], "a")
    bench.policy.step(2)
    until(lambda: bench.policy.drawn == 2)
    trainer = swap(bench, 1, patience=0.0)
    until(lambda: asked.pending._interrupted)
    bench.policy.step(1)  # the id that hears that no more are wanted
    trainer.join(20)
    bench.policy.flow()
    finished = asked.wait(20)
    assert finished.reply.content == "abcxyz"
    assert bench.service.engine.broken_off == 1
    first, rest = bench.policy.requests
    assert rest.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *ids_of(bench, "abc")]
    assert rest.sampling.max_new_tokens == first.sampling.max_new_tokens - 3
    assert (rest.session, rest.stream) == (first.session, (*first.stream, 3))
    bench.service.end("a")
    (turn,) = bench.episodes[0].turns
    assert (turn.policy_version, turn.version_spans) == (0, ((0, 0, 3), (1, 3, 7)))
    assert turn.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8, -1 / 8, -2 / 8, -3 / 8, -4 / 8]
    (record,) = [one for one in read_records(bench.service.recorder.path.parent) if one["kind"] == "turn"]
    assert TurnRecord.from_json(record).version_spans == ((0, 0, 3), (1, 3, 7))


def test_within_the_patience_an_answer_ends_by_itself(bench: Any) -> None:
    bench.policy.paced = True
    asked = bench.begin([user("hi")], "a")
    until(bench.policy.entered.is_set)
    trainer = swap(bench, 1, patience=20.0)
    until(lambda: bench.service.engine.paused)
    bench.policy.flow()
    trainer.join(20)
    assert asked.wait(20).version == 0
    assert asked.wait(20) is not None
    assert bench.service.engine.broken_off == 0
    assert bench.ask([user("hi")], "b").version == 1


def test_a_stream_goes_on_where_it_was(bench: Any) -> None:
    bench.policy.answer = lambda request: "abcdef" if bench.policy.asked == 1 else "xyz"
    bench.policy.paced = True
    asked = bench.begin([user("hi")], "a", stream=True)
    bench.policy.step(2)
    seen: list[tuple[int, float]] = []
    until(lambda: bool(seen.extend(asked.new_tokens(0.01)) or len(seen) == 2))
    trainer = swap(bench, 1, patience=0.0)
    until(lambda: asked.pending._interrupted)
    bench.policy.step(1)
    trainer.join(20)
    bench.policy.flow()
    until(lambda: bool(seen.extend(asked.new_tokens(0.01)) or len(seen) == 7))
    assert [token for token, _ in seen[:6]] == ids_of(bench, "abcxyz")
    assert asked.wait(20).reply.content == "abcxyz"


def test_a_client_that_leaves_while_its_answer_is_held(bench: Any) -> None:
    bench.policy.paced = True
    asked = bench.begin([user("hi")], "a")
    bench.policy.step(1)
    until(lambda: bench.policy.drawn == 1)
    bench.service.engine._pauses += 1  # a second pause: the first one's end does not let it go on
    trainer = swap(bench, 1, patience=0.0)
    until(lambda: asked.pending._interrupted)
    bench.policy.step(1)
    trainer.join(20)
    asked.abandon()
    bench.service.engine.resume()
    until(lambda: bench.service.counts["underway"] == 0)
    assert (bench.policy.asked, bench.service.engine.aborted) == (1, 0)
    assert bench.service.health()["disconnected"] == 1


def test_many_swaps_lose_and_cross_nothing(bench: Any) -> None:
    """Eight clients talk while weights come all the time; every answer is of its own session, versions only rise."""
    bench.policy.answer = lambda request: request.session[:4] * 5
    over = threading.Event()

    def train() -> None:
        version = 0
        while not over.wait(0.002):
            version += 1
            swap(bench, version, patience=0.0).join(20)

    trainer = threading.Thread(target=train)
    trainer.start()
    clients = [threading.Thread(target=bench.talk, args=(f"s{n}", 6)) for n in range(8)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(60)
    over.set()
    trainer.join(20)
    for number in range(8):
        bench.service.end(f"s{number}")
    assert len(bench.episodes) == 8
    for episode in bench.episodes:
        assert episode.depth == 6
        versions = [
            span[0]
            for turn in episode.turns
            for span in (turn.version_spans or ((turn.policy_version, 0, turn.response_length),))
        ]
        assert versions == sorted(versions)
        own = episode.task.task_id[:4]
        assert all(set(turn.response) <= set(own) for turn in episode.turns)
        for turn in episode.turns:
            ends = [span[2] for span in turn.version_spans]
            assert not ends or ends[-1] == turn.response_length
            assert len(turn.logprobs) == turn.response_length


def part(text: str, version: int, finish: str = "aborted") -> Generation:
    ids = np.array([*map(ord, text)], np.int32)
    return Generation(ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=finish, policy_version=version)


class Letters:
    def decode(self, ids: Any, **more: Any) -> str:
        return "".join(map(chr, ids))


def asked(*stops: str) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=20, stop_text=stops)
    return GenerateRequest(session="s", prompt_ids=np.array([1, 2], np.int32), sampling=sampling, stream=(5, 6))


@pytest.mark.parametrize(
    ("parts", "last", "spans", "text"),
    [
        ([("ab", 1)], ("cd", 2), ((1, 0, 2), (2, 2, 4)), "abcd"),
        ([("ab", 1), ("", 2)], ("cd", 3), ((1, 0, 2), (3, 2, 4)), "abcd"),
        ([("ab", 1), ("c", 1)], ("d", 2), ((1, 0, 3), (2, 3, 4)), "abcd"),
        ([("ab", 1)], ("ST and more", 2), ((1, 0, 2), (2, 2, 4)), "abST"),
        ([("abS", 1)], ("Tand more", 2), ((1, 0, 3), (2, 3, 4)), "abST"),
    ],
)
def test_parts_together(parts: Any, last: Any, spans: Any, text: str) -> None:
    held = PartialResponse()
    for one in parts:
        held.parts.append(part(*one))
    whole = held.ended_by(part(*last, finish="length"), asked("ST"), StopText(Letters()))
    assert "".join(map(chr, whole.ids)) == text
    assert whole.version_spans == spans
    assert (whole.policy_version, len(whole.logprobs)) == (1, len(text))
    assert whole.finish == ("stop" if "ST" in text else "length")


class Teller:
    """An engine that notes what the copy held when it was told."""

    policy_version = 0

    def __init__(self, copied: Any, queue: Any) -> None:
        self.copied, self.queue = copied, queue
        self.told: list[Any] = []

    def weights_changed(self, version: int) -> None:
        self.told.append((version, self.queue.paused, self.copied.weight.tolist(), self.copied.bias.tolist()))


class Weights:
    def __init__(self, model: Any) -> None:
        self.model = model

    def named_weights(self) -> Any:
        return dict(self.model.named_parameters()).items()


def test_the_copy_gets_the_values_of_the_model_while_nothing_is_generated(bench: Any) -> None:
    model, copied = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
        model.bias.fill_(5.0)
    teller = Teller(copied, bench.service.engine)
    times = iter([10.0, 10.25, 20.0, 20.125])
    served = Serving(
        engine=teller, kind="copy", live=True, copy=copied, weights=Weights(model), clock=lambda: next(times)
    )
    served.publish(7, bench.service.engine)
    assert teller.told == [(7, True, [[3.0, 4.0]], [5.0])]
    assert not bench.service.engine.paused
    with torch.no_grad():
        model.bias.fill_(6.0)
    assert copied.bias.item() == 5.0  # an update under way is not seen
    served.publish(8, bench.service.engine)
    assert teller.told[1] == (8, True, [[3.0, 4.0]], [6.0])
    assert served.as_json() == {
        "from": "copy",
        "version": 0,
        "swaps": 2,
        "last_pause_s": 0.125,
        "longest_pause_s": 0.25,
    }


def test_a_copy_of_another_model_is_refused_and_serving_goes_on(bench: Any) -> None:
    model, copied = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, bias=False)
    served = Serving(engine=Teller(copied, None), kind="copy", live=True, copy=copied, weights=Weights(model))
    with pytest.raises(ProxyError, match="differ in parameters: bias"):
        served.publish(1, bench.service.engine)
    assert not bench.service.engine.paused
