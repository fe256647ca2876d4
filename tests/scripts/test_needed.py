"""An option that nothing would read without another one is refused: every verb, every option that its classes name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

pytest.importorskip("torch", reason="the options of the proxy need turngym[train]")

from other_values import other_value

from turngym.core.needed import check_needed, needed_keys, needs_of
from turngym.core.settings import FLAT, Needs, SettingsError, inner_groups, settings_of
from turngym.scripts import command_line, options, serve
from turngym.scripts import main as command

VERBS = {"serve proxy": serve.VERBS["proxy"]}
"""Verbs whose classes say what their settings need. Other verbs refuse by type, or as an object is made (`ROWS`)."""
REQUIRED: Mapping[str, Any] = {"student": "x", "out": "x"}


class Seen(BaseException):
    """A verb has named its settings classes. Not an Exception, so that no verb catches it."""


def classes_of(verb: str, monkeypatch: pytest.MonkeyPatch) -> list[type[Any]]:
    """The settings classes that a verb reads from its command line."""
    found: list[type[Any]] = []

    def read(kind: Any, *_: Any, **__: Any) -> Any:
        found.extend(get_args(kind) or (kind,))
        raise Seen

    module = importlib.import_module(VERBS[verb])
    for place in (command_line, module):
        if hasattr(place, "read"):
            monkeypatch.setattr(place, "read", read)
    with pytest.raises(Seen):
        module.main([])
    monkeypatch.undo()
    return found


GIVEN: Mapping[str, Mapping[str, Any]] = {
    "--policy-server": {"policy_server": "http://127.0.0.1:1"},
    "--policy-server or --teacher-server": {"policy_server": "http://127.0.0.1:1"},
    "--weight-sync disk": {"policy_server": "http://127.0.0.1:1"},
    "--weight-sync gloo or nccl": {"policy_server": "http://127.0.0.1:1", "weight_sync": "gloo"},
    "to train (no --no-train)": {},
    "--staleness": {"staleness": 1},
    "a model that answers here (no --policy-server)": {},
    "--distill.form jsd or mixed": {"algorithm": "opd", "distill.form": "jsd"},
    "--distill.form sampled": {"algorithm": "opd", "distill.form": "sampled"},
    "a --distill.form other than sampled": {"algorithm": "opd", "distill.form": "jsd"},
    "--opd-hints.form sampled": {"algorithm": "opd-hints"},
    "--turnopd.adaptive-depth": {"algorithm": "turnopd"},
    "--turnopd.weight blend": {"algorithm": "turnopd"},
    "--turnopd.weight blend or turn": {"algorithm": "turnopd"},
    "--lora.rank": {"lora.rank": 4},
    "--wandb or --trackio": {"run.wandb": True},
    "a model as --judge": {"judge": "model:x"},
    "a url as --judge": {"judge": "http://127.0.0.1:1/v1"},
}
"""What must be given, as settings that give it."""
LACKING: Mapping[str, Mapping[str, Any]] = {
    "--policy-server": {"policy_server": ""},
    "--weight-sync disk": {"policy_server": "http://127.0.0.1:1", "weight_sync": "gloo"},
    "to train (no --no-train)": {"train": False},
    "a model that answers here (no --policy-server)": {"policy_server": "http://127.0.0.1:1"},
    "a --distill.form other than sampled": {"algorithm": "opd", "distill.form": "sampled"},
    "--opd-hints.form sampled": {"algorithm": "opd-hints", "opd_hints.form": "topk"},
    "--turnopd.adaptive-depth": {"algorithm": "turnopd", "turnopd.adaptive_depth": False},
    "--turnopd.weight blend": {"algorithm": "turnopd", "turnopd.weight": "turn"},
    "--turnopd.weight blend or turn": {"algorithm": "turnopd", "turnopd.weight": "trajectory"},
}
"""What must be given for the refusal, where the defaults are what is needed, or another need comes first."""
BESIDE: Mapping[str, dict[str, Any]] = {"run.reference_rate": {"run.reference_every": 1}, "executor": {"workers": 2}}
"""What settings that check themselves want beside them."""
NEVER = "an environment, as `turngym train` has one"


def blank(cls: type[Any]) -> Any:
    """An object of `cls` with its defaults, and something for what must be given."""
    groups = {name: inner for name, _, inner, default in inner_groups(cls) if default is MISSING}
    return cls(
        **{
            item.name: blank(groups[item.name]) if item.name in groups else typed(cls, item.name, REQUIRED[item.name])
            for item in fields(cls)
            if item.default is MISSING and item.default_factory is MISSING
        }
    )


def typed(cls: type[Any], name: str, value: Any) -> Any:
    """A value of a file as the field `name` of `cls` has it."""
    kinds = next(str(base.__annotations__[name]) for base in cls.__mro__ if name in base.__annotations__)
    if isinstance(value, list):
        return tuple(Path(item) if "Path" in kinds else item for item in value)
    return Path(value) if isinstance(value, str) and "Path" in kinds else value


def changed(settings: Any, more: Mapping[str, Any], table: str = "") -> Any:
    """`settings` with the values of the keys of `more` that it has."""
    new: dict[str, Any] = {}
    for name, below, _, _ in inner_groups(type(settings), table):
        new[name] = changed(getattr(settings, name), more, below)
    for item in fields(settings):
        key = f"{table}.{item.name}" if table else item.name
        if item.name not in new and key in more:
            new[item.name] = typed(type(settings), item.name, more[key])
    return replace(settings, **new)


def made(cls: type[Any], key: str, more: Mapping[str, Any]) -> Any:
    """Settings of `cls` with another value of `key`, and with `more`."""
    setting = next(item for item in settings_of(cls) if item.key == key)
    default, value = blank(cls), other_value(setting)
    beside: dict[str, Any] = BESIDE.get(key, {})
    if changed(default, {key: value, **beside}) == changed(default, beside):
        value = [value, value] if isinstance(value, list) else type(value)(value) * 2
    return changed(default, {**beside, key: value, **more})


def lacking(needed: str) -> dict[str, Any]:
    """Settings with which `needed` is not given."""
    if not needed.startswith("--algorithm "):
        return dict(LACKING.get(needed, {}))
    return {"algorithm": next(name for name in ("prm-rl", "opd", "turnopd") if name not in readers(needed))}


def giving(needed: str) -> dict[str, Any]:
    """Settings with which `needed` is given."""
    return {"algorithm": readers(needed)[0]} if needed.startswith("--algorithm ") else dict(GIVEN[needed])


def readers(needed: str) -> list[str]:
    return needed.removeprefix("--algorithm ").split(" or ")


@pytest.mark.parametrize("verb", VERBS)
def test_what_nothing_would_read_is_refused_in_one_line(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in classes_of(verb, monkeypatch):
        needs: dict[str, list[str]] = {}
        for key, needed in dict.fromkeys(needed_keys(cls)):
            needs.setdefault(key, []).append(needed)
        for key, all_needed in needs.items():
            if NEVER in all_needed:
                all_needed = [NEVER]
            for needed in all_needed:
                # without the algorithm nothing else of it is read either
                with_it = [one for one in all_needed if one != needed and not needed.startswith("--algorithm ")]
                others = {name: value for one in with_it for name, value in giving(one).items()}
                settings = made(cls, key, others | lacking(needed))
                try:
                    check_needed(settings)
                except SettingsError as error:
                    said = str(error)
                else:
                    pytest.fail(f"{verb}: {key} is taken without {needed}")
                # what the other needs ask for may itself be what nothing reads
                options = "|".join(re.escape(name.replace("_", "-")) for name in (key, *others, *BESIDE.get(key, {})))
                assert re.fullmatch(
                    rf"--(?:({options}) \S.*|({options})|(\S+\.)?no-\S+) needs {re.escape(needed)}, "
                    "without which nothing reads it",
                    said,
                ), f"{verb} {key}: {said}"
            if all_needed != [NEVER]:
                check_needed(made(cls, key, {name: value for one in all_needed for name, value in giving(one).items()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 1
    half: bool = True
    needs: ClassVar[Needs] = ((("half",), "--size of 2 or more", lambda inner: inner.size > 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    on: bool = False
    text: str = ""
    flat: Inner = field(default_factory=Inner, metadata=FLAT)
    inner: Inner = field(default_factory=lambda: Inner(size=3, half=False))
    needs: ClassVar[Needs] = ((("text", "inner.*"), "--on", lambda outer: outer.on),)


def test_groups_say_what_they_need_and_defaults_of_the_outer_class_are_defaults() -> None:
    # (key, what it needs), of the class and of its groups
    assert list(needed_keys(Outer)) == [
        *(("text", "--on"), ("inner.size", "--on"), ("inner.half", "--on")),
        *(("half", "--size of 2 or more"), ("inner.half", "--size of 2 or more")),
    ]
    assert check_needed(Outer()) == Outer()
    # a value is another one where it differs from what the outer class makes of the group
    with pytest.raises(SettingsError, match=r"^--inner\.size 1 needs --on, without which nothing reads it$"):
        check_needed(Outer(inner=Inner(size=1, half=False)))
    check_needed(Outer(on=True, inner=Inner(size=1, half=False)))
    with pytest.raises(SettingsError, match=r"^--inner\.half needs --size of 2 or more, "):
        check_needed(Outer(on=True, inner=Inner(size=1)))
    check_needed(Outer(on=True, inner=Inner(size=2)))
    with pytest.raises(SettingsError, match=r"^--no-half needs --size of 2 or more, "):
        check_needed(Outer(flat=Inner(half=False)))
    check_needed(Outer(flat=Inner(size=2, half=False)))


def test_a_long_value_is_cut_and_a_key_in_it_is_not_shown() -> None:
    with pytest.raises(SettingsError) as refused:
        check_needed(Outer(text="word " * 1000))
    assert len(str(refused.value)) < 130
    with pytest.raises(SettingsError) as refused:
        check_needed(Outer(text="https://me:secret@host/"))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve proxy --student s --out o --no-train --judge expert", "--judge expert needs to train"),
        ("serve proxy --student s --out o --prm-opd.w-hint 2", "--prm-opd.w-hint 2.0 needs --algorithm prm-opd"),
        ("train opd --student s --out o --lora.alpha 8", "--lora.alpha 8 needs --lora.rank"),
    ],
)
def test_each_verb_says_so_before_anything_is_opened(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert "nothing reads it" in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval --token-ids", "token_ids is a setting of agent = openai or own; agent is player"),
        ("eval --agent random --noise .2", "noise is a setting of agent = player or own; agent is random"),
        ("eval --agent expert --memory all", "memory is a setting"),
        ("eval --agent openai:m --examples.form text", "examples must be given"),
        ("eval --agent openai:m --device cpu", "device is a setting"),
        ("eval --agent model:x --policy-server http://127.0.0.1:1 --threads 2", "threads is a setting"),
        (
            "rollout --policy-server http://127.0.0.1:1",
            "policy_server is a setting of agent = model or own; agent is player",
        ),
    ],
)
def test_settings_of_another_kind_are_refused_by_type(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *more = words.split()
    panel = ["--panel", "alfworld-quickstart"] if verb == "eval" else []
    assert command.main([verb, *panel, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_every_class_names_settings_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in VERBS:
        for cls in classes_of(verb, monkeypatch):
            known = {setting.key for setting in settings_of(cls)}
            for keys, _, _ in needs_of(cls):
                assert [name for name in keys if any(fnmatchcase(key, name) for key in known)], f"{verb}: {keys}"


ROWS = [
    # an option, the command, what makes it one that something reads
    ("--data x", "serve webshop", "--profile 1k-human"),
    ("--host x", "serve mcp --panel p --out o --transport stdio", "--transport http"),
    ("--clients 3", "serve mcp --panel p --out o", "--transport http"),
    ("--idle 3", "serve mcp --panel p --out o", "--transport http"),
    ("--client-keys x", "serve mcp --panel p --out o", "--transport http"),
    ("--rerank-depth 5", "serve retrieval --index x", "--rerank coverage"),
    ("--encoder hf:x", "serve retrieval --index bm25:x", "--index x"),
    ("--device cuda", "serve retrieval --index bm25:x", "--rerank hf:x"),
    ("--cache-tokens 9", "serve policy m --engine vllm", "--engine sglang"),
    ("--no-seeds", "serve policy m --engine vllm", "--engine sglang"),
    ("--adapters 8", "serve policy m --engine sglang", "--engine vllm"),
    ("--top 9", "serve policy m", "--engine vllm"),
    ("--sleeps", "serve policy m --device cpu", "--device cuda"),
    *((option, "index build --corpus c --out o", "--kind dense") for option in ("--dim 9", "--shard-rows 9")),
    ("--factory SQ8", "index build --corpus c --out o", "--kind hybrid"),
    ("--encoder minilm", "index build --corpus c --out o", "--kind dense"),
    ('--parameters {"nprobe":3}', "index build --corpus c --out o", "--kind dense"),
    ("--style e5", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--passage-model x", "index build --corpus c --out o --kind dense --encoder a.b:c", "--encoder hf:x"),
    ("--dtype bfloat16", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--device cuda", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--dim 9", "index build --corpus c --out o --kind dense --encoder hf:x", "--encoder hashing"),
    ("--tasks 3", "result check f", "--agent random"),
    ("--env-kwargs {}x", "panel export-prompts p --out o", ""),
    ("--prompt {question}", "panel export-prompts p --out o --form tasks", "--form search-r1"),
    ("--channel tool", "panel export-prompts p --out o --form search-r1", "--form tasks"),
    ("--seed 1", "panel export-prompts p --out o --form search-r1", "--form tasks"),
    ("--env-kwargs {}x", "panel export-games p --out o", ""),
    ("--eval-every 3", "plan", "--steps 9"),
    ("--teacher-dtype bfloat16", "plan --teacher none", "--teacher 8B"),
    ("--shard-teacher", "plan --teacher none", "--teacher 8B"),
    ("--engine-memory .3", "plan", "--engine vllm"),
    ("--eval-split x", "pretrain --world alfworld", "--world a/B-v0"),
    ("--batch 3", "pretrain", "--world a/B-v0"),
    ("--tokenizer x", "trace print f", "--prompt"),
    ("--width 9", "trace print f", "--turns"),
    ("--seed 3", "bench rollout --models", "--models tiny"),
    ("--play.slots 3", "bench rollout --play.episodes 0", "--play.episodes 1"),
    ("--policy-server x", "bench gpu", "--save s"),
    ("--latex", "report r", "--out o"),
    ("--methods a b", "study plan", "--data d"),
    ("--first a b", "study plan --data d", ""),
    ("--train-hours 3", "study plan", "--difference 4"),
    ("--most-tasks 3", "study plan", "--difference 4"),
    ("--episodes 3", "study regime --run r", "--world w"),
    ("--shared .3", "study coverage", "--clusters 3"),
    ("--parallel 3", "study run f --print", "--no-print"),
    ("--ray-address auto", "study run f", "--executor ray"),
]


@pytest.mark.parametrize(("option", "verb", "needed"), ROWS)
def test_an_option_needs_what_reads_it(
    option: str, verb: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = options.Verb.asked

    def only_read(verb: Any, argv: Any) -> Any:
        asked(verb, argv)
        raise Seen

    monkeypatch.setattr(options.Verb, "asked", only_read)
    assert command.main([*verb.split(), *option.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = option.split()[0].removeprefix("--").removeprefix("no-").rpartition(".")[2]
    # of a table that is not there, what it must be given
    assert name in line.replace("_", "-") or "must be given" in line
    words = verb.split()
    # another value in the place of the one that is there
    for word in needed.split()[:1]:
        if word in words:
            del words[words.index(word) : words.index(word) + 1 + (len(needed.split()) > 1)]
    words = [word for word in words if needed != "--no-print" or word != "--print"]
    with pytest.raises(Seen):
        command.main([*words, *needed.split(), *(option.split() if needed else [])])
