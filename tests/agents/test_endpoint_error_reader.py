"""What servers say when they do not answer: a full context in many words, what is none, and errors inside a 200."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turngym.agents.endpoint.error_reader import RequestFailed, advice, error_in, read_failure


def said(status: int, body: Any) -> RequestFailed:
    text = body if isinstance(body, str) else json.dumps(body)
    return read_failure(status, text, None if isinstance(body, str) else body, {})


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


def quoted(inner: Any) -> dict[str, Any]:
    """As OpenRouter passes on what the server behind it said."""
    return error("Provider returned error", code=400, metadata={"raw": json.dumps(inner), "provider_name": "x"})


FULL: list[tuple[int, Any]] = [
    # by code
    (400, error("Invalid request.", code="context_length_exceeded")),
    (400, error("No.", type="exceed_context_size_error", n_prompt_tokens=5000, n_ctx=4096)),
    (400, error("No.", code="model_max_prompt_tokens_exceeded")),
    (400, error("Invalid 'messages[1].content'", code="string_above_max_length", param="messages[1].content")),
    (413, {"type": "error", "error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}}),
    (413, error("Request body too large for gpt-4o model. Max size: 8000 tokens.", code="tokens_limit_reached")),
    (400, error("No.", code="1261")),
    (400, {"object": "error", "message": "No.", "type": "invalid_request_prompt", "code": "3051"}),
    (400, error("litellm.ContextWindowExceededError: No.", type=None, param=None, code="400")),
    (400, {"object": "error", "message": "internal error, status code ResponseType.INPUT_LENGTH_ERROR", "code": 400}),
    # by numbers
    (400, error("Prompt length 300000 is over 262144")),
    (422, error("`inputs` must have less than 4096 tokens. Given: 5000", type="validation")),
    (400, error("prompt has 5,000 tokens, but the configured context size is 4,096 tokens")),
    (400, error("5000 prompt tokens + 4096 new tokens do not go into 8192")),
    (400, error("max_tokens must be at least 1, got -904.", code=400)),
    (400, error("max_tokens must be at least 1, got -904.", param="max_tokens")),
    (400, error("'max_tokens' is too large: 4096. The model takes 4096 tokens and your request has 500 input tokens")),
    (400, {"errors": [{"message": "AiError: input and output tokens (5000) do not fit 4096", "code": 5021}]}),
    (400, error("Requested 9000 tokens, 8192 are there")),
    (400, error("The prompt does not fit.", n_prompt_tokens=5000, n_ctx=4096)),
    # by words
    (400, {"message": "Input is too long for requested model."}),
    (400, {"error": "prompt too long; exceeded max context length by 904 tokens"}),
    (400, error("This request exceeds the context window of the model")),
    (400, error("input length and `max_tokens` exceed context limit: 198000 + 4096 > 200000")),
    (400, error("Please reduce the length of the messages or completion.", param="messages")),
    (400, error("Requested token count exceeds the model's maximum context length of 4096 tokens.")),
    (400, {"message": "too many tokens: size limit exceeded by 1005 tokens. Try using shorter or fewer inputs."}),
    (400, error("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]")),
    (400, error("tokens in request more than max tokens allowed")),
    (400, {"error_code": 336103, "error_msg": "Prompt tokens too long"}),
    (400, {"code": "InvalidParameter", "message": "the max input characters is 20000"}),
    (400, error("Total tokens of image and text exceed max message tokens")),
    (400, error("the number of input tokens 5000 cannot exceed the total tokens limit 4096 for this model")),
    (400, error("Prompt length 5000 is greater than max_seq_len 4096")),
    (400, error("The request's prompt length 5000 exceeds session_len 4096")),
    (400, error("The total length of messages exceeds the limit")),
    (400, error("Please shorten your input.")),
    (400, error("prompt_tokens(5000) + max_tokens(4096) > model_max_length(8192)")),
    (500, error("context size has been exceeded")),
    (400, error("输入文本超长")),
    (400, error("输入长度超过模型上限")),
    (400, [error("The input token count (1050000) exceeds the maximum number of tokens allowed (1048576).")]),
    (400, {"detail": "prompt is longer than the context window"}),
    (422, {"detail": [{"loc": ["body", "messages"], "msg": "Value error, the prompt exceeds 4096 tokens"}]}),
    (500, error("Requested tokens (600) exceed context window of 512")),
    (500, {"error": "the prompt is too long for the context size"}),
    # by status alone
    (413, ""),
    (413, "<html>413 Request Entity Too Large</html>"),
    # of a server behind a gateway
    (400, quoted(error("This endpoint's maximum context length is 8192 tokens", code=400))),
    (400, error('Error from provider: {"error": {"message": "prompt is too long: 9000 tokens > 8192 maximum"}}')),
    (200, quoted(error("No.", code="context_length_exceeded"))),
    (200, {"base_resp": {"status_code": 2013, "status_msg": "invalid params, context window exceeds limit"}}),
]

OTHER: list[tuple[int, Any]] = [
    (400, ""),
    (400, error("Request contains an invalid argument.", status="INVALID_ARGUMENT", code=400)),
    (400, error("Unsupported value: 'temperature' does not support 0.85", param="temperature")),
    (400, error("Invalid 'stop': array too long. Expected an array with maximum length 4, got 16", param="stop")),
    (400, error("Invalid 'tools[0].name': string too long. Expected at most 64, got 70", param="tools[0].name")),
    (400, error("Invalid name: string too long. Got 70, maximum 64", param="messages[2].tool_calls[0].function.name")),
    (400, error("max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas")),
    (422, {"detail": [{"loc": ["body", "temperature"], "msg": "Input should be less than or equal to 2"}]}),
    (422, {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "type": "extra_forbidden"}]}),
    (400, error("Function call is missing a thought_signature, function call `default_api:look` , position 2.")),
    (400, error("'messages.2' : for 'role:assistant' property 'reasoning_content' is unsupported")),
    (400, error("An assistant message with 'tool_calls' must be followed by tool messages: call_1234567890")),
    (400, error("Conversation roles must alternate user/assistant/user/assistant/...")),
    (400, error("Your credit balance is too low to access the API: 5000 tokens need 0.02")),
    (400, error("Failed to call a function. Adjust your prompt.", code="tool_use_failed", failed_generation="x")),
    (400, error("The response was filtered due to the prompt triggering the content policy", code="content_filter")),
    (401, error("the prompt is too long")),
    (404, error("The model `context-length-4096` does not exist")),
    (429, error("Number of input tokens has exceeded your per-minute rate limit: 40000 > 30000")),
    (429, error("Too many tokens, please wait before trying again.")),
    (500, error("CUDA out of memory: the prompt has 5000 tokens, which exceeds what is free")),
    (500, error("KeyError: 'prompt_length'")),
    (503, error("The model is overloaded: input queue exceeds 100")),
]


@pytest.mark.parametrize(("status", "body"), FULL, ids=lambda x: json.dumps(x, ensure_ascii=True)[:60])
def test_a_full_context_in_the_words_of_servers(status: int, body: Any) -> None:
    found = said(status, body)
    assert (found.overflow, found.passing, found.unclear) == (True, False, False)


@pytest.mark.parametrize(("status", "body"), OTHER, ids=lambda x: json.dumps(x, ensure_ascii=True)[:60])
def test_what_is_no_full_context(status: int, body: Any) -> None:
    assert not said(status, body).overflow


def whole(**more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}], **more}


def inside(error: Any) -> dict[str, Any]:
    answer = whole()
    answer["choices"][0]["error"] = error
    return answer


@pytest.mark.parametrize(
    ("body", "code", "passing", "limited"),
    [
        (whole(error={"code": 502, "message": "connection reset"}), 502, True, False),
        (inside("died"), None, True, False),
        ({"choices": [], "error": {"code": 429, "message": "slow down"}}, 429, True, True),
        ({"error": "something broke"}, None, True, False),
        ([{"error": {"code": 503, "status": "UNAVAILABLE", "message": "overloaded"}}], 503, True, False),
        ({"error": {"code": 402, "message": "no credits left"}}, 402, False, False),
        ({"choices": None, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}}, None, True, True),
        ({"success": False, "errors": [{"message": "worker exceeded its time"}]}, None, True, False),
        ({"detail": "Internal error"}, None, True, False),
    ],
)
def test_an_error_with_status_200(body: Any, code: int | None, passing: bool, limited: bool) -> None:
    found = error_in(body)
    assert found is not None
    failed = read_failure(200, "", found, {})
    assert (failed.code, failed.passing, failed.limited, failed.overflow) == (code, passing, limited, False)


def test_what_holds_no_error() -> None:
    for body in (
        whole(),
        whole(error=None),
        inside(None),
        whole(base_resp={"status_code": 0}),
        whole(message="hi"),
        {},
    ):
        assert error_in(body) is None


def test_waits_and_limits_in_the_body() -> None:
    google = {"code": 429, "message": "You exceeded your current quota", "status": "RESOURCE_EXHAUSTED"}
    google["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "36.5s"}]
    failed = read_failure(429, "", [{"error": google}], {"retry-after": "2"})
    assert (failed.limited, failed.passing, failed.after) == (True, True, 36.5)
    more_than_ever = "Request too large on tokens per min (TPM): Limit 30000, Requested 35000."
    failed = said(429, error(more_than_ever, code="rate_limit_exceeded"))
    assert (failed.limited, failed.passing) == (False, False)
    assert said(429, error(more_than_ever.replace("35000", "9000"))).limited
    deep: Any = "x"
    for _ in range(2000):
        deep = {"error": [deep]}
    assert read_failure(400, "", deep, {}).code == 400


@pytest.mark.parametrize(
    ("status", "body", "help_text"),
    [
        (400, error("Missing `reasoning_content` field in the assistant message at index 2"), "--reasoning-back send"),
        (400, error("Expected `thinking`, but found `tool_use`: it must start with a thinking block"), "-back send"),
        (400, error("Unsupported parameter: 'stop'", param="stop"), "--no-send-stop"),
        (422, {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}, "--no-send-seed"),
        (400, error('Invalid JSON payload received. Unknown name "seed": Cannot find field.'), "--no-send-seed"),
        (
            400,
            error("max_tokens is too large: 100000. This model supports 16384 completion tokens"),
            "--max-new-tokens",
        ),
        (400, error("Conversation roles must alternate user/assistant"), "--memory window"),
        (400, error("auto tool choice requires a parser"), "--channel text"),
        (400, error("unknown field chat_template_kwargs is not supported"), "--thinking auto"),
        (400, error("no"), ""),
    ],
)
def test_what_may_help(status: int, body: Any, help_text: str) -> None:
    found = advice(said(status, body), model="m", key_env="K", tools=True)
    assert (help_text in found) if help_text else not found


def test_reasoning_that_a_server_refuses() -> None:
    failed = said(400, error("'messages.2' : property 'reasoning_content' is unsupported"))
    assert "--reasoning-back drop" in advice(failed, model="m", key_env="K", reasoning=True)
