"""Settings as typed values: names, kinds, layers, comparison and TOML, on types of this test."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from turngym.core.errors import SettingsError
from turngym.core.nested import KIND, put
from turngym.core.numbers import Count, NotNegative, Positive
from turngym.core.resolve import Layer, Resolved, asked_in, checked, read_back, resolve
from turngym.core.setting import Positional, find, settings_of, short_name
from turngym.core.settings import to_toml, toml_of, whole_toml
from turngym.core.spec import Spec, Unread, changed, diff, expand, needing, read, read_word, to_table
from turngym.core.task import content_hash


class Judge(Spec, tag_field=KIND):
    """Who judges."""


class Rules(Judge, tag="rules"):
    """Nobody."""


class Model(Judge, tag="model"):
    folder: str
    """Where it lies."""
    votes: Annotated[int, Meta(ge=1, le=99)] = 3


class Url(Judge, tag="url"):
    address: str
    votes: Count = 5
    deadline: Positive = 9.0


class Env(Spec):
    id: str
    turns: Count | None = 50
    split: str | None = None


class Third(Spec, tag_field=KIND):
    """Of two kinds, which begin alike."""


class Bare(Third, tag="bare"):
    note: str = ""


class Whole(Third, tag="whole"):
    name: str = ""
    note: str = ""


class Extra(Spec):
    folder: str


class Run(Spec):
    env: Env
    judge: Rules | Model | Url = Rules()
    second: Extra | None = None
    third: Bare | Whole = Whole()
    names: tuple[str, ...] = ()
    loud: bool = False
    how: Literal["fast", "slow"] = "fast"
    more: dict[str, Any] = msgspec.field(default_factory=dict)


def made(*tables: dict[str, Any]) -> Run:
    layers = [Layer(name="default", table={"env": {"id": "e"}})]
    for table in tables:
        layers.append(Layer(name="test", table=expand(Run, table, "test"), asked=True))
    return resolve(Run, layers).spec


def test_settings_have_paths_and_short_names() -> None:
    settings = settings_of(Run)
    assert list(settings)[:4] == ["env", "env.id", "env.turns", "env.split"]
    assert [one.__name__ for one in settings["judge.votes"].owners] == ["Model", "Url"]
    assert settings["judge.folder"].about == "Where it lies."
    assert short_name(Run, "env.turns") == "turns"
    assert short_name(Run, "judge.address") == "address"
    # of several the path with the fewest parts; judge.folder and second.folder have as many
    assert find(Run, "env.turns", "test") is find(Run, "turns", "test") is settings["env.turns"]
    with pytest.raises(SettingsError, match=r"test: folder means judge\.folder or second\.folder"):
        find(Run, "folder", "test")
    with pytest.raises(SettingsError, match=r"test: there is no setting 'turms'\. Did you mean 'turns'"):
        find(Run, "turms", "test")


def test_what_people_write_becomes_whole_paths() -> None:
    assert made({"turns": 3, "split": "none"}).env == Env(id="e", turns=3, split=None)
    assert made({"turns": "none"}).env.turns is None
    assert made({"judge": "model:a:b"}).judge == Model(folder="a:b")
    assert made({"judge": "rules"}).judge == Rules()
    assert made({"judge": {"kind": "url", "address": "x", "votes": 1}}).judge == Url(address="x", votes=1)
    assert made({"judge": {"kind": "url"}, "address": "x"}).judge == Url(address="x")
    # a field with which one kind begins names that kind, if it alone has it
    assert expand(Run, {"judge.votes": 2}, "test") == {"judge": {"votes": 2}}
    assert expand(Run, {"third.note": "x"}, "test") == {"third": {"note": "x"}}
    assert made({"address": "x"}).judge == Url(address="x")
    assert made({"judge.folder": "x"}).judge == Model(folder="x")
    assert made({"judge": Model(folder="x", votes=2)}).judge == Model(folder="x", votes=2)
    assert made({"second": "x"}).second == Extra(folder="x")
    assert made({"second": "x"}, {"second": "none"}).second is None
    assert made({"more": '{"a": null, "b": "none"}'}).more == {"a": None, "b": "none"}
    assert made({"more": {"a": None, "b": "none"}}).more == {"a": None, "b": "none"}
    written = toml_of('more = {a = "none", b = ["none"], c = {d = "none"}}')
    assert made(written).more == {"a": None, "b": [None], "c": {"d": None}}
    for name, value, said in (
        ("judge", "modle:x", r"t: judge: 'modle:x' is not known; valid: rules, model, url\. Did you mean"),
        ("judge", "rules:x", "rules takes no value"),
        ("more", "{", "t: more '{' is not JSON"),
    ):
        with pytest.raises(SettingsError, match=said):
            expand(Run, {name: value}, "t")
    with pytest.raises(SettingsError, match=r"t: env\.turns is given as turns and as env\.turns"):
        expand(Run, {"turns": 3, "env.turns": 4}, "t")
    for table in ({"second": None, "second.folder": "x"}, {"second.folder": "x", "second": None}):
        with pytest.raises(SettingsError, match=r"t: second is none and second\.folder"):
            expand(Run, table, "t")


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("env.turns", ["7"], 7),
        ("env.turns", ["none"], None),
        ("loud", ["true"], True),
        ("names", [], ()),
        ("names", ["a", "b"], ("a", "b")),
        ("more", ['{"a": [1]}'], {"a": [1]}),
        ("judge", ["model:x"], "model:x"),
        ("judge.deadline", ["0.5"], 0.5),
        ("how", ["slow"], "slow"),
    ],
)
def test_words_of_a_command_line(name: str, words: list[str], value: Any) -> None:
    assert read_word(settings_of(Run)[name], words, "--x") == value


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("env.turns", ["0"], "--x is '0'; valid: .*at least 1"),
        ("env.turns", ["x"], "--x is 'x'; valid: a whole number or none"),
        ("env.turns", ["1", "2"], "--x needs one value; it is given 2"),
        ("env.turns", [], "--x needs a value"),
        ("judge.deadline", ["0"], "--x is '0'; valid: a number above 0"),
        ("how", ["fats"], "--x is 'fats'; valid: fast, slow. Did you mean 'fast'"),
        ("how", ["\udcff"], "--x is .*; valid: fast, slow"),
        ("env.turns", ["\udcff"], "--x is .*; valid: a whole number or none"),
    ],
)
def test_words_that_cannot_be(name: str, words: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read_word(settings_of(Run)[name], words, "--x")
    assert "\n" not in str(caught.value)


def test_layers_stand_on_top_of_each_other() -> None:
    below = {"env": {"id": "e", "turns": 9}, "judge": {"kind": "url", "address": "x", "votes": 7}, "more": {"a": 1}}
    layers = [
        Layer(name="below", table=below),
        Layer(name="middle", table={"loud": True}),
        Layer(name="on top", table={"env": {"turns": 4}, "more": {"b": 2}}, asked=True),
    ]
    found = resolve(Run, layers)
    assert found.spec.env == Env(id="e", turns=4)
    assert found.spec.judge == Url(address="x", votes=7)
    assert (found.spec.more, found.spec.loud) == ({"a": 1, "b": 2}, True)
    assert found.origins["env.turns"] == "on top"
    assert found.origins["env.id"] == found.origins["judge.votes"] == found.origins["more.a"] == "below"
    assert found.origins["more.b"] == "on top"
    assert "how" not in found.origins
    # another kind takes the place of the whole table
    other = resolve(Run, [*layers, Layer(name="new", table={"judge": {"kind": "model", "folder": "y"}}, asked=True)])
    assert other.spec.judge == Model(folder="y")
    assert other.origins["judge.folder"] == "new"
    assert "judge.address" not in other.origins
    # and no table at all takes the place of one
    assert resolve(Run, [*layers, Layer(name="new", table={"second": None}, asked=True)]).spec.second is None


def test_what_another_kind_has_is_left_out_unless_it_was_asked_for() -> None:
    base = Layer(name="default", table={"env": {"id": "e"}})
    chosen = Layer(name="you", table={"judge": {"kind": "rules"}}, asked=True)
    quiet = Layer(name="preset", table={"judge": {"votes": 2}})
    assert resolve(Run, [base, quiet, chosen]).spec.judge == Rules()
    asked = Layer(name="you", table={"judge": {"votes": 2}}, asked=True)
    with pytest.raises(SettingsError, match=r"you: votes is a setting of judge = model or url; judge is rules"):
        resolve(Run, [base, asked])
    file = Layer(name="a.toml", table={"judge": {"deadline": 2.0}}, asked=True)
    model = Layer(name="you", table={"judge": {"kind": "model", "folder": "x"}}, asked=True)
    with pytest.raises(SettingsError, match=r"a\.toml: deadline is a setting of judge = url; judge is model"):
        resolve(Run, [base, file, model])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"env": {"id": "e", "turns": 0}}, "f: turns is 0; valid: .*at least 1"),
        ({"env": {"id": "e", "turns": True}}, "f: turns is True; valid: "),
        ({"env": {"id": "e", "turns": "4"}}, "f: turns is '4'; valid: a whole number"),
        ({"env": {}}, "f: env.id must be given|f: id must be given"),
        ({}, "f: env must be given"),
        ({"env": {"id": "e"}, "how": "fats"}, "f: how is 'fats'; valid: fast, slow. Did you mean"),
        ({"env": {"id": "e"}, "how": "\udcff"}, "f: how is .*; valid: fast, slow"),
        (
            {"env": {"id": "e"}, "judge": {"kind": "modle"}},
            r"f: judge\.kind is 'modle'; valid: rules, model, url\. Did",
        ),
        ({"env": {"id": "e"}, "judge": {"kind": "model"}}, "f: judge.folder must be given"),
        ({"env": {"id": "e", "trns": 3}}, r"f: there is no setting 'env\.trns'\. Did you mean 'turns'"),
        ({"env": {"id": "e"}, "judge": {"kind": "url", "address": "a", "deadline": float("nan")}}, "deadline is nan"),
        ({"env": {"id": "e"}, "names": [3]}, "f: names is"),
    ],
)
def test_values_that_cannot_be_are_one_line(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read(Run, table, "f")
    assert "\n" not in str(caught.value)


def run(**more: Any) -> Run:
    return Run(env=Env(id="e"), **more)


def test_values_differ_where_they_differ() -> None:
    assert diff(run(), run()) == {}
    assert diff(run(), Run(env=Env(id="e", turns=3), loud=True)) == {"env.turns": (50, 3), "loud": (False, True)}
    # of other kinds the kinds alone are named; of one kind its settings
    assert diff(run(), run(judge=Model(folder="x"))) == {"judge.kind": ("rules", "model")}
    assert diff(run(judge=Model(folder="x")), run(judge=Url(address="x"))) == {"judge.kind": ("model", "url")}
    assert diff(run(judge=Model(folder="x")), run(judge=Model(folder="y"))) == {"judge.folder": ("x", "y")}
    assert "second" in {path.partition(".")[0] for path in diff(run(), run(second=Extra(folder="x")))}
    # what JSON gives back is the same; True is no number
    assert diff(run(names=("a",)), run(names=("b",))) == {"names": (("a",), ("b",))}
    assert diff(run(more={"a": (1, 2)}), run(more={"a": [1, 2]})) == {}
    assert diff(run(more={"a": True}), run(more={"a": 1})) == {"more.a": (True, 1)}
    assert diff(run(more={"a": [True]}), run(more={"a": [1]})) == {"more.a": ([True], [1])}
    assert diff(run(more={"a": 1.0}), run(more={"a": 1})) == {}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
judges = st.one_of(
    st.just(Rules()),
    st.builds(Model, folder=texts, votes=st.integers(1, 99)),
    st.builds(Url, address=texts, deadline=st.floats(1e-300, 1e300)),
)
plain = st.one_of(st.none(), st.just("none"), st.booleans(), st.integers(-(2**62), 2**62), texts, st.floats(-1e9, 1e9))
runs = st.builds(
    Run,
    env=st.builds(
        Env,
        id=texts,
        turns=st.none() | st.integers(1, 10**9),
        split=st.none() | texts.filter(lambda text: text != "none"),
    ),
    judge=judges,
    second=st.none() | st.builds(Extra, folder=texts),
    names=st.lists(texts, max_size=3).map(tuple),
    loud=st.booleans(),
    how=st.sampled_from(["fast", "slow"]),
    more=st.dictionaries(
        texts, plain | st.lists(plain, max_size=2) | st.dictionaries(texts, plain, max_size=2), max_size=3
    ),
)


class Place(Spec):
    host: str = "here"
    port: Annotated[int, Meta(ge=1, le=9)] | None = None
    share: NotNegative = 0.5


class Served(Spec):
    place: Place = Place(host="there")
    name: Positional[str] = ""
    most: Annotated[int, Meta(ge=2)] | None = None
    needed: Extra


def test_a_table_given_in_part_keeps_the_rest_of_its_default() -> None:
    given = Layer(name="you", table=expand(Served, {"port": 3, "needed": "x"}, "you"), asked=True)
    assert resolve(Served, [given]).spec == Served(place=Place(host="there", port=3), needed=Extra(folder="x"))
    assert settings_of(Served)["place.host"].default == "there"
    # a path stands for what its text does
    assert expand(Served, {"needed": Path("x")}, "you") == expand(Served, {"needed": "x"}, "you")
    # of a table that is not there, what it must be given
    with pytest.raises(SettingsError, match=r"needed\.folder must be given"):
        resolve(Served, [])


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [
        ("most", "1", "of at least 2"),
        ("place.port", "0", "at least 1"),
        ("place.port", "10", "of at most 9"),
        ("place.share", "-1", "at least 0"),
        ("place.share", "inf", "a finite number"),
    ],
)
def test_notes_give_numbers_a_range_also_in_a_union(name: str, word: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_word(settings_of(Served)[name], [word], "--x")
    table: dict[str, Any] = {"needed": {"folder": "x"}}
    put(table, name, float(word) if "share" in name else int(word))
    with pytest.raises(SettingsError, match=f"f: {name.removeprefix('place.')} is .*{said}"):
        read(Served, table, "f")


class Unranged(Spec):
    maybe: float | None = None
    pair: tuple[float | None, float] = (0.0, 1.0)


@pytest.mark.parametrize("table", [{"maybe": float("inf")}, {"maybe": 10**400}, {"pair": [float("nan"), 1.0]}])
def test_numbers_without_a_range_are_finite(table: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"f: {next(iter(table))} is .* a finite number"):
        read(Unranged, table, "f")


def test_none_in_a_list_is_read_as_it_is_written() -> None:
    assert read_word(settings_of(Unranged)["pair"], ["none", "-.5"], "--pair") == (None, -0.5)
    written = tomllib.loads(to_toml(to_table(Unranged(pair=(None, 0.5)))))
    assert read(Unranged, written, "f") == Unranged(pair=(None, 0.5))


def test_numpys_numbers_are_numbers() -> None:
    table = {"maybe": np.float32(0.5), "pair": (np.float64(0.25), np.int64(1))}
    assert read(Unranged, table, "f") == Unranged(maybe=0.5, pair=(0.25, 1.0))


class Free(Spec):
    of: dict[str, Any]


def test_numpys_numbers_are_numbers_in_a_table_of_any_keys() -> None:
    given = checked(Free(of={"count": np.int64(2), "list": [np.bool_(True)], "made": dict}))
    assert to_table(given) == {"of": {"count": 2, "list": [True], "made": "builtins:dict"}}


def test_a_setting_may_be_a_word() -> None:
    assert [one.name for one in settings_of(Served).values() if one.positional] == ["name"]


class Needy(Spec):
    host: str = ""
    port: int = 1
    names: tuple[str, ...] = ()

    def unread(self) -> Unread:
        if not self.host:
            yield from needing("--host", "port", "names")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unranged(maybe="1"),  # type: ignore[arg-type]
        lambda: Unranged(pair=(1.0,)),  # type: ignore[arg-type]
        lambda: changed(Unranged(), maybe=math.nan),
        lambda: changed(Needy(host="h"), port="1"),
        lambda: checked(Needy(port=2)),
    ],
)
def test_settings_made_in_python_are_read_by_their_type(make: Callable[[], Any]) -> None:
    with pytest.raises(SettingsError, match=r"^(Unranged|Needy): (maybe|pair|port) is "):
        make()


def test_settings_made_in_python_stay_as_they_are() -> None:
    assert to_table(checked(Needy(host="h", port=2, names=("a",)))) == {"host": "h", "port": 2, "names": ("a",)}
    assert pickle.loads(pickle.dumps(Unranged(maybe=0.5))) == changed(Unranged(), maybe=0.5)
    with pytest.raises(SettingsError, match="Needy: there is no setting 'prot'"):
        Needy(prot=2)  # type: ignore[call-arg]


def test_the_field_of_a_dataclass_is_no_default() -> None:
    with pytest.raises(SettingsError, match="Listed: names"):
        type(Spec)("Listed", (Spec,), {"__annotations__": {"names": list}, "names": dataclasses.field()})


class Above(Spec):
    on: bool = True
    needy: Needy = Needy()
    extra: Extra | None = None

    def unread(self) -> Unread:
        if not self.on:
            yield from needing("--on", "needy", "extra")


def test_what_nothing_reads_is_refused_where_it_is_asked_for_and_else_left_out() -> None:
    def found(asked: bool, **table: Any) -> Above:
        return resolve(Above, [Layer(name="you", table=table, asked=asked)]).spec

    assert found(True, needy={"host": "a", "port": 2}).needy.port == 2
    # a default that is given changes nothing
    assert found(True, needy={"port": 1}) == Above()
    with pytest.raises(SettingsError, match=r"^you: port is 2; it needs --host, without which nothing reads it$"):
        found(True, needy={"port": 2})
    assert found(False, needy={"port": 2}) == Above()
    # and of a table that needs what was left out nothing is left
    assert found(False, on=False, extra={"folder": "x"}) == Above(on=False)
    # the class of a table may say it of the whole table
    with pytest.raises(SettingsError, match=r"^you: host is 'a'; it needs --on"):
        found(True, on=False, needy={"host": "a"})
    with pytest.raises(SettingsError) as caught:
        found(True, needy={"names": ["https://me:secret@host/", "word " * 99]})
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 130


@given(runs)
def test_toml_and_json_give_the_same_value_back(value: Run) -> None:
    assert read(Run, json.loads(json.dumps(to_table(value))), "f") == value
    text = to_toml(value, {"env.id": "who", "judge.kind": "a # b"})
    again = read(Run, expand(Run, toml_of(text), "f"), "f")
    assert again == value
    assert to_toml(again).encode() == to_toml(value).encode()
    assert content_hash(to_table(again)) == content_hash(to_table(value))


def test_a_record_read_back_is_what_was_asked_for_and_what_follows_no_longer() -> None:
    usual = Layer(name="usual", table={"loud": True, "judge": {"kind": "rules"}})

    def resolved(table: Mapping[str, Any]) -> Resolved[Run]:
        given = [Layer(name="people", table=table, asked=True)]
        return asked_in(resolve(Run, [usual, *given]), given)

    def again(table: Mapping[str, Any]) -> Run:
        return resolved(table).spec

    first = resolved({"env": {"id": "a"}})
    assert first.asked == {"env": {"id": "a"}}
    record = toml_of(whole_toml(first))
    assert read_back(record, again) == first.asked
    # another version was not loud, and opening found out which one it is
    record["loud"], record["env"]["id"] = False, "a:found"
    record["provenance"]["found"] = ["env.id"]
    assert read_back(record, again) == {"env": {"id": "a:found"}, "loud": False}
    assert read_back(record, again, ["how"]) == {"env": {"id": "a"}, "loud": False}
    assert read_back(record, again, ["env.id"]) == {"env": {"id": "a"}, "loud": False}
    assert read_back(record, again, ["judge.votes"]) == {"env": {"id": "a:found"}, "loud": False}
    del record["provenance"]
    assert read_back(record, again) == record
