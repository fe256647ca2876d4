"""Which path a text means, and text files as editors of all systems write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turngym.core.errors import TurngymError
from turngym.core.user_files import (
    json_file,
    json_of,
    keep_inputs,
    must_be_new,
    must_end,
    named_path,
    read_text,
    text_lines,
    user_path,
)

SIGNS = "a b=c:d,e@f#[g]{h}'\"$*?%!;&|<>()^`\\ü\n-~"


def test_a_path_that_is_there_is_a_path_whatever_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (SIGNS, "x=y", "lr=1=2", "~here", os.fsdecode(b"raw\xff=")):
        Path(name).mkdir()
        assert named_path(name) == ("", Path(name))
        assert named_path(f"label={name}") == ("label", Path(name))
    assert named_path("y") == ("", Path("y"))
    assert named_path("lr=0.1=x=y") == ("lr=0.1", Path("x=y"))
    assert named_path("lr=0.1=nowhere") == ("lr=0.1", Path("nowhere"))


def test_a_home_folder_is_meant_where_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert user_path("~/x") == Path("/home/of/mine/x")
    assert user_path("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    assert user_path("./~/x") == Path("~/x")
    # a container's user without a name
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for text in ("~", "~/x"):
        with pytest.raises(TurngymError, match="set HOME"):
            user_path(text)
    (tmp_path / "~").mkdir()
    assert user_path("~") == Path("~")


@pytest.mark.parametrize("data", [b"a\nb\n", b"\xef\xbb\xbfa\nb\n", b"a\r\nb\r\n", b"\xef\xbb\xbfa\r\nb\r\n"])
def test_marks_and_line_ends_of_any_system(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(data)
    assert read_text(path, ValueError) == "a\nb\n"
    assert list(text_lines(path, ValueError)) == ["a\n", "b\n"]
    path.write_bytes(data.replace(b"a", b'["a",').replace(b"b", b'"b"]'))
    assert json_file(path, ValueError) == json_of(path.read_bytes()) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("a\nb\n".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("a\nb\n".encode("utf-16-le"), "line 1: a zero byte; it is no text, or UTF-16 text: save it as UTF-8"),
        ("a\nä\n".encode("latin-1"), "line 2: byte 0xe4 at column 1 is no UTF-8; save it as UTF-8"),
    ],
)
def test_other_encodings_are_refused_in_one_line(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(data)
    for read in (read_text, lambda path, error: list(text_lines(path, error))):
        with pytest.raises(ValueError, match="text") as caught:
            read(path, ValueError)  # type: ignore[operator]
        assert str(caught.value).removeprefix(str(path)).lstrip(" ,") == said
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        read_text(tmp_path / "none", ValueError)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        list(text_lines(tmp_path, ValueError))


def test_outputs_are_kept_from_their_inputs(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    source = folder / "in.txt"
    source.write_text("hours of work")
    other.write_text("else")
    (tmp_path / "soft").symlink_to(source)
    (tmp_path / "soft folder").symlink_to(folder)
    os.link(source, tmp_path / "hard")
    names = [source, tmp_path / "soft", tmp_path / "hard", tmp_path / "soft folder" / "in.txt"]
    for out in (*names, folder, tmp_path / "soft folder", folder / ".." / "folder", folder / "none" / ".." / "in.txt"):
        for name in names:
            # its content outlives the folder under its other name
            if out.is_dir() and name.name == "hard":
                keep_inputs(out, [name], KeyError)
                continue
            with pytest.raises(KeyError, match="kept as it is"):
                keep_inputs(out, [other, name], KeyError)
    for out in (other, tmp_path / "new", folder / "new"):
        keep_inputs(out, [*names, tmp_path / "none", "", "model:none", "x" * 5000, "a\0b"], KeyError)


def test_an_output_that_is_there_stands_beside_an_input_from_a_pipe(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("x")
    reading, writing = os.pipe()
    try:
        # what a shell makes of <(...): it opens, but its resolved name is none
        keep_inputs(out, [f"/dev/fd/{reading}"], KeyError)
    finally:
        os.close(reading)
        os.close(writing)


def test_names_in_another_letter_case_are_the_same_where_the_file_system_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "A.txt").unlink(missing_ok=True)
    same = lambda one, other: str(one).lower() == str(other).lower()  # noqa: E731
    monkeypatch.setattr(Path, "samefile", same)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(KeyError):
        keep_inputs(tmp_path / "A.txt", [tmp_path / "a.txt"], KeyError)


def test_a_name_does_not_say_another_kind_of_file() -> None:
    for name in ("a.svg", "a.SVG", "a"):
        must_end(Path(name), ".svg")
    with pytest.raises(TurngymError, match=r"a\.png; what is written ends in \.svg"):
        must_end(Path("a.png"), ".svg")


def test_nothing_is_replaced_without_a_word(tmp_path: Path) -> None:
    must_be_new(tmp_path / "new", KeyError)
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link", "none/../there"):
        with pytest.raises(KeyError, match="exists already"):
            must_be_new(tmp_path / name, KeyError)
