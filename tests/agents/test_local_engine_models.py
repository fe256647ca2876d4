"""Models that cannot keep a ragged cache: found out, named, still right by recomputing; stop rules; bad input."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_requests import request as asked_of

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.model import EngineError

VOCAB = 40


def request(prompt: Any, session: str = "a", **sampling: Any) -> Any:
    return asked_of(session, prompt, (3, 1), **{"max_new_tokens": 6} | sampling)


def build(kind: str) -> Any:
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    }
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    made = {
        "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**common, state_size=4)),
        "bloom": lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
        ),
        # its own cache gives other logits than a whole row
        "minimax": lambda: transformers.MiniMaxForCausalLM(
            transformers.MiniMaxConfig(
                **common,
                **attention,
                head_dim=8,
                num_local_experts=2,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
        # a window of its own, longer than the rows of the trial
        "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=16,
                max_position_embeddings=64,
                initializer_range=0.3,
            )
        ),
        "dynamic rope": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, **attention, rope_parameters=rope)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, **attention, head_dim=8)),
    }
    return made[kind]().eval()


@pytest.mark.parametrize("kind", ["mamba", "bloom", "gpt_neo", "minimax", "dynamic rope"])
def test_unsupported_models_are_recomputed(kind: str) -> None:
    model = build(kind)
    with pytest.raises(EngineError, match=r'model type .* Use cache="recompute"'):
        LocalEngine(model, max_length=60, cache="ragged")
    with pytest.warns(UserWarning, match="recompute"):
        engine = LocalEngine(model, max_length=60)
    assert not engine.ragged
    prompt = list(range(5))
    for _ in range(2):
        asked = [request(prompt), request([7, 7, 7], "b")]
        drawn = engine.generate(asked)
        for one, generation in zip(asked, drawn, strict=True):
            ids = one.prompt_ids.tolist()
            for token, logprob in zip(generation.ids.tolist(), generation.logprobs, strict=True):
                with torch.no_grad():
                    logp = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
                assert token == int(logp.argmax())
                assert abs(float(logp[token]) - logprob) < 1e-4
                ids.append(token)
        prompt += [*drawn[0].ids.tolist(), 1, 2]
    assert engine.fed_tokens == 5 + 3 + 13 + 3
    assert engine.sessions == ()
    model(torch.arange(70 if kind == "dynamic rope" else 9)[None] % VOCAB).logits.sum().backward()


def test_recompute_is_the_same_engine() -> None:
    model = build("qwen3")
    asked = [request(range(n), f"s{n}", temperature=0.9, stop_ids=(2, 3)) for n in (1, 9, 20)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow, fast = LocalEngine(model, cache="recompute"), LocalEngine(model)
    assert fast.ragged
    for one, other in zip(slow.generate(asked), fast.generate(asked), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.finish == other.finish


def test_context_must_be_known() -> None:
    model = build("mamba")
    with pytest.raises(EngineError, match="--max-context"):
        LocalEngine(model)


class Words:
    """Decodes id n to `wordN `, and the last id to `</action>`."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join("</action>" if token == VOCAB - 1 else f"word{token} " for token in ids)


def test_stop_rules_end_to_end() -> None:
    model = build("qwen3")
    engine = LocalEngine(model, tokenizer=Words())
    free = engine.generate([request([1, 2], temperature=1.0, max_new_tokens=60)])[0]
    assert (len(free.ids), free.finish) == (60, "length")
    end = int(free.ids[7])
    first = free.ids.tolist().index(end)
    stopped = engine.generate([request([1, 2], temperature=1.0, max_new_tokens=60, stop_ids=(99, end))])[0]
    assert stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert stopped.finish == "stop"
    word = f"word{end}"
    by_text = engine.generate([request([1, 2], temperature=1.0, max_new_tokens=60, stop_text=("</x>", word))])[0]
    texts = [word in Words().decode(free.ids[: n + 1]) for n in range(60)]
    assert by_text.ids.tolist() == free.ids[: texts.index(True) + 1].tolist()
    assert by_text.finish == "stop"
    last = engine.generate([request([1, 2], temperature=1.0, max_new_tokens=first + 1, stop_ids=(end,))])[0]
    assert last.finish == "stop"  # a stop id at the very limit is still a stop


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": []}, "at least one id"),
        ({"prompt": [1, 40]}, "knows ids 0..39"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"stop_text": ("</a>",)}, "tokenizer"),
    ],
)
def test_bad_requests_are_named(changes: dict[str, Any], text: str) -> None:
    engine = LocalEngine(build("qwen3"))
    good = request([1, 2], "good")
    with pytest.raises(EngineError, match=r"request 1 \(session 'bad'\)") as error:
        engine.generate([good, request(session="bad", **({"prompt": [1]} | changes))])
    assert text in str(error.value)
    assert engine.generate([]) == []


def test_bad_settings_are_named() -> None:
    for settings, text in [
        ({"max_length": 300}, "1..64"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"max_batch": 4, "max_sessions": 3}, "max_sessions 3"),
        ({"cache": "paged"}, "'recompute'"),
    ]:
        with pytest.raises(EngineError, match=text):
            LocalEngine(build("qwen3"), **settings)


def test_diverged_weights_are_an_error_and_leave_nothing_behind() -> None:
    model = build("qwen3")
    engine = LocalEngine(model)
    asked = [request(range(9)), request(range(30), "b")]
    good = engine.generate(asked)
    weight = model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([request([*range(40), 1, 2, 3], temperature=1.0)])
    with torch.no_grad():
        weight.copy_(kept)
    assert [one.ids.tolist() for one in engine.generate(asked)] == [one.ids.tolist() for one in good]
