"""Settings of an OpenAI-compatible endpoint; what speaks with it need not be loaded to read them."""

from __future__ import annotations

from typing import Literal

from turngym.core.numbers import NotNegative, Number, Positive
from turngym.core.spec import Spec

KEY = "OPENAI_API_KEY"
"""Environment variable with the key, where no other is named."""


class EndpointOptions(Spec):
    """An OpenAI-compatible endpoint (`openai:MODEL`)."""

    base_url: str = ""
    """openai:MODEL: address of the endpoint with its version, for example http://127.0.0.1:8000/v1; by default
    $OPENAI_BASE_URL, else OpenAI's own."""
    key_env: str = KEY
    """openai:MODEL: name of the environment variable that holds the key. The key itself is never an option."""
    request_deadline: Positive = 600.0
    """openai:MODEL: seconds for one response, retries and waits for rate limits included."""
    request_retries: Number = 6
    """openai:MODEL: how often a request is sent again after a failure that may pass (a 5xx, a lost connection, a broken
    body). Rate limits (429) are waited out until the deadline."""
    send_stop: bool = True
    """openai:MODEL: send the channel's stop strings. Some models refuse `stop`; actions are read without it too."""
    send_seed: bool = True
    """openai:MODEL: send a seed, made of --seed, task, sample and turn; some endpoints refuse `seed`."""
    reasoning_back: Literal["drop", "send"] = "drop"
    """openai:MODEL: whether the reasoning of earlier turns is sent back, in the field in which it came, where the
    handshake does not find that the server demands or refuses it. Signatures of it, and other fields of unknown
    meaning, always are."""
    handshake: bool = True
    """openai:MODEL: try two short requests before the first episode, to find out what the server takes and what it
    answers (docs/endpoints.md); without it requests are as most servers take them."""
    token_ids: bool = False
    """openai:MODEL: ask for token ids and log-probabilities (`return_token_ids` of vLLM and of `turngym serve proxy`),
    so that traces can be trained on as they were sampled."""
    extra_body: str = "{}"
    """openai:MODEL: further fields of every request as JSON, for example '{"top_p": 0.95}'."""
    price_in: NotNegative | None = None
    """openai:MODEL: price of a million prompt tokens, in any currency; with --price-out the results show the cost."""
    price_cached: NotNegative | None = None
    """openai:MODEL: price of a million prompt tokens that the endpoint had cached; by default --price-in."""
    price_out: NotNegative | None = None
    """openai:MODEL: price of a million completion tokens, reasoning included."""
