"""Which ids are prompt and which are response, drawn as rows: [responses in brackets], one row per segment."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_of import reveal

from turngym.agents.rendering.chat_template import RenderError
from turngym.agents.rendering.open_renderer import end_ids
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.token_history import TokenHistory
from turngym.core.tools import ToolSpec

QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>tools: ' + tools[0].function.name + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- set body = m.content -%}{%- set why = '' -%}
  {%- if '</think>' in m.content -%}
    {%- set why = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
    {%- set body = m.content.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if loop.index0 > ns.last and why -%}{{- '<think>\n' + why.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}
  {{- body + '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
  {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
"""Behaves as Qwen3's: thoughts before the last user message go, thoughts around tool results stay."""

PREFILLED = QWEN3.replace("{%- if enable_thinking is defined", "{{- '<think>\n' -}}{%- if enable_thinking is defined")
TRIMMING = (
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
NO_SYSTEM = "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}" + TRIMMING
USER_ONLY = TRIMMING.replace("{{- '<|im_start|>'", "{%- if m.role != 'tool' -%}{{- '<|im_start|>'").replace(
    "{%- endfor -%}", "{%- endif -%}{%- endfor -%}"
)
TOOL = ToolSpec(name="door", description="Open.", argument="action", argument_description="what")

THINK = "<think>\nhm\n</think>\n\n"


def play(renderer: ChatRenderer, steps: Sequence[tuple[str, str]], system: str = "S") -> tuple[TokenHistory, list[str]]:
    """Responses (text that ends in `$` is cut by length) and observations; the rows, one per segment."""
    thread = renderer.open(system, steps[0][0])
    spans: list[list[tuple[int, int]]] = []
    for turn, (observation, response) in enumerate(steps):
        if turn:
            renderer.observe(thread, observation)
        ids = renderer.template.encode(response.removesuffix("$"))
        if not response.endswith("$"):
            ids = np.append(ids, np.int32(renderer.template.end_id)).astype(np.int32)
        assert renderer.respond(thread, ids) == response.removesuffix("$")
        spans += [[] for _ in range(len(thread.segments) - len(spans))]
        spans[-1].append(thread.response_span)
    return thread, [draw(renderer, thread, number, cuts) for number, cuts in enumerate(spans)]


def draw(renderer: ChatRenderer, thread: TokenHistory, segment: int, cuts: list[tuple[int, int]]) -> str:
    ids, row, at = thread.segments[segment].view().tolist(), "", 0
    for start, stop in cuts:
        row += renderer.template.decode(ids[at:start]) + "[" + renderer.template.decode(ids[start:stop]) + "]"
        at = stop
    row += renderer.template.decode(ids[at:])
    return row.replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace("\n", "/")


def test_plain_chatml_is_one_growing_row(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer())
    assert renderer.append_only
    _, rows = play(renderer, [("o1", "a1"), ("o2", THINK + "a2"), ("o3", "a3")])
    assert rows == [
        "<system/S>/<user/o1>/<assistant/[a1>]/<user/o2>/<assistant/[<think>/hm/</think>//a2>]/<user/o3>/<assistant/[a3>]"
    ]


def test_thoughts_before_the_last_user_message_open_a_segment(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3))
    _, rows = play(renderer, [("o1", THINK + "a1"), ("o2", "a2"), ("o3", THINK + "a3"), ("o4", "a4")])
    assert rows == [
        "<system/S>/<user/o1>/<assistant/[<think>/hm/</think>//a1>]",
        "<system/S>/<user/o1>/<assistant/a1>/<user/o2>/<assistant/[a2>]/<user/o3>/<assistant/[<think>/hm/</think>//a3>]",
        "<system/S>/<user/o1>/<assistant/a1>/<user/o2>/<assistant/a2>/<user/o3>/<assistant/a3>/<user/o4>/<assistant/[a4>]",
    ]


