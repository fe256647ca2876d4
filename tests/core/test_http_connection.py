"""Why a server was not reached, through which proxy it is asked, and how many connections a process may have."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import Answer, JsonServer

from turngym.core.clean_keys import clean_address, key_of
from turngym.core.errors import AgentError, TurngymError
from turngym.core.http_client import HttpClient, HttpReply, LoopThread, NotReached, retry_after
from turngym.core.http_connection import Unreachable, certificates, connections, proxy_of

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def get(url: str) -> HttpReply:
    loop, http = LoopThread("test"), HttpClient(use_proxies=True, connect=2.0)
    try:
        return loop.run(http.send("GET", url, seconds=5.0, limit=1000))
    finally:
        loop.run(http.close())
        loop.close()


def why(url: str) -> tuple[str, str]:
    """(cause, text) of a request that does not arrive."""
    with pytest.raises(NotReached) as caught:
        get(url)
    assert "\n" not in str(caught.value)
    return caught.value.cause, str(caught.value)


@contextmanager
def free_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one.getsockname()[1]


@pytest.fixture
def plain() -> Iterator[str]:
    """A server that speaks HTTP."""
    server = JsonServer(lambda path, body, headers: Answer({"path": path}))
    yield server.url
    server.stop()


def test_causes(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with free_port() as port:
        assert why(f"http://127.0.0.1:{port}/") == (
            "refused",
            f"nothing listens at 127.0.0.1:{port} (connection refused)",
        )
    cause, text = why(plain.replace("http:", "https:"))
    assert cause == "scheme"
    assert "does not speak TLS" in text

    def unknown(*args: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert why("http://no.such.host.example/") == ("host", "there is no host 'no.such.host.example'")


def test_a_certificate_that_nobody_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [*("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost")]
    made += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl to make a certificate with")
    server = JsonServer(lambda path, body, headers: Answer({}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
    try:
        url = server.url.replace("http:", "https:")
        cause, text = why(url)
        assert cause == "certificate"
        assert "SSL_CERT_FILE" in text
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem") + "\r")
        assert get(url).status == 200
        assert why(url.replace("https:", "http:"))[0] in ("scheme", "lost")
    finally:
        server.stop()
    for path in (tmp_path / "none.pem", tmp_path / "key.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        with pytest.raises(Unreachable, match=r"the variable SSL_CERT_FILE is .* holds no certificates"):
            certificates()


@pytest.mark.parametrize(
    ("variables", "url", "found"),
    [
        ({"HTTP_PROXY": "http://p:1"}, "http://h/v1", ("http://p:1", "HTTP_PROXY")),
        ({"HTTP_PROXY": "p:1"}, "http://h/v1", ("http://p:1", "HTTP_PROXY")),
        ({"HTTP_PROXY": "http://p:1"}, "https://h/v1", None),
        ({"HTTPS_PROXY": "http://p:1\r", "HTTP_PROXY": "http://q"}, "https://h", ("http://p:1", "HTTPS_PROXY")),
        ({"ALL_PROXY": "http://p:1"}, "https://h", ("http://p:1", "ALL_PROXY")),
        ({"http_proxy": "http://a", "HTTP_PROXY": "http://b"}, "http://h", ("http://a", "http_proxy")),
        *(
            ({"HTTP_PROXY": "http://p"}, f"http://{here}:80/", None)
            for here in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "llm.localhost.")
        ),
        *(
            ({"HTTP_PROXY": "http://p"}, f"http://{there}/", ("http://p", "HTTP_PROXY"))
            for there in ("localhost.org", "128.0.0.1", "[::2]")
        ),
        *(
            ({"HTTP_PROXY": "http://p", "NO_PROXY": but}, url, None)
            for but, url in (
                ("*", "http://h"),
                ("a, h", "http://h"),
                ("example.org", "http://llm.example.org"),
                (".example.org", "http://llm.example.org"),
                ("h:8000", "http://h:8000/v1"),
                ("10.0.0.0/8", "http://10.1.2.3/v1"),
                ("fd00::/8", "http://[fd00::1]/v1"),
                ("[fd00::1]", "http://[fd00::1]:8000/v1"),
                ("[fd00::1]:8000", "http://[fd00::1]:8000/v1"),
                ("fd00::1", "http://[fd00::1]/v1"),
            )
        ),
        *(
            ({"HTTP_PROXY": "http://p", "NO_PROXY": but}, url, ("http://p", "HTTP_PROXY"))
            for but, url in (
                ("", "http://h"),
                ("ample.org", "http://example.org"),
                ("h:8000", "http://h:80/v1"),
                ("fd00::/8,:,[", "http://[fe80::1]/v1"),
            )
        ),
    ],
)
def test_which_proxy(
    variables: dict[str, str], url: str, found: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_of(url)
    assert (None if proxy is None else (proxy.address, proxy.variable)) == found


@pytest.mark.parametrize("value", ["ftp://p", "http://p:x", "http://", "http://a b", "http://p:0", "http://[::1"])
def test_a_variable_that_names_no_proxy(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with pytest.raises(Unreachable, match="the variable ALL_PROXY"):
        proxy_of("https://h")
    cause, text = why("http://h.example/")
    assert (cause, "ALL_PROXY" in text) == ("proxy", True)


def test_a_proxy_is_named_where_it_fails(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with free_port() as port:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:sesame-sesame-sesame@127.0.0.1:{port}")
        cause, text = why("http://llm.example/v1")
        assert cause == "proxy"
        assert f"nothing listens at 127.0.0.1:{port}" in text
        assert "HTTP_PROXY" in text
        assert "sesame" not in text
        # this machine is reached without it
        assert get(plain).proxy is None
    monkeypatch.setenv("HTTP_PROXY", plain)
    found = get("http://llm.example/v1")
    assert (found.status, found.proxy) == (200, "HTTP_PROXY")


def test_the_limit_of_open_files_bounds_connections() -> None:
    """In a process of its own: a limit that was lowered does not come back."""
    pytest.importorskip("resource", reason="Windows has no such limit")
    code = (
        "import resource\nfrom turngym.core.http_connection import SPARE_DESCRIPTORS, connections\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 300))\n"
        "print(connections(100), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "print(connections(100), connections(1), connections(10**6))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole, raised, bounded, one, many = map(int, run.stdout.split())
    assert whole == 100
    assert 100 < raised < 300
    assert 1 < bounded < 64
    assert (one, many) == (1, bounded)
    assert connections(3) == 3


@pytest.mark.parametrize("end", ["", "\n", "\r", "\r\n", " "])
def test_every_key_and_address_is_cleaned(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"sk-0123456789{end}")
    assert key_of("SOME_KEY") == "sk-0123456789"
    assert clean_address("--base-url", f"http://h/v1{end}") == "http://h/v1"
    assert key_of("NO_SUCH_KEY") == ""


@pytest.mark.parametrize("value", ["sk-ü", "sk a", "sk\na", '"sk-1"', "'sk-1'", "\ufeffsk-1"])
def test_a_key_that_is_none_is_named_by_its_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(AgentError, match="the environment variable SOME_KEY holds no key") as caught:
        key_of("SOME_KEY", AgentError)
    assert value not in str(caught.value)


def test_an_address_that_is_none_is_named_by_its_source() -> None:
    with pytest.raises(AgentError, match=r"the variable X .* holds a blank"):
        clean_address("the variable X", "http://a b/v1", AgentError)
    with pytest.raises(TurngymError, match="an address with a user or a password"):
        clean_address("X", "http://a:b@h")


@pytest.mark.parametrize(
    "given",
    ["1e300", "99999999", "Fri, 31 Dec 9999 23:59:59 GMT", "Wed, 21 Oct 0001 07:28:10", "Mon, 01 Jan 99999 0:0"],
)
def test_a_wait_that_no_server_means_holds_nobody(given: str) -> None:
    assert retry_after({"retry-after": given}) in (None, 0.0)
