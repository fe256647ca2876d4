"""The reader of every verb's command line, on a verb of this test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from turngym.core.errors import TurngymError
from turngym.core.nested import KIND
from turngym.core.numbers import Number
from turngym.core.setting import Positional
from turngym.core.spec import Spec
from turngym.scripts.main import main
from turngym.scripts.options import read_options, run_verb


class Way(Spec, tag_field=KIND):
    """How."""


class Near(Way, tag="near"):
    """On foot."""


class Far(Way, tag="far"):
    """By train."""

    stops: Annotated[int, Meta(ge=1, le=9)] = 3
    """Stops on the way."""


class Bag(Spec):
    size: Number = 1
    color: str = "red"
    """Its color. Others are brown."""


class GoOut(Spec):
    """Go out with files."""

    files: Positional[tuple[Path, ...]]
    """What is taken along."""
    out: Path | None = None
    """Where to. By default nowhere."""
    tag: tuple[str, ...] = ()
    """Tags."""
    loud: bool = True
    """Whether it is heard."""
    way: Near | Far = Near()
    """The way."""
    bag: Bag = Bag(size=7)
    pace: Literal["slow", "fast"] = "slow"


def read(*words: str, **more: Any) -> GoOut:
    return read_options(GoOut, words, prog="turngym go", about="Go.", **more)


FILES = (Path("a"), Path("b"))


def test_words_become_settings() -> None:
    assert read("a", "b") == GoOut(files=FILES)
    assert read("a", "--no-loud", "b", "--pace=fast") == GoOut(files=FILES, loud=False, pace="fast")
    assert read("a", "b", "--loud", "off", "--way", "far", "--stops", "4").way == Far(stops=4)
    # a table in part keeps the rest of its default
    assert read("a", "--color", "blue").bag == read("a", "--bag.color", "blue").bag == Bag(size=7, color="blue")
    assert read("a", "--out", "~/x").out == Path("~/x").expanduser()
    assert read("a", "--out", "none").out is None
    below = {"pace": "fast", "bag": {"size": 2}}
    assert read("a", "--color", "blue", below=below) == GoOut(
        files=FILES[:1], pace="fast", bag=Bag(size=2, color="blue")
    )


def test_a_list_takes_one_word_until_the_files_have_come() -> None:
    assert read("--tag", "x", "a", "b") == GoOut(files=FILES, tag=("x",))
    assert read("a", "b", "--tag", "x", "y") == GoOut(files=FILES, tag=("x", "y"))
    assert read("--tag", "x", "a", "--tag=--y", "--tag", "-1", "z").tag == ("x", "--y", "-1", "z")
    # a switch takes on and off, and no file
    assert read("--loud", "a", "b") == GoOut(files=FILES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "FILES must be given"),
        ("a --tga x", "there is no option --tga. Did you mean '--tag'"),
        ("a --pace fats", "--pace is 'fats'; valid: slow, fast. Did you mean 'fast'"),
        ("a --pace", "--pace needs a value"),
        ("a --pace slow --pace fast", "--pace is given twice (slow fast); valid: once"),
        ("a --way far --stops 10", "--stops is '10'; valid: a whole number of at most 9"),
        ("a --way near --stops 4", "stops is a setting of way = far; way is near"),
        ("a --size -1", "--size is '-1'; valid: a whole number of at least 0"),
        ("a --config", "--config needs a value"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, said: str) -> None:
    with pytest.raises(TurngymError) as caught:
        read(*words.split())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_stand_on_top_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "go.toml"
    file.write_text('files = ["a", "b"]\npace = "fast"\ncolor = "blue"\n')
    assert read("--config", str(file)) == GoOut(files=FILES, pace="fast", bag=Bag(size=7, color="blue"))
    assert read(f"--config={file}", "--pace", "slow").pace == "slow"
    for line, said in (("size = -1", "go.toml: size is -1"), ("pase = 1", "go.toml: there is no setting 'pase'")):
        file.write_text(line)
        with pytest.raises(TurngymError, match=said):
            read("a", "--config", str(file))
    file.write_text('color = "http://me:secret@host/"')
    with pytest.raises(TurngymError, match="color is") as caught:
        read("a", "--config", str(file))
    assert "secret" not in str(caught.value)


def test_an_output_is_none_of_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    for words in ((str(tmp_path / "x"),), ("a", "--color", f"name={tmp_path / 'x'}")):
        with pytest.raises(TurngymError, match="kept as it is"):
            read(*words, "--out", str(tmp_path / "x"))


def test_help_has_first_sentences_and_help_all_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            read("a", option)
        assert ended.value.code == 0
        found.append(" ".join(capsys.readouterr().out.split()))
    for text in found:
        assert text.startswith("usage: turngym go FILES... [options] Go.")
        for part in (
            "--way The way",
            "(near, far)",
            "--stops 3 Stops on the way",
            "--size 7",
            "--loud (on)",
        ):
            assert part in text
    assert "[only for far]" in found[1]
    assert "[only for" not in found[0]
    assert "--color red Its color --" in found[0]
    assert "--color red Its color. Others are brown." in found[1]


def test_help_has_the_values_that_a_verb_takes_where_nobody_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "  --samples 4  " in capsys.readouterr().out


def test_the_first_word_names_one_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = {GoOut: lambda found: len(found.files)}
    assert run_verb(verbs, ["go-out", "a", "b"], prog="turngym x", about="Things.") == 2
    with pytest.raises(TurngymError, match=r"there is no verb 'go-uot'; valid: go-out\. Did you mean 'go-out'"):
        run_verb(verbs, ["go-uot"], prog="turngym x", about="Things.")
    for words, status in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            run_verb(verbs, words, prog="turngym x", about="Things.")
        assert ended.value.code == status
        assert "go-out" in capsys.readouterr().out