def test_thoughts_around_tool_results_stay(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3), tool=TOOL, observation_role="tool")
    assert renderer.append_only
    assert renderer.describes_tool
    _, rows = play(renderer, [("o1", THINK + "a1"), ("o2", THINK + "a2"), ("o3", "a3")])
    assert rows == [
        "<tools: door>/<system/S>/<user/o1>/<assistant/[<think>/hm/</think>//a1>]"
        "/<user/<tool_response>/o2/</tool_response>>/<assistant/[<think>/hm/</think>//a2>]"
        "/<user/<tool_response>/o3/</tool_response>>/<assistant/[a3>]"
    ]


def test_a_thought_that_the_template_reformats_opens_a_segment(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3), observation_role="tool")
    thread, rows = play(renderer, [("o1", "<think>hm</think>a1"), ("o2", "a2"), ("o3", "a3")])
    assert rows[0] == "<system/S>/<user/o1>/<assistant/[<think>hm</think>a1>]"
    assert rows[1].startswith("<system/S>/<user/o1>/<assistant/<think>/hm/</think>//a1>/<user/<tool_response>/o2/")
    assert len(rows) == 2
    assert not thread.appendable


def test_append_history_never_rewrites(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3), history="append")
    _, rows = play(renderer, [("o1", THINK + "a1"), ("o2", "a2")])
    assert rows == ["<system/S>/<user/o1>/<assistant/[<think>/hm/</think>//a1>]/<user/o2>/<assistant/[a2>]"]


def test_thinking_off_prefills_an_empty_thought_that_the_history_drops(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3), thinking=False)
    _, rows = play(renderer, [("o1", "a1"), ("o2", "a2")])
    assert rows == [
        "<system/S>/<user/o1>/<assistant/<think>//</think>//[a1>]",
        "<system/S>/<user/o1>/<assistant/a1>/<user/o2>/<assistant/<think>//</think>//[a2>]",
    ]
    kept = ChatRenderer(make_tokenizer(QWEN3), thinking=False, history="append")
    assert play(kept, [("o1", "a1"), ("o2", "a2")])[1] == [
        "<system/S>/<user/o1>/<assistant/<think>//</think>//[a1>]/<user/o2>/<assistant/<think>//</think>//[a2>]"
    ]


def test_a_prefilled_opening_tag_belongs_to_the_message(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(PREFILLED), observation_role="tool")
    assert renderer.template.prefill == "<think>\n"
    _, rows = play(renderer, [("o1", "hm\n</think>\n\na1"), ("o2", "hm\n</think>\n\na2")])
    assert rows == [
        "<system/S>/<user/o1>/<assistant/<think>/[hm/</think>//a1>]/<user/<tool_response>/o2/</tool_response>>"
        "/<assistant/<think>/[hm/</think>//a2>]"
    ]


def test_a_cut_response_is_closed_by_prompt_ids(make_tokenizer: Any) -> None:
    for template in (None, QWEN3):
        renderer = ChatRenderer(make_tokenizer(template) if template else make_tokenizer())
        _, rows = play(renderer, [("o1", "a1$"), ("o2", "a2")])
        assert rows == ["<system/S>/<user/o1>/<assistant/[a1]>/<user/o2>/<assistant/[a2>]"]


