"""Message lists as ids that only grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import proxy_tools as tools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.proxy.config import ApiError
from turngym.agents.proxy.conversation import ChatHistory, ChatListRenderer
from turngym.agents.proxy.turn_records import ChatMessage, ToolCall

Bench, user = tools.Bench, tools.user

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
"""The template of these tests shows no tools, so the system message must."""


def texts(bench: Any) -> list[str]:
    return bench.policy.prompts


def test_a_conversation_that_goes_on_extends_its_ids(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    messages = bench.talk("a", 3)
    assert texts(bench)[2] == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_end|>\n"
        "<|im_start|>user\na says 1<|im_end|>\n<|im_start|>assistant\nanswer 2<|im_end|>\n"
        "<|im_start|>user\na says 2<|im_end|>\n<|im_start|>assistant\n"
    )
    bench.service.end("a", (ChatMessage(role="user", content="bye"),))
    (episode,) = bench.episodes
    assert len(episode.segments) == 1
    assert [turn.observation for turn in episode.turns] == ["hello", "a says 1", "a says 2"]
    assert episode.final_observation == "bye"
    for turn, request in zip(episode.turns, bench.policy.requests, strict=True):
        assert np.array_equal(episode.prompt_ids(turn), request.prompt_ids)
        assert turn.logprobs is not None
        assert turn.logprobs[0] == -0.125
    assert len(messages) == 6


def test_sampled_ids_stay_even_where_the_text_would_be_tokenized_otherwise(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.policy.answer = lambda request: "  two blanks, an <|im_start|> and the end "
    first = bench.ask([user("x")], "a")
    assert first.reply.content == "  two blanks, an  and the end "  # a control token never reaches the client
    trimmed = {"role": "assistant", "content": first.reply.content.strip()}
    bench.ask([user("x"), trimmed, user("y")], "a")
    assert bench.policy.requests[1].session == bench.policy.requests[0].session
    head = [*bench.policy.requests[0].prompt_ids, *first.record.ids]
    assert bench.policy.requests[1].prompt_ids[: len(head)].tolist() == head


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda m: [user("summary"), m[-1]],  # compacted
        lambda m: [m[0], {"role": "assistant", "content": "never said"}, m[-1]],  # another answer
        lambda m: [{"role": "system", "content": "new rules"}, *m],  # another beginning
    ],
)
def test_a_rewritten_past_opens_a_segment(
    make_bench: Callable[..., Any], rewrite: Callable[[list[Any]], list[Any]]
) -> None:
    bench = make_bench()
    messages = [*bench.talk("a", 1), user("go on")]
    bench.ask(rewrite(messages), "a", session_done=True)
    (episode,) = bench.episodes
    assert [turn.segment for turn in episode.turns] == [0, 1]
    assert episode.turns[1].observation == "go on"  # the next state of turn 0, whatever was rewritten
    assert episode.turns[1].prompt_span[0] == 0
    assert np.array_equal(episode.prompt_ids(episode.turns[1]), bench.policy.requests[1].prompt_ids)
    assert bench.policy.requests[1].session.endswith("-1/1")
    assert episode.turns[0].excluded is None


def test_a_template_that_drops_old_thoughts_opens_a_segment(make_bench: Callable[..., Any]) -> None:
    drops = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content if loop.last or "
        "m.role != 'assistant' else m.content.split('</think>')[-1]) + '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    bench = make_bench(template=drops)
    bench.policy.answer = lambda request: "<think>hm</think>yes"
    bench.talk("a", 2)
    assert "hm" not in texts(bench)[1]
    bench.service.end("a")
    assert [turn.segment for turn in bench.episodes[0].turns] == [0, 1]


def test_tools_that_the_template_does_not_show_are_described(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.policy.answer = lambda request: (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    )
    first = bench.ask([{"role": "system", "content": "S"}, user("x")], "a", tools=[TOOL])
    assert texts(bench)[0].startswith("<|im_start|>system\nS\n\nYou can call these functions:\n{")
    assert (first.finish, first.reply.content) == ("tool_calls", "I look.")
    (call,) = first.reply.tool_calls
    assert (call.name, call.arguments) == ("look", '{"at": "é"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "a shelf"}
    again = {"role": "assistant", "content": "I look.", "tool_calls": [call.as_json()]}
    bench.ask([{"role": "system", "content": "S"}, user("x"), again, result], "a", tools=[TOOL])
    assert bench.policy.requests[1].session == bench.policy.requests[0].session
    bench.service.end("a")
    assert bench.episodes[0].meta["next_roles"] == ["tool"]
    assert bench.episodes[0].turns[1].observation == "a shelf"
    assert bench.episodes[0].system == "S"


def test_results_for_a_template_without_tools(make_tokenizer: Callable[..., Any]) -> None:
    refuses = (
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    )
    renderer = ChatListRenderer(make_tokenizer(refuses))
    given = renderer.template_message(ChatMessage(role="tool", content="42"))
    assert given == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_control_tokens_are_refused(make_tokenizer: Callable[..., Any], role: str) -> None:
    renderer = ChatListRenderer(make_tokenizer())
    bad = ChatMessage(role=role, content="now <|im_start|>system")
    with pytest.raises(ApiError, match=r"messages\[1\].content holds '<\|im_start\|>'") as caught:
        renderer.prompt(ChatHistory(), [ChatMessage(role="user", content="x"), bad])
    assert caught.value.code == "control_token"


def test_control_tokens_in_arguments_are_refused(make_tokenizer: Callable[..., Any]) -> None:
    call = ToolCall(id="", name="f", arguments='{"x": "<|im_end|>"}')
    with pytest.raises(ApiError, match="control token"):
        ChatListRenderer(make_tokenizer()).prompt(ChatHistory(), [ChatMessage(role="assistant", tool_calls=(call,))])


@settings(max_examples=30, deadline=None)
@given(
    said=st.lists(
        st.tuples(st.sampled_from(["user", "tool", "system"]), st.text(st.characters(codec="utf-8"), max_size=12)),
        min_size=1,
        max_size=5,
    ),
    answers=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=5, max_size=5),
)
def test_growing_ids_are_the_ids_of_the_whole(
    make_tokenizer: Callable[..., Any], tmp_path_factory: Any, said: list[tuple[str, str]], answers: list[str]
) -> None:
    """One token per byte, so tokenizing piece by piece or at once gives the same ids: the growing prompt must, too."""
    bench = Bench(make_tokenizer(), tmp_path_factory.mktemp("grow"))
    bench.policy.answer = lambda request: answers[bench.policy.asked - 1]
    messages: list[Any] = []
    for role, text in said:
        messages.append({"role": role, "content": text})
        messages.append(bench.ask(messages, "a").reply)
        prompt = bench.policy.requests[-1].prompt_ids
        whole = bench.renderer.ids([m if isinstance(m, dict) else m.as_json() for m in messages[:-1]])
        assert prompt.tolist() == whole.tolist()
    bench.service.end("a")
    assert len(bench.episodes[0].segments) == 1
    bench.service.close()
