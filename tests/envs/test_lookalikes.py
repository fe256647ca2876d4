"""Texts that look alike: which are, that they can be meant leniently, and that a refusal shows how they differ."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.task import Task
from turngym.core.tools import ToolSpec
from turngym.envs.base import Outcome, TextEnv, quote
from turngym.envs.guard import ActionGuard
from turngym.envs.lenient_reading import read_action
from turngym.envs.lookalikes import LONGEST_COMPARED, alike, is_invisible, plain, shown

EVERY = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]


def test_every_white_space_is_a_blank() -> None:
    blanks = [c for c in EVERY if c.isspace()] + ["\u2800"]
    assert len(blanks) == 30
    assert {plain(f"wine{c}red") for c in blanks} == {"wine red"}
    assert {plain(f"{c}wine{c}{c}red{c}") for c in blanks} == {"wine red"}


def test_every_character_without_a_form_is_nothing() -> None:
    """Zero-width characters, soft hyphens, byte order marks, bidirectional marks, tags, variation selectors."""
    unseen = [c for c in EVERY if unicodedata.category(c) in ("Cc", "Cf") and not c.isspace()]
    unseen += [*map(chr, range(0xFE00, 0xFE10)), *map(chr, range(0xE0100, 0xE01F0)), "\u034f", "\u3164", "\uffa0"]
    assert set("\u200b\u200d\u00ad\ufeff\u200e\u202a\u2066\u061c\U000e0001\x00\x7f") <= set(unseen)
    assert {plain(f"wi{c}ne") for c in unseen} == {"wine"}
    assert all(map(is_invisible, unseen))


@pytest.mark.parametrize(
    ("label", "typed"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("Ångström", "A\u030angstro\u0308m"),
        ("１０ｘ２０", "10x20"),
        ("ﬁne", "fine"),
        ("STRASSE", "straße"),
        ("İzmir", "i̇zmir"),
        ("x\u2011large", "x-large"),
        ("click[a1-wine\xa0red]", "click［ A1-wine  red ］"),
        (" | 250 ml", "|\u2009250\u202fml"),
    ],
)
def test_normal_forms_width_case_and_hyphens_do_not_count(label: str, typed: str) -> None:
    assert plain(label) == plain(typed)
    assert alike(typed, ["other", label]) == [label]


@pytest.mark.parametrize(("one", "other"), [("10 5", "105"), ("a-b", "a b"), ("a–b", "a-b"), ("red", "rëd"), ("", "x")])
def test_what_a_reader_sees_counts(one: str, other: str) -> None:
    assert plain(one) != plain(other)


def test_all_that_look_alike_are_found() -> None:
    assert alike("a b", ["a\xa0b", "ab", "a  b"]) == ["a\xa0b", "a  b"]
    assert alike("a b", []) == []
    assert alike("a" * (LONGEST_COMPARED + 1), ["a" * (LONGEST_COMPARED + 1)]) == []


@given(st.text(max_size=30))
def test_plain_text_stays_plain(text: str) -> None:
    assert plain(plain(text)) == plain(text)


@given(st.text(max_size=20), st.text(max_size=20))
def test_two_texts_beside_each_other_are_never_shown_alike(one: str, other: str) -> None:
    if plain(one) == plain(other) and one != other:
        pair = shown(one, other), shown(other, one)
        assert pair[0] != pair[1]
        assert not any(map(is_invisible, pair[0] + pair[1]))


def test_quotes_show_what_cannot_be_seen() -> None:
    assert quote("wine\xa0red") == '"wine\\xa0red"'
    assert quote("a\u200bb\r\nc") == '"a\\u200bb c"'
    assert quote("a  b", beside="a b") == '"a  b"'
    assert quote("caf\u00e9", beside="cafe\u0301") == '"caf\\xe9"'
    assert quote("Grün") == '"Grün"'


class Doors(TextEnv):
    """Two doors whose names look like others."""

    env_id = "test/Doors-v0"
    tool = ToolSpec(name="go", description="Go.", argument="action", argument_description="a door", examples=("go",))
    instructions = "Go."
    names: ClassVar[tuple[str, ...]] = ("open wine\xa0red door", "open caf\u00e9", "open twin", "open  twin", "look")

    def task_ids(self) -> tuple[str, ...]:
        return ("one",)

    def _begin(self, task_id: str) -> str:
        return "doors"

    def _apply(self, action: str) -> Outcome:
        return Outcome(observation=f"did {action}")

    @property
    def task(self) -> Task:
        return Task(env_id=self.env_id, task_id="one", sha256="0" * 64, split="s", category="c")

    success = False

    def admissible(self) -> tuple[str, ...]:
        return self.names

    def _get_state(self) -> Any:
        return []

    def _set_state(self, state: Any) -> None:
        pass


def doors(**options: Any) -> ActionGuard:
    guard = ActionGuard(Doors(), **options)
    guard.reset()
    return guard


TYPED = [
    ("Open wine red  door", "open wine\xa0red door"),
    ("open ｃａｆｅ\u0301", "open caf\u00e9"),
    ("Action: open wine red door", "open wine\xa0red door"),
]


@pytest.mark.parametrize(("typed", "meant"), TYPED)
@pytest.mark.parametrize("channel", [None, "text"])
def test_any_environment_takes_it_leniently(typed: str, meant: str, channel: str | None) -> None:
    said = typed if channel is None else f"<action>{typed}</action>"
    for reading in ("strict", "folded"):
        assert doors(channel=channel, reading=reading).step(said)[4]["verdict"] == "inadmissible"
    info = doors(channel=channel, reading="lenient").step(said)[4]
    assert (info["verdict"], info["action"], info["reading"]) == ("ok", meant, "lenient")


def test_one_of_two_that_look_alike_is_not_guessed() -> None:
    assert doors(reading="lenient").step("open\u200b twin")[4]["verdict"] == "inadmissible"


@pytest.mark.parametrize("name", Doors.names)
def test_the_exact_name_is_always_what_it_says(name: str) -> None:
    for reading in ("strict", "folded", "lenient"):
        info = doors(reading=reading).step(name)[4]
        assert (info["verdict"], info["action"]) == ("ok", name)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("open wine red door", 'Did you mean "open wine\\xa0red door", not "open wine red door"?'),
        ("open cafe\u0301", 'Did you mean "open caf\\xe9", not "open cafe\\u0301"?'),
        ("open lok", ""),
    ],
)
def test_a_refusal_shows_the_difference(typed: str, said: str) -> None:
    text = doors().step(typed)[0].splitlines()[0]
    assert text.endswith(said) if said else "not" not in text.partition("Did you mean")[2]


def test_a_long_response_is_compared_in_bounded_time() -> None:
    guard = doors(reading="lenient")
    for unit in ("open\xa0", "\u200b", "ｏ", "open wine red door\n"):
        assert read_action(unit * (1_000_000 // len(unit)), None, guard.base, "lenient")[0].action is not None
