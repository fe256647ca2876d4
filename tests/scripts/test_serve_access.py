"""Which Host and Origin a server on this machine answers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from turngym.agents.request_origin import Access, is_loopback
from turngym.agents.serving import access_of
from turngym.core.errors import TurngymError

AGENTS = Path(__file__).parents[2] / "agents"
HERE = Access(host="127.0.0.1")
BEHIND = Access(host="127.0.0.1", names=("shop.example.org",))


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST:8080", "localhost", "[::1]:9", "127.8.9.1"]
)
def test_names_of_this_machine(host: str) -> None:
    assert HERE.refusal(host, None) is None
    assert HERE.refusal(host, f"http://{host}") is None


@pytest.mark.parametrize(
    "host",
    [
        *("rebound.example", "rebound.example:8080", "localhost.rebound.example", "127.0.0.1.rebound.example"),
        *("192.168.1.5:8080", "0.0.0.0", "x@localhost", "localhost:8080@rebound.example", "localhost, localhost"),
        *("", None, "localhost:port", "[::1", "[::1]x", "localhost/../x", "loc\u0430lhost"),
    ],
)
def test_other_names(host: str | None) -> None:
    said = HERE.refusal(host, None)
    assert said is not None
    assert "the header Host is" in said
    assert said.isascii()
    assert len(said) < 300


def test_a_long_name_is_not_repeated() -> None:
    assert "the header Host is 5000 characters long" in str(HERE.refusal("x" * 5000, None))


@pytest.mark.parametrize("name", ["request_origin.py", "servers/guarded_server.py", "servers/sglang_cpu.py"])
def test_what_a_servers_own_python_loads_needs_nothing_of_turngym(name: str) -> None:
    tree = ast.parse((AGENTS / name).read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [one.name for node in wanted for one in node.names] + [getattr(node, "module", "") for node in wanted]
    assert not [one for one in names if one.startswith("turngym")]


@pytest.mark.parametrize(
    "origin",
    ["null", "", "https://elsewhere.example", "http://localhost:9999", "http://127.0.0.1", "file://localhost:8080"],
)
def test_pages_of_other_sites(origin: str) -> None:
    said = HERE.refusal("localhost:8080", origin)
    assert said is not None
    assert "the header Origin is" in said


def test_behind_a_reverse_proxy() -> None:
    assert BEHIND.refusal("shop.example.org", "https://shop.example.org") is None
    assert BEHIND.refusal("127.0.0.1:3000", "https://shop.example.org") is None
    assert BEHIND.refusal("shop.example.org", "https://other.example.org") is not None
    assert BEHIND.refusal("other.example.org", None) is not None
    with pytest.raises(TurngymError, match="is no name of a machine"):
        access_of("127.0.0.1", ("https://shop.example.org",))


def test_elsewhere_than_on_loopback_names_are_free_unless_they_are_given() -> None:
    assert Access(host="0.0.0.0").refusal("anything", "https://elsewhere.example") is None
    named = Access(host="0.0.0.0", names=("gpu7",))
    assert named.refusal("gpu7:8080", None) is None
    assert named.refusal("gpu8:8080", None) is not None


def test_what_loopback_is() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.5.5.5")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
