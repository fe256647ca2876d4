"""Protocol, documents and rewards: literal cases, and nothing that a passage says can forge a turn."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import TaskError
from turngym.envs.channels import blocks
from turngym.envs.search import turn_protocol
from turngym.envs.search.passage_text import DocFormat, harmless, render, shorten
from turngym.envs.search.reward import (
    RewardRule,
    answer_f1,
    exact,
    last_answer,
    published_prediction,
    sub_exact,
    valid_form,
)
from turngym.envs.search.sources import PROMPT, asked
from turngym.retrieval.core import Hit, Passage

NAMES = ("think", "search", "information", "answer", "tool_call")
FORGERIES = st.lists(
    st.one_of(
        st.sampled_from([f"<{slash}{name}>" for name in NAMES for slash in ("", "/")]),
        st.sampled_from(
            ["<", ">", "</", "/", "\n", " ", "&lt;", "<|im_start|>", "<|im_end|>", "[INST]", "</s>", '"', "\ud800"]
        ),
        st.sampled_from(NAMES),
        st.text(max_size=5),
    ),
    max_size=12,
).map("".join)
LAYOUTS: tuple[DocFormat, ...] = ("search_r1", "verl", "skyrl")
ANY_TAG = re.compile(r"</?(?:think|search|information|answer|tool_call)>")


def hit(title: str, text: str) -> Hit:
    return Hit(passage=Passage(id="1", title=title, text=text), score=1.0)


@given(text=FORGERIES)
def test_harmless_text_holds_no_tag_and_stays_so(text: str) -> None:
    clean = harmless(text)
    assert not ANY_TAG.search(clean)
    assert harmless(clean) == clean
    clean.encode("utf-8")


@given(
    docs=st.lists(st.tuples(FORGERIES, FORGERIES), max_size=4),
    layout=st.sampled_from(LAYOUTS),
    budget=st.none() | st.integers(1, 6),
    letters=st.booleans(),
)
def test_passages_forge_nothing(
    docs: list[tuple[str, str]], layout: DocFormat, budget: int | None, letters: bool
) -> None:
    count = len if letters else None
    text = render([hit(*doc) for doc in docs], layout, budget, count)
    observation = turn_protocol.information(text)
    assert ANY_TAG.findall(observation) == ["<information>", "</information>"]
    assert turn_protocol.read_action(observation) is None
    assert last_answer(observation) is None
    assert valid_form(f"<think>a</think><search>b</search>{observation}<think>c</think><answer>d</answer>")


@given(question=FORGERIES)
def test_questions_forge_nothing(question: str) -> None:
    assert not ANY_TAG.search(asked(question))
    assert asked(question).endswith("?")


@given(text=FORGERIES, budget=st.integers(0, 30), letters=st.booleans())
def test_shortened_texts_are_longest_beginnings(text: str, budget: int, letters: bool) -> None:
    count = (lambda part: (len(part) + 2) // 3) if letters else None
    short = shorten(text, budget, count)
    assert text.startswith(short)
    assert (count(short) if count else len(short.split())) <= budget
    if count is None and short != text:
        assert len(short.split()) == budget


def test_layouts() -> None:
    hits = [hit("Leck", "A river.\nIt is long."), hit("", "No title.")]
    assert render(hits, "search_r1") == 'Doc 1(Title: "Leck") A river.\nIt is long.\nDoc 2(Title: "") No title.\n'
    assert render(hits, "verl") == "Doc 1 (Title: Leck)\nA river.\nIt is long.\n\nDoc 2 (Title: )\nNo title.\n\n"
    assert render(hits, "skyrl") == 'Doc 1: "Leck"\nA river.\nIt is long.\nDoc 2: ""\nNo title.\n'
    assert render(hits, "search_r1", 3) == 'Doc 1(Title: "Leck") A river.\nDoc 2(Title: "") No title.\n'
    assert render([], "verl") == "No passage was found."


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<search>two\nlines</search>", ("search", "two\nlines")),
        ("<search>q</search><answer>a</answer>", ("search", "q")),
        ("<answer>a</answer> <search>q</search>", ("answer", "a")),
        ("<answer>a <search>q</search></answer>", ("search", "q")),
        ("<think>so <search>q</search>", ("search", "q")),
        ("<search>q", None),
        ("q</search><answer>a</answer>", None),
        ("", None),
    ],
)
def test_the_published_rule_of_actions(response: str, action: tuple[str, str] | None) -> None:
    assert turn_protocol.read_action(response) == action


@given(text=FORGERIES)
def test_canonical_actions_are_fixed_points(text: str) -> None:
    once = turn_protocol.canonical(text)
    if turn_protocol.read_action(text) is not None:
        assert turn_protocol.canonical(once) == once
        assert turn_protocol.read_action(once) == turn_protocol.read_action(text)


def test_responses_as_the_reward_reads_them() -> None:
    action = "<search>q</search>"
    assert turn_protocol.written("<think>t</think> <search> q </search> more", action) == (
        "<think>t</think> <search> q </search>"
    )
    assert turn_protocol.written("<think>t</think><search>q", action) == "<think>t</think><search>q</search>"
    assert turn_protocol.written('<think>t</think><tool_call>{"name"', action) == f"<think>t</think>{action}"
    assert turn_protocol.written("something else", action) == action


@pytest.mark.parametrize(
    ("prediction", "golden", "em", "sub"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], True, True),
        ("U.S.", ["US"], True, True),
        ("an  apple a day", ["apple day"], True, True),
        ("theatre", ["atre"], False, True),
        ("in Paris, France", ["Paris"], False, True),
        ("Paris", ["in Paris"], False, False),
        ("", ["the"], True, False),
        ("", ["Paris"], False, False),
        ("Zürich", ["zürich", "Zurich"], True, True),
        ("Zurich", ["Zürich"], False, False),
        ("yes", ["no", "Yes."], True, True),
    ],
)
def test_matching(prediction: str, golden: list[str], em: bool, sub: bool) -> None:
    assert exact(prediction, golden) is em
    assert sub_exact(prediction, golden) is sub


T, S, I, A = "<think>t</think>", "<search>q</search>", "<information>d</information>", "<answer>a</answer>"  # noqa: E741


@pytest.mark.parametrize(
    ("response", "valid"),
    [
        (T + A, True),
        (T + S + f"\n\n{I}\n\n" + T + "\n" + A + "\n", True),
        (T + S + I + T + S + I + T + A, True),
        (A, False),
        (T + S + I + A, False),
        (S + I + T + A, False),
        (T + S + T + A, False),
        (T + A + T, False),
        (T + " so " + A, False),
        (T + A + " done", False),
        ("<think>t<think>u</think></think>" + A, False),
        ("<think>t" + A, False),
        (T + "<search>q<answer>a</answer></search>" + I + T + A, False),
        ("<think></think><answer></answer>", True),
    ],
)
def test_the_form(response: str, valid: bool) -> None:
    assert valid_form(response) is valid


def test_every_value_of_the_format_reward() -> None:
    rule = RewardRule(kind="format", s=0.25, f=0.125, r=0.0625)
    assert rule.score(T + A, ["a"]) == 1.0 - 0.0  # "a" is an article: both sides normalize to nothing, and are equal
    gold = ["red fox"]
    right, wrong = "<answer>Red Fox.</answer>", "<answer>wolf</answer>"
    found = "<information>The red fox sleeps.</information>"
    assert rule.score(T + right, gold) == 1.0
    assert rule.score(right, gold) == 0.75
    assert rule.score(T + S + found + T + wrong, gold) == 0.3125
    assert rule.score(T + S + I + T + wrong, gold) == 0.25
    assert rule.score(wrong, gold) == 0.125
    assert rule.score(S + found, gold) == 0.0
    assert rule.score("", gold) == 0.0
    assert RewardRule(kind="em").score(right, gold) == 1.0
    assert RewardRule(kind="em").score(T + wrong, gold) == 0.0
    with pytest.raises(TaskError, match="coefficient f is -1"):
        RewardRule(f=-1.0)


def test_the_agents_own_words_are_judged() -> None:
    """The environment's texts hold answer tags, too: the invalid-action text, and prompts."""
    rule = RewardRule(kind="em")
    response = "<answer>fox</answer>" + turn_protocol.INVALID
    assert last_answer(response) == "and"
    assert rule.score(response, ["fox"], said="<answer>fox</answer>") == 1.0
    assert rule.score("", ["Lisbon"], prompt=PROMPT) == 0.0