def test_another_end_token_is_a_stop_but_not_the_closing(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(end="<|endoftext|>")
    renderer = ChatRenderer(tokenizer)
    assert renderer.template.end_text == "<|im_end|>"
    assert [tokenizer.decode([i]) for i in renderer.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    thread = renderer.open("S", "o1")
    assert renderer.respond(thread, renderer.template.encode("a1<|endoftext|>")) == "a1"
    renderer.observe(thread, "o2")
    assert draw(renderer, thread, 0, [thread.response_span]).endswith("[a1<|endoftext|>]")
    assert draw(renderer, thread, 1, []) == "<system/S>/<user/o1>/<assistant/a1>/<user/o2>/<assistant/"


def test_systemless_templates_show_the_system_text_in_the_first_user_message(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(NO_SYSTEM))
    assert play(renderer, [("o1", "a1")])[1] == ["<user/S//o1>/<assistant/[a1>]"]
    assert play(renderer, [("o1", "a1")], system="")[1] == ["<user/o1>/<assistant/[a1>]"]


PARTS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- for part in m.content | selectattr('type', 'equalto', 'text') -%}{{- part.text -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""Contents are lists of parts, as in models that also read images (LLaVA)."""


def test_a_template_that_takes_parts_is_given_parts(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(PARTS))
    assert renderer.append_only
    played = [("o1", "a1"), ("say <|im_end|>", "a2")]
    assert play(renderer, played)[1] == play(ChatRenderer(make_tokenizer()), played)[1]


def test_a_template_that_wants_a_system_message_is_given_texts(make_tokenizer: Any) -> None:
    first = "{%- if messages[0].role != 'system' -%}{{- raise_exception('no system message') -}}{%- endif -%}"
    plain = make_tokenizer()
    strict = make_tokenizer(first + plain.chat_template)
    played = [("o1", "a1"), ("o2", "a2")]
    assert play(ChatRenderer(strict), played)[1] == play(ChatRenderer(plain), played)[1]


def test_what_cannot_be_rendered_is_refused(make_tokenizer: Any) -> None:
    with pytest.raises(RenderError, match="has no chat template"):
        ChatRenderer(make_tokenizer(template=None))
    with pytest.raises(RenderError, match=r"role 'tool'.*observation_role='user'"):
        ChatRenderer(make_tokenizer(USER_ONLY), observation_role="tool")
    with pytest.raises(RenderError, match="valid: 'user', 'tool'"):
        ChatRenderer(make_tokenizer(), observation_role="env")  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="refuses the roles user: "):
        ChatRenderer(make_tokenizer("{{- raise_exception('never') -}}"))


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        *((98.0, "98.0"), ("x", "'x'"), ({"a": 1}, "{'a': 1}"), ([[98]], r"\[98\]"), ([98, None], "None")),
        *(([98, 99], "99"), (10_000_000, "10000000"), (-1, "-1"), (True, "True"), ("", "''")),
    ],
)
def test_end_tokens_that_are_no_ids_of_the_model(named: Any, wrong: str) -> None:
    def model(ends: Any) -> Any:
        inside = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=99))
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends), config=inside)

    assert [end_ids(model(ends)) for ends in (None, [], 0, [98, 3])] == [(), (), (0,), (98, 3)]
    with pytest.raises(RenderError, match=f"{wrong} is no id of the model; valid: 0 to 98"):
        end_ids(model(named))


def test_a_clock_in_the_template_stands_still(make_tokenizer: Any) -> None:
    dated = "{{- strftime_now('%d %b %Y') ~ strftime_now('%Y-%m-%d') -}}" + TRIMMING
    _, rows = play(ChatRenderer(make_tokenizer(dated)), [("o1", "a1")])
    assert rows == ["26 Jul 20242024-07-26<system/S>/<user/o1>/<assistant/[a1>]"]
    stern = TRIMMING.replace(
        "{{- '<|im", "{%- if m.role == 'tool' -%}{{- raise_exception('id') -}}{%- endif -%}{{- '<|im", 1
    )
    with pytest.raises(RenderError, match=r"observation_role='user': .* refuses the roles"):
        ChatRenderer(make_tokenizer(stern), observation_role="tool")


PIECES = ["a", "b", " ", "\n", "<think>", "</think>", "<action>", "é", "<|endoftext|>"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.fixture(scope="module")
def renderers(make_tokenizer: Any) -> list[ChatRenderer]:
    return [
        ChatRenderer(make_tokenizer(TRIMMING)),
        ChatRenderer(make_tokenizer(QWEN3)),
        ChatRenderer(make_tokenizer(QWEN3), observation_role="tool"),
        ChatRenderer(make_tokenizer(QWEN3), observation_role="tool", thinking=False),
        ChatRenderer(make_tokenizer(PREFILLED), observation_role="tool"),
    ]


@given(steps=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=6), kind=st.integers(0, 4))
def test_the_last_segment_is_always_the_full_rendering(
    renderers: list[ChatRenderer], steps: list[tuple[str, str, bool]], kind: int
) -> None:
    renderer = renderers[kind]
    plays = [(observation, response + ("$" if cut else "")) for observation, response, cut in steps]
    thread, _ = play(renderer, [*plays, ("end", "x")])
    text = renderer.template.decode(thread.buffer.view().tolist())
    assert reveal(renderer.template.render(thread.messages[:-1])) + "x<|im_end|>" == text
