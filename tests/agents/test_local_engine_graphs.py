"""Decoding through captured steps gives the ids of the plain steps; recorded operations stand in for CUDA graphs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import VOCAB, play, request, tiny
from late import late
from recorded_graph import RecordedGraph, record
from torch.utils._python_dispatch import TorchDispatchMode

from turngym.agents.local_engine import decoder, graphs
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.graphs import Bucket, bucket_of
from turngym.agents.local_engine.model import EngineError

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
}


def build(kind: str = "qwen3", seed: int = 1) -> Any:
    family, changes = KINDS[kind]
    return tiny(family, seed, initializer_range=0.25, **changes)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraph]]:
    """Engines capture on the CPU, by a stand-in, in small buckets; the graphs that were made."""
    made: list[RecordedGraph] = []

    def keep(*args: Any) -> Any:
        graph, result = record(*args)
        made.append(graph)
        return graph, result

    monkeypatch.setattr(graphs, "capture", keep)
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "_KEYS", 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the local engine decodes without")
        yield made


def plainly(engine: LocalEngine) -> LocalEngine:
    engine.graphs.refused = "for comparison"
    return engine


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def near(ours: Any, theirs: Any) -> None:
    """The same ids up to the first at which the rounding of bfloat16 decides; log-probabilities within it."""
    for one, other in zip(ours, theirs, strict=True):
        differ = np.flatnonzero(one.ids != other.ids)
        until = int(differ[0]) + 1 if len(differ) else len(one.ids)
        np.testing.assert_allclose(one.logprobs[:until], other.logprobs[:until], atol=0.05)


def test_buckets() -> None:
    most = Bucket(100, 1500)
    rows = (1, 2, 3, 5, 8, 9, 16, 17, 24, 25, 33, 64, 65, 97)
    assert [bucket_of(n, 1, most).rows for n in rows] == [1, 2, 4, 8, 8, 16, 16, 24, 24, 32, 64, 64, 96, 100]
    assert [bucket_of(1, n, most).keys for n in (1, 512, 513, 1024, 1025, 1500)] == [512, 512, 1024, 1024, 1500, 1500]


@pytest.mark.parametrize(("kind", "temperature"), late([("qwen3", 0.0), *((kind, 0.9) for kind in KINDS)], "qwen3"))
def test_episodes_of_uneven_lengths(kind: str, temperature: float, recorded: list[RecordedGraph]) -> None:
    model = build(kind)
    how = {"turns": 6, "sessions": 7, "temperature": temperature}
    ours = play(LocalEngine(model, max_batch=5), **how)
    made, replayed = len(recorded), sum(graph.replays for graph in recorded)
    theirs = play(plainly(LocalEngine(model, max_batch=5)), **how)
    assert made == len(recorded) >= 6
    assert replayed > 3 * made
    same([generation for _, generation in ours], [generation for _, generation in theirs])


def test_rows_that_end_early_or_at_the_context_limit(recorded: list[RecordedGraph]) -> None:
    model, rng = build(), np.random.default_rng(0)
    asked = [
        request(str(row), rng.integers(0, VOCAB, 3 + 5 * row), (row,), max_new_tokens=6 * row + 1, temperature=row % 2)
        for row in range(7)
    ]
    asked.append(request("long", rng.integers(0, VOCAB, 30), (9,), max_new_tokens=90, temperature=1.0))
    ours = LocalEngine(model, max_length=57)
    told = ours.generate(asked)
    same(told, plainly(LocalEngine(model, max_length=57)).generate(asked))
    assert [len(one.ids) for one in told] == [min(6 * row + 1, 57 - 3 - 5 * row) for row in range(7)] + [27]
    # rows that have ended are moved out, since a graph computes them too; keys end with the context
    made = set(ours.graphs._graphs)
    assert {bucket.keys for bucket in made} >= {48, 57}
    assert {bucket.rows for bucket in made} >= {4, 8}


def test_a_watch_ends_its_row_at_once(recorded: list[RecordedGraph]) -> None:
    asked = [request(str(row), range(4 + row), max_new_tokens=20) for row in range(3)]
    heard: list[int] = []

    def watch(token: int, logprob: float) -> bool:
        heard.append(token)
        return len(heard) < 5

    told = LocalEngine(build()).stream(asked, [None, watch, None])
    assert [len(one.ids) for one in told] == [20, 5, 20]
    assert told[1].finish == "aborted"
    assert told[1].ids.tolist() == heard


def test_different_temperatures_in_one_batch_and_another_batch(recorded: list[RecordedGraph]) -> None:
    model = build()
    asked = [request(str(i), [1 + i, 2, 3], (i,), temperature=t) for i, t in enumerate((0.0, 1.0, 0.0, 0.3, 2.0))]
    alone = [LocalEngine(model).generate([one])[0] for one in asked]
    engine = LocalEngine(model)
    same(engine.generate(asked), alone)
    same(engine.generate(asked[::-1]), alone[::-1])
    same(engine.generate(asked[:3]), alone[:3])


def test_a_cache_that_grows_and_one_that_is_lost(recorded: list[RecordedGraph]) -> None:
    model = build()
    short, long = request("a", range(5), max_new_tokens=9), request("b", range(50), max_new_tokens=9)
    expected = plainly(LocalEngine(model)).generate([short, long])
    engine = LocalEngine(model)
    for asked in ([short], [long], [short], [short, long]):
        engine.release("a")
        same(engine.generate(asked), [expected[0 if one is short else 1] for one in asked])
    made = len(recorded)
    engine.generate([short, long])
    assert len(recorded) == made
    engine._cache.clear()
    engine._table.clear()
    same(engine.generate([short, long]), expected)
    assert len(recorded) > made


@pytest.mark.parametrize("most", [1, 2])
def test_a_bounded_number_of_graphs(most: int, recorded: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", most)
    model, engine = build(), LocalEngine(build())
    asked = [request(str(row), range(4 + 3 * row), max_new_tokens=30) for row in range(3)]
    same(engine.generate(asked), plainly(LocalEngine(model)).generate(asked))
    assert len(engine.graphs) == most < len(recorded)


def update(model: Any) -> None:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model(torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("part", "fuse", "dtype"),
    late(
        [
            *(("optimizer", True, None), ("optimizer", False, "bfloat16"), ("load", False, None)),
            *(("other memory", True, "bfloat16"), ("other memory", True, None), ("other memory", False, None)),
        ],
        ("optimizer", True, None),
        ("other memory", True, None),
    ),
)
def test_new_weights(
    part: str, fuse: bool, dtype: str | None, recorded: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "FUSE_BYTES", 1 << 28 if fuse else 0)
    model = build()
    engine = LocalEngine(model, dtype=dtype)
    asked = [request(str(row), range(7 + row), max_new_tokens=30) for row in range(3)]
    before = engine.generate(asked)
    engine.generate(asked)  # the cache has its size
    made = len(recorded)
    old = [(parameter.data, parameter.data.clone()) for parameter in model.parameters()]
    if part == "optimizer":
        update(model)
    elif part == "load":
        model.load_state_dict(build(seed=2).state_dict())
    else:
        for parameter, new in zip(model.parameters(), build(seed=2).parameters(), strict=True):
            parameter.data = new.data
    after = engine.generate(asked)
    (near if dtype else same)(after, plainly(LocalEngine(model, dtype=dtype)).generate(asked))
    assert [one.ids.tolist() for one in after] != [one.ids.tolist() for one in before]
    # what was written in place leaves the graphs as they are: all but weights in memory that somebody else gave
    assert (len(recorded) > made) == (part == "other memory" and dtype is None)
    if part == "other memory":
        assert all(torch.equal(now, then) for now, then in old)


def test_longer_tables_of_positions_are_noticed() -> None:
    engine = LocalEngine(tiny("Llama", max_position_embeddings=600))
    engine.generate([request("a", range(5))])
    with engine._model.evaluating():
        counts = []
        for length in (256, 257, 512, 513):
            engine._model.dense.reserve(length)
            counts.append(engine._model.dense.allocations)
    assert counts == [counts[0], counts[0] + 1, counts[0] + 1, counts[0] + 2]


def test_weights_of_others_are_not_written(recorded: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that was read in place gets an adapter and another weight: its former weight is not ours."""
    import peft

    monkeypatch.setattr(decoder, "FUSE_BYTES", 0)
    model = build()
    engine = LocalEngine(model)
    asked = [request("a", range(7), max_new_tokens=30)]
    engine.generate(asked)
    former = model.model.layers[0].self_attn.q_proj.weight
    kept = former.detach().clone()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    model.model.layers[0].self_attn.q_proj.base_layer.weight = torch.nn.Parameter(-kept)
    same(engine.generate(asked), plainly(LocalEngine(model)).generate(asked))
    assert torch.equal(former, kept)


