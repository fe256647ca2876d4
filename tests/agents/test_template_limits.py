"""Chat templates that loop, fill the memory or never stop writing are refused, at once or when they do it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML

from turngym.agents.rendering import chat_template, template_limits
from turngym.agents.rendering.chat_template import RenderError
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.template_limits import rehearse

LOOP = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- set c = a -%}{%- endfor -%}{%- endfor -%}"
DOUBLING = (
    "{%- set ns = namespace(s='aaaaaaaa') -%}{%- for i in range(60) -%}{%- set ns.s = ns.s ~ ns.s -%}{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (LOOP, r"takes more than 1 s of processor time for a short conversation; it is not used"),
        (DOUBLING, r"takes more than 300 MiB for a short conversation"),
        ("{%- set s = 'a' * 99999999999 -%}", "takes more than 300 MiB"),
        ("{%- if tools -%}" + LOOP + "{%- endif -%}", "of processor time"),
        ("{%- for m in messages -%}{{- m.role * 1000 -}}{%- endfor -%}", "makes more than 3,000 characters"),
    ],
)
def test_what_costs_too_much_is_refused_before_it_is_used(
    hostile: str, said: str, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 1)
    monkeypatch.setattr(template_limits, "MEMORY", 300 << 20)
    monkeypatch.setattr(template_limits, "LONGEST", 3000)
    with pytest.raises(RenderError, match=said):
        ChatRenderer(make_tokenizer(hostile + CHATML))


def test_real_families_cost_little() -> None:
    families = list((Path(__file__).parents[1] / "support" / "families").glob("*.jinja"))
    assert len(families) >= 15
    for path in families:
        rehearse(path.read_text(encoding="utf-8"))
    rehearse("{% generation %}x{% endgeneration %}{{ raise_exception('never') }}")
    rehearse("{% for %}")  # what cannot be read is refused where it is used


def test_a_template_that_loops_later_is_stopped(make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(make_tokenizer("{%- if messages|length > 30 -%}" + LOOP + "{%- endif -%}" + CHATML))
    for module in (template_limits, chat_template):
        monkeypatch.setattr(module, "SECONDS", 0.5)
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 16
    began = time.monotonic()
    with pytest.raises(RenderError, match=r"took more than 0.5 s to render"):
        renderer.template.render(talk)
    assert time.monotonic() - began < 60
    assert renderer.template.render(talk[:2]).count("<|im_end|>") == 2
    monkeypatch.setattr(chat_template, "LONGEST", 100)
    with pytest.raises(RenderError, match=r"made \d{3} characters; at most 100"):
        renderer.template.render([{"role": "user", "content": "x" * 100}])
