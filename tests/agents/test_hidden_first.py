"""Keys are hidden before anything is cut; what environments raise is a status; files of strangers keep to limits."""

from __future__ import annotations

import asyncio
import json
import lzma
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from servers import Answer, JsonServer

from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.gguf_model import check_lengths
from turngym.core.http_client import BadReply, HttpClient
from turngym.core.redaction import HeaderKeys
from turngym.trainers.adapters.openenv import MakesRoom

KEY = "sk-SECRETSECRETSECRETSECRETSECRET0123456789"


def echo(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
    """Repeats the key behind as many letters as the path says, in a body or in the address of a redirect."""
    _, kind, count = path.split("/")
    text = "x" * int(count) + headers["Authorization"].removeprefix("Bearer ")
    said = text.encode() if kind == "plain" else {"error": text, "content": [text]}
    return Answer(said, 302, {"Location": f"http://127.0.0.1/{text}"}) if kind == "redirect" else Answer(said)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = JsonServer(echo)
    yield server.url
    server.stop()


@pytest.mark.parametrize("kind", ["json", "plain", "redirect"])
def test_a_key_is_hidden_at_every_offset_of_every_cut(kind: str, url: str) -> None:
    async def ask() -> list[str]:
        client = HttpClient(headers={"Authorization": f"Bearer {KEY}"})
        said = []
        # messages are cut at 80, 100, 200 and 500 letters
        for count in [cut - offset for cut in (80, 100, 200, 500) for offset in range(0, len(KEY) + 2, 3)]:
            try:
                reply = await client.send("POST", f"{url}/{kind}/{count}", {}, seconds=20, limit=10_000)
                said += [reply.text(500), reply.text(200), reply.body.decode(), str(reply.json())]
            except BadReply as error:
                said.append(str(error))
        await client.close()
        return said

    said = asyncio.run(ask())
    assert len(said) >= 60
    assert not [text for text in said if "SECRET" in text]
    assert all("***" in text or "x" * 80 in text for text in said)


@pytest.mark.parametrize("key", ["test", "EMPTY", "k"])
def test_a_short_key_is_hidden_where_it_stands_alone(key: str) -> None:
    said = HeaderKeys([f"Bearer {key}"]).hidden(f"a{key}b {key}. latest".encode()).decode()
    assert said == (f"a{key}b ***. latest" if len(key) > 3 else f"a{key}b {key}. latest")


def test_what_a_model_answers_keeps_its_words(url: str) -> None:
    async def ask() -> str:
        client = HttpClient(headers={"Authorization": "Bearer EMPTY"})
        reply = await client.send("POST", f"{url}/json/0", {}, seconds=20, limit=10_000)
        await client.close()
        return reply.body.decode()

    assert json.loads(asyncio.run(ask()))["content"] == ["EMPTY"]


def test_a_small_result_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.result.xz"
    many, long = b'{"x":[' + b"[]," * 3_000_000 + b"[]]}", b'"' + b"a" * (1 << 26) + b'"'
    for content in (many, long, b"[1]\n" + b"[" * 40_000_000):
        path.write_bytes(lzma.compress(content, preset=0))
        with pytest.raises(EvaluationError, match=r"line \d+ has more than"):
            read_result(path)


def gguf(kind: int, *numbers: tuple[str, int], tensors: int = 0, keys: int = 1) -> bytes:
    name = b"general.x"
    head = b"GGUF" + struct.pack("<IQQQ", 3, tensors, keys, len(name)) + name + struct.pack("<I", kind)
    return head + b"".join(struct.pack(form, number) for form, number in numbers)


LIES = {
    "2^26 numbers in 60 bytes": gguf(9, ("<I", 0), ("<Q", 1 << 22)),
    "2^40 numbers": gguf(9, ("<I", 0), ("<Q", 1 << 40)),
    "2^40 texts": gguf(9, ("<I", 8), ("<Q", 1 << 40)),
    "a text of 2^60 letters": gguf(8, ("<Q", 1 << 60)),
    "an array of arrays": gguf(9, ("<I", 9), ("<Q", 1)),
    "2^40 settings": gguf(0, keys=1 << 40),
    "2^40 tensors": gguf(0, tensors=1 << 40),
    "cut": gguf(8)[:-2],
    "another file": b"PK\x03\x04",
}


@pytest.mark.parametrize("kind", LIES)
def test_the_lengths_of_a_gguf_file_are_not_believed(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(LIES[kind])
    with pytest.raises(ValueError, match=r"declares|ends inside|does not begin"):
        check_lengths(tmp_path / "a.gguf")


class Sockets:
    """Clients of an application that ends when its client does."""

    def __init__(self, most: int, **limits: float) -> None:
        self.ended: list[int] = []
        self.room = MakesRoom(self.app, most=most, **limits)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        self.ended.append(scope["number"])

    def connect(self, number: int) -> tuple[asyncio.Task[None], asyncio.Queue[Any]]:
        said: asyncio.Queue[Any] = asyncio.Queue()

        async def send(message: Any) -> None: ...

        scope = {"type": "websocket", "number": number}
        return asyncio.ensure_future(self.room(scope, said.get, send)), said


def test_who_is_silent_longest_makes_room_for_a_new_client() -> None:
    async def run() -> list[int]:
        sockets = Sockets(2, silent=0.2, idle=60.0)
        first = [sockets.connect(number) for number in range(2)]
        await asyncio.sleep(0.3)
        first[0][1].put_nowait({"type": "websocket.receive"})
        await asyncio.sleep(0.05)
        third = sockets.connect(2)
        await asyncio.sleep(0.2)
        ended = list(sockets.ended)
        for task, _ in (*first, third):
            task.cancel()
        return ended

    assert asyncio.run(run()) == [1]


def test_who_is_active_keeps_the_place_and_silence_ends() -> None:
    async def run() -> tuple[list[int], list[int]]:
        sockets = Sockets(1, silent=60.0, idle=1.0)
        one, two = sockets.connect(0), sockets.connect(1)
        await asyncio.sleep(0.1)
        early = list(sockets.ended)
        await asyncio.wait([one[0], two[0]], timeout=60)
        return early, sorted(sockets.ended)

    assert asyncio.run(run()) == ([], [0, 1])
