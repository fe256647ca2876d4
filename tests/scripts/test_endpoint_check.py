"""`turngym endpoint check`: a table of what a server takes and answers, or one line that says what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from eight_servers import SERVERS
from openai_fake import FakeOpenAI, Fault, served

from turngym.scripts.main import main


@pytest.fixture
def ollama(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAI]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with served(SERVERS["ollama"].fake()) as fake:
        yield fake


def check(fake: FakeOpenAI, *words: str) -> int:
    return main(["endpoint", "check", fake.url, "--model", "tiny", *words])


def test_the_table(ollama: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ollama, "--channel", "tool") == 0
    said = capsys.readouterr()
    table = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in said.out.splitlines() if "│" in line}
    assert table["limit of tokens"] == "max_tokens"
    assert table["calls come"] == "parsed"
    assert table["reasoning comes in"] == "reasoning"
    assert table["takes a temperature"] == "yes"
    assert len(ollama.requests) == 2


@pytest.mark.parametrize(
    ("words", "name", "sent"),
    [
        (("--temperature", "0.3"), "temperature", 0.3),
        (("--max-new-tokens", "77"), "max_tokens", 77),
        (("--extra-body", '{"top_p": 0.9}'), "top_p", 0.9),
        (("--thinking", "off"), "chat_template_kwargs", {"enable_thinking": False}),
        (("--channel", "text"), "tools", None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*thoughts though switched off")
def test_options_are_of_the_request(ollama: FakeOpenAI, words: tuple[str, ...], name: str, sent: Any) -> None:
    assert check(ollama, *words) == 0
    assert ollama.requests[0].get(name) == sent


def test_the_tool_is_the_environments(ollama: FakeOpenAI) -> None:
    names = []
    for env in ("turngym/ALFWorld-v0", "turngym/Search-v0"):
        assert check(ollama, "--channel", "tool", "--env", env) == 0
        names.append(ollama.requests[-1]["tools"][0]["function"]["name"])
    assert names == ["alfworld_step", "search"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--token-ids",), "leave out --token-ids"),
        (("--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY"),
        (("--request-deadline", "0.3"), "no answer within 0.3 s"),
    ],
)
def test_what_cannot_be_is_one_line(
    ollama: FakeOpenAI, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--request-deadline" in words:
        ollama.fault = lambda number, body: Fault(drip=5.0)
    assert check(ollama, *words) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert len(err.splitlines()) == 1