def test_new_adapters(recorded: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    monkeypatch.setattr(decoder, "FUSE_BYTES", 0)
    model = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj", "down_proj"])).get_base_model()
    engine = LocalEngine(model)
    asked = [request(str(row), range(7 + row), max_new_tokens=30) for row in range(3)]
    engine.generate(asked)
    before = engine.generate(asked)
    made, base = len(recorded), model.model.layers[0].self_attn.q_proj.base_layer.weight
    kept = base.detach().clone()
    for _ in range(3):
        update(model)
    after = engine.generate(asked)
    same(after, plainly(LocalEngine(model)).generate(asked))
    assert [one.ids.tolist() for one in after] != [one.ids.tolist() for one in before]
    assert len(recorded) == made > 0
    assert torch.equal(base, kept)


def test_bfloat16_within_its_rounding(recorded: list[RecordedGraph]) -> None:
    model = build()
    asked = [request(str(row), range(3 + 4 * row), max_new_tokens=40) for row in range(6)]
    ours = LocalEngine(model, dtype="bfloat16").generate(asked)
    theirs = plainly(LocalEngine(model, dtype="bfloat16")).generate(asked)
    assert recorded
    near(ours, theirs)
    equal = sum(np.array_equal(one.ids, other.ids) for one, other in zip(ours, theirs, strict=True))
    assert equal >= 3


@pytest.mark.parametrize("how", ["logits", "one row", "draws", "error"])
def test_what_cannot_be_proved_is_not_used(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = build(), []

    class Wrong(RecordedGraph):
        def replay(self) -> None:
            super().replay()
            if how == "draws":
                engine.graphs._buffers.drawn[0, 0] += 1.0  # type: ignore[union-attr]

    def capture(step: Any, *_: Any) -> Any:
        tried.append(1)
        if how == "error":
            raise RuntimeError("operation not permitted when stream is capturing")
        with Wrong() as graph:
            logits = step()
            if how != "draws":
                logits[2 if how == "one row" else slice(None), ::2] += 0.1
        return graph, logits

    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "capture", capture)
    asked = [request(str(row), range(4 + 3 * row), (row,), max_new_tokens=20, temperature=1.0) for row in range(4)]
    expected = plainly(LocalEngine(model)).generate(asked)
    engine = LocalEngine(model)
    with pytest.warns(UserWarning, match="a step of 4 rows and 256 keys"):
        same(engine.generate(asked), expected)
    same(engine.generate(asked), expected)
    assert len(tried) == 1
    expects = {"error": "RuntimeError: operation not permitted", "draws": "it drew other ids"}
    assert expects.get(how, "it gave logits") in str(engine.graphs.refused)


def test_logits_that_are_not_finite_are_reported(recorded: list[RecordedGraph]) -> None:
    model = build()
    engine = LocalEngine(model)
    asked = request("a", range(5))
    expected = engine.generate([asked])
    with torch.no_grad():
        whole = model.model.norm.weight.clone()
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([asked])
    with torch.no_grad():
        model.model.norm.weight.copy_(whole)
    same(engine.generate([asked]), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_capture_asks_of_torch(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls fit torch's signatures, and the stream of the caller is the current one afterwards."""
    told: list[str] = []
    current = ["caller"]
    real = inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def stream(which: Any) -> Iterator[None]:
        before, current[0] = current[0], which.name
        try:
            yield
        finally:
            current[0] = before

    class Capture:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = real.bind(self, *args, **kwargs).arguments
            assert given["pool"] == "pool"
            self.stream = given["stream"]

        def __enter__(self) -> None:
            current[0] = self.stream.name

        def __exit__(self, *_: Any) -> None:
            if fails:  # as torch does, before it leaves its stream
                raise RuntimeError("operation not permitted when stream is capturing")
            current[0] = "caller"

    def named(name: str) -> Any:
        return SimpleNamespace(name=name, device=0, wait_stream=lambda other: told.append(f"{name} after {other.name}"))

    def step() -> Any:
        told.append(f"step on {current[0]}")
        return len(told)

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: named("caller"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    if fails:
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs.capture(step, named("side"), "pool")
    else:
        assert graphs.capture(step, named("side"), "pool") == ("graph", 4)
    assert told == ["side after caller", "step on side", "caller after side", "step on side"]
    assert current == ["caller"]


@pytest.mark.parametrize("what", ["hook", "sliding window", "another family"])
def test_other_steps_are_not_captured(what: str, recorded: list[RecordedGraph]) -> None:
    model = build()
    if what == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    elif what == "sliding window":
        model = tiny("Mistral", 1, head_dim=8, sliding_window=9)
    else:
        model = tiny("GPT2", 1, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    engine = LocalEngine(model, cache="ragged")
    engine.generate([request("a", range(5))])
    assert not recorded
    assert engine.graphs.refused is None


def test_a_cpu_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", None)
    engine = LocalEngine(build())
    engine.generate([request("a", range(5))])
    assert len(engine.graphs) == 0
    assert engine.graphs.refused is None
    assert engine._cache.capacity == 64


class Counting(TorchDispatchMode):
    """Counts the operations that compute something: a launch each, or more, on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += computes(func)
        return func(*args, **(kwargs or {}))


def computes(func: Any) -> bool:
    """Whether an operation is more than a view."""
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is None or alias.is_write


def test_one_launch_replaces_the_operations_of_a_step(recorded: list[RecordedGraph]) -> None:
    def started(engine: LocalEngine) -> int:
        """Operations of one token of all rows."""
        counts = []
        for tokens in (2, 2, 3):
            asked = [request(str(row), range(9), (row,), max_new_tokens=tokens, temperature=1.0) for row in range(3)]
            with Counting() as seen:
                engine.generate(asked)
            counts.append(seen.count)
        return counts[2] - counts[1]

    def build(layers: int) -> LocalEngine:
        return LocalEngine(tiny("Qwen2", num_hidden_layers=layers), dtype="bfloat16")

    few, many = started(plainly(build(2))), started(plainly(build(3)))
    assert not recorded
    beside = started(build(2))
    inside = sum(computes(func) for func, *_ in recorded[0].operations)
    # 16 in a layer; 21 around them, of which 10 draw
    assert many - few == 16
    assert few == 2 * 16 + 21
    # beside the replay: ids, positions and random numbers are copied into the buffers, and ids out of them
    assert beside <= 5
    assert few <= inside <= few + 5