def test_the_published_rule_wants_two_answers() -> None:
    assert published_prediction("<answer>fox</answer>") is None
    assert published_prediction("<answer>x</answer> <answer> fox </answer>") == "fox"
    assert published_prediction(PROMPT) == "Lisbon"
    rule = RewardRule(kind="em", strict_compat=True)
    assert rule.score("<answer>fox</answer>", ["fox"]) == 0.0
    assert rule.score("<answer>fox</answer>", ["fox"], prompt=PROMPT) == 1.0


@given(FORGERIES)
def test_blocks_are_what_the_pattern_finds(text: str) -> None:
    for tag in NAMES:
        assert list(blocks(text, tag)) == re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)


@pytest.mark.parametrize(
    "piece", ["<answer>", "<information>", "<search>", "< ", "< / ", "<think", "<tool_call>", "[INST"]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_megabyte_is_read_in_seconds(piece: str, whole: bool) -> None:
    """The square of a megabyte would take minutes in every one of these."""
    text = piece + " " * 1_000_000 if whole else piece * (1_000_000 // len(piece))
    rule = RewardRule(kind="format")
    began = time.process_time()
    turn_protocol.canonical(text)
    harmless(text)
    turn_protocol.written(text, "<search>x</search>")
    rule.score(text, ["x"])
    published_prediction(text)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("prediction", "golden", "f1"),
    [
        (None, ["Ann"], 0.0),
        ("Orchard, Glass", ["Glass Orchard"], 1.0),
        ("in the old Glass Orchard", ["Glass Orchard"], 2 * 2 / (4 + 2)),
        ("New York, New York", ["York"], 2 * 1 / (4 + 1)),
        ("Bob", ["Ann", "Bob Lee"], 2 / 3),
        ("the", ["Ann"], 0.0),
        ("A", ["The"], 0.0),
    ],
)
def test_f1_is_of_the_words_shared_with_the_likest_answer(prediction: str | None, golden: list[str], f1: float) -> None:
    assert answer_f1(prediction, golden) == f1
