"""A chat template that comes with a model costs no more than it may, in its first conversation and in any later one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML

from turngym.agents.rendering import template_limits
from turngym.agents.rendering.chat_template import ChatTemplate, RenderError, TemplateCostError
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.template_limits import TRUSTED, TemplateLimit

LOOP = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- set c = a -%}{%- endfor -%}{%- endfor -%}"
DOUBLING = (
    "{%- set ns = namespace(s='aaaaaaaa') -%}{%- for i in range(60) -%}{%- set ns.s = ns.s ~ ns.s -%}{%- endfor -%}"
)
POWER = "{%- set x = (7 + messages|length) ** (3 ** 21) -%}"
"""One instruction of C, which no signal of Python interrupts."""
WRITING = "{%- for m in messages -%}{{- m.role * 9000 -}}{%- endfor -%}"
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I do"}] * 16


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    monkeypatch.setattr(template_limits, "MEMORY", 100 << 20)
    monkeypatch.setattr(template_limits, "LONGEST_RENDERED", 30_000)


MANY = "(messages|length * 99999999)"
# what holds constants alone is computed when the template is read
HOSTILE = [
    pytest.param(LOOP, "took too much time", id="loop", marks=pytest.mark.long),
    pytest.param(POWER, "took too much time", id="power", marks=pytest.mark.long),
    pytest.param(DOUBLING, "took too much memory", id="doubling", marks=pytest.mark.long),
    pytest.param("{%- set s = 'a' * MANY -%}", "took too much memory", id="text", marks=pytest.mark.long),
    pytest.param("{%- set s = [1] * MANY -%}", "took too much memory", id="list", marks=pytest.mark.long),
    pytest.param("{%- set s = 'a'|center(MANY) -%}", "took too much memory", id="center", marks=pytest.mark.long),
    pytest.param("{%- set s = 'a'.ljust(MANY) -%}", "took too much memory", id="method", marks=pytest.mark.long),
    pytest.param("{%- set s = lipsum(n=MANY) -%}", "took too much (time|memory)", id="lipsum", marks=pytest.mark.long),
    pytest.param("{{- 'a' * 40000 -}}", "made too long a text", id="constant"),
    pytest.param(WRITING, "made too long a text", id="writing", marks=pytest.mark.long),
]
COMPILED = "{%- set x = 7 ** (3 ** 21) -%}"
WHAT_IS_ALLOWED = "; one conversation may take 1 s of processor time, 100 MiB and 30,000 characters$"


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(("hostile", "said"), HOSTILE)
def test_a_template_that_waits_for_the_real_conversation(hostile: str, said: str, make_tokenizer: Any) -> None:
    """It may know every conversation that it is tried with: the limits hold in the real one, and the next goes on."""
    late = "{%- if messages[0].content == 'hello' -%}" + hostile.replace("MANY", MANY) + "{%- endif -%}" + CHATML
    renderer = ChatRenderer(make_tokenizer(late))
    with pytest.raises(TemplateCostError, match=f"^the chat template of .* {said}{WHAT_IS_ALLOWED}"):
        renderer.template.render(TALK)
    assert renderer.template.render(TALK[1:3]).count("<|im_end|>") == 2


@pytest.mark.long
@pytest.mark.usefixtures("tight")
def test_a_template_that_is_costly_to_read(make_tokenizer: Any) -> None:
    with pytest.raises(TemplateCostError, match="took too much time"):
        ChatTemplate(make_tokenizer(CHATML + COMPILED))


@pytest.mark.usefixtures("tight")
@pytest.mark.long
def test_no_probe_takes_a_cost_for_a_refusal(make_tokenizer: Any) -> None:
    """Other forms would be tried after a refusal, at the same cost each."""
    tools = "{%- if messages|length > 2 -%}" + DOUBLING + "{%- endif -%}" + CHATML
    with pytest.raises(TemplateCostError, match="took too much memory"):
        ChatRenderer(make_tokenizer(tools))


def test_the_file_is_named(tmp_path: Path, make_tokenizer: Any, tight: None) -> None:
    tokenizer = make_tokenizer(WRITING + CHATML)
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    with pytest.raises(TemplateCostError, match=rf"the chat template in {tmp_path}/\w+\.\w+ made too long"):
        ChatTemplate(tokenizer)


def test_what_is_rendered_there_is_what_is_rendered_here(make_tokenizer: Any) -> None:
    """Real families, control characters, half a surrogate pair, hidden tokens."""
    families = list((Path(__file__).parents[1] / "support" / "families").glob("*.jinja"))
    assert len(families) >= 15
    odd = "a\x00b \ud83d \ude00 \ufdd0 <|im_end|> <s> {{ 7 }} é\r\n"
    talk = [{"role": "user", "content": odd}, {"role": "assistant", "content": f"x {odd}"}]
    for path in families:
        tokenizer = make_tokenizer(path.read_text(encoding="utf-8"))
        try:
            template = ChatTemplate(tokenizer)
        except RenderError:
            continue
        there = template.render(talk), template.render(talk[:1], generate=False)
        TRUSTED.add(template.source)
        try:
            assert (template.render(talk), template.render(talk[:1], generate=False)) == there, path.name
        finally:
            TRUSTED.discard(template.source)


def test_a_refusal_is_one_that_another_form_may_avoid(make_tokenizer: Any) -> None:
    template = ChatTemplate(
        make_tokenizer("{%- if messages|length > 9 %}{{ raise_exception('no' * 999) }}{% endif -%}" + CHATML)
    )
    with pytest.raises(RenderError, match=r"refuses the roles user, .*: (no){200,250}n?\.\.\.$"):
        template.render(TALK)
    with pytest.raises(RenderError, match="Encountered unknown tag"):
        ChatTemplate(make_tokenizer("{% nothing %}"))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_somebody_ended_or_stopped_is_replaced(
    number: signal.Signals, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(make_tokenizer(CHATML))
    before = template.render(TALK)
    # a new one takes a second to start and answers by the same clock
    monkeypatch.setattr(template_limits, "SECONDS", 2.0)
    assert template_limits._process._child is not None
    os.kill(template_limits._process._child.pid, number)
    assert template.render(TALK) == before
    long = [{"role": "user", "content": "x" * 1_000_000}]
    os.kill(template_limits._process._child.pid, number)
    assert "x" * 1_000_000 in template.render(long)


def test_threads_get_their_own_answers(make_tokenizer: Any) -> None:
    template = ChatTemplate(make_tokenizer(CHATML))
    wrong = []

    def ask(name: str) -> None:
        for number in range(30):
            text = f"{name} {number}"
            if text not in template.render([{"role": "user", "content": text}]):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(f"thread{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.long
def test_a_forked_process_has_one_of_its_own(make_tokenizer: Any) -> None:
    template = ChatTemplate(make_tokenizer(CHATML))
    template.render(TALK)
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            theirs.send(template.render([{"role": "user", "content": "forked"}]))
        finally:
            os._exit(0)
    assert "mine" in template.render([{"role": "user", "content": "mine"}])
    assert ours.poll(60)
    assert "forked" in ours.recv()
    os.waitpid(child, 0)
    assert template.render(TALK).count("hello") == 16


def test_a_process_that_cannot_start_is_said(make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_process", template_limits._Process())
    monkeypatch.setattr(template_limits, "_serve", os._exit)
    with pytest.raises((TemplateLimit, TemplateCostError), match="cannot be rendered"):
        ChatTemplate(make_tokenizer(CHATML))
