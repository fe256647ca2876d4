"""Checks that a server has the expected model, before anything is sent: an id too large would end the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.errors import ServerError

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""What must agree for weights to fit: a server that gets others does not refuse them, it ends."""
SAMPLE = 64
TEXTS = ("Nothing happens.", "  <think>\n1, 2 and 3</think>\t", "naïve café 漢字 \U0001f642", "go to cabinet 12")


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that are compared."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any: ...

    def encode(self, text: str, /, **kwargs: Any) -> Any: ...


def check_model(fleet: Fleet, config: Mapping[str, Any]) -> None:
    """Raises ServerError unless every server has a model of the architecture and shape of `config` (a config.json).

    The shape is compared where the server's model folder can be read from here; elsewhere only the architecture.
    """
    kind = (config.get("architectures") or ["?"])[0]
    for server in fleet.servers:
        if server.kind != kind:
            raise ServerError(f"{server.url} serves a {server.kind} ({server.model}); a {kind} is meant")
        theirs = model_config(server.model)
        wrong = [
            f"{name} is {theirs[name]} there and {config[name]} here"
            for name in SHAPE
            if name in theirs and name in config and theirs[name] != config[name]
        ]
        if wrong:
            raise ServerError(f"{server.url} serves another model ({server.model}): {'; '.join(wrong)}")


def check_tokenizer(fleet: Fleet, tokenizer: Tokenizer, size: int) -> None:
    """Raises ServerError unless every server gives the same ids to some texts, and the same texts to some ids.

    `size`: ids that the tokenizer uses; the first, the last and others in between are compared.
    """
    places = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)).tolist()
    mine = [str(tokenizer.decode([one], skip_special_tokens=False)) for one in places]
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    ask = {"tokens": [[one] for one in places], "skip_special_tokens": False}
    _compare(fleet, "/detokenize", ask, "text", mine, [f"id {one}" for one in places])
    ask = {"prompt": list(TEXTS), "add_special_tokens": False}
    _compare(fleet, "/tokenize", ask, "tokens", encoded, [repr(text) for text in TEXTS])


def check_names(fleet: Fleet) -> None:
    """Raises ServerError where a server's weights were sent by a training run: they are not those of its folder."""
    for server in fleet.servers:
        if server.weights.startswith("turngym-"):
            raise ServerError(
                f"{server.url} has weights that a training run sent it ({server.weights!r}), not those of "
                f"{server.model}: start it again"
            )


def model_config(folder: str) -> Mapping[str, Any]:
    """The model's config.json; empty where it cannot be read from here."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _compare(
    fleet: Fleet, path: str, ask: Mapping[str, Any], part: str, mine: Sequence[Any], names: Sequence[str]
) -> None:
    for server, answer in zip(fleet.servers, fleet.call_all("POST", path, ask), strict=True):
        theirs = answer.get(part) if isinstance(answer, dict) else None
        if not isinstance(theirs, list) or len(theirs) != len(mine):
            raise ServerError(f"{server.url}{path} answered {str(answer)[:200]!r}; {len(mine)} rows were asked for")
        for name, here, there in zip(names, mine, theirs, strict=True):
            if here != there:
                raise ServerError(
                    f"{server.url} has another vocabulary: {name} is {there!r} there and {here!r} here. Start it with "
                    "the same tokenizer"
                )
