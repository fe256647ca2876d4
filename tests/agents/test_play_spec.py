"""One value says what is played and by whom: its layers by rules written out again, its files, its refusals."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

import pytest
from msgspec import NODEFAULT

from turngym.agents import ResponseWriter, evaluate, play_episodes
from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.meaning import meaning
from turngym.agents.play_spec import EvalSpec, PartOfPanel, Whole, part_of
from turngym.agents.resolve_play import make_arguments, resolve_agent, resolve_play
from turngym.core.episode import Status
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.nested import at, put
from turngym.core.resolve import Resolved
from turngym.core.setting import choices_of, fields_of, kind_of, settings_of
from turngym.core.settings import read_toml, to_toml, whole_toml
from turngym.core.spec import diff, to_table
from turngym.core.trace import TraceWriter, read_specs, read_trace
from turngym.envs.panels import PanelError, load_panel
from turngym.scripts.eval import VERB
from turngym.scripts.main import main

ROOT = Path(__file__).resolve().parents[2]
PRESETS = tomllib.loads((ROOT / "agents" / "presets.toml").read_text(encoding="utf-8"))["preset"]
FOLDERS = sorted(ROOT.glob("agents/worlds/checkpoints/*/*/turngym.json"))
STUDENT = str(ROOT / "agents" / "worlds" / "checkpoints" / "alfworld" / "student")
PANEL = "alfworld-quickstart"
BARE = str(ROOT / "agents")
"""A folder that does not say how a model is spoken to."""

GUARD = {"max_turns": 50, "penalty": -0.1, "list_admissible": True, "show_admissible": False, "reading": "strict"}
GUARD |= {"invalid_cost": 0.0, "tool_name": None, "tool_argument": None}
MADE: dict[str, dict[str, Any]] = {
    "turngym/ALFWorld-v0": {
        "on_invalid": "reject",
        "split": "generated",
        "engine": "native",
        "config": "small",
        "part": "train",
        "domain_randomization": False,
        "words": "game",
    },
    "turngym/WebShop-v0": {
        "on_invalid": "reject",
        "split": None,
        "profile": "embedded",
        "splits": None,
        "compat": "webshop",
        "price_seed": None,
        "shop": None,
        "observation_mode": "text",
        "strict_admissible": True,
        "backdoors": False,
        "tagger": None,
        "num_prev_obs": 0,
        "num_prev_actions": 0,
        "show_attributes": False,
        "reward": "score",
        "oracle_query": "title",
    },
    "turngym/Search-v0": {
        "on_invalid": "noop",
        "split": None,
        "source": "world",
        "corpus": None,
        "config": "full",
        "retriever": None,
        "rerank": None,
        "topk": 3,
        "max_searches": None,
        "search_turns": None,
        "doc_format": "search_r1",
        "doc_tokens": 256,
        "count": None,
        "reward": "em",
        "format_scores": (0.2, 0.1, 0.0),
        "strict_compat": False,
        "held_out": (),
    },
}
"""What `gym.make` does where nobody says otherwise."""
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the game": {"max_turns": 7, "samples": 3, "env_kwargs": {"on_invalid": "penalize"}},
    "a tool": {"tool_name": "find"},
    "text": {"channel": "text"},
    "a dialect": {"channel": "tool:qwen"},
    "a model": {"temperature": 0.1, "memory": "window:3", "max_new_tokens": 9, "system": "Be brief."},
}
SPOKEN = {"channel": "auto", "system": None, "observation_role": "auto", "thinking": "auto", "memory": {"kind": "all"}}
SPOKEN |= {"max_new_tokens": 512, "max_context": None, "history": "template", "examples": None}


def game(panel: Any, preset: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `gym.make`: environment < panel < preset < what people ask for."""
    play = preset.get("play", {"env": {}})
    made = {**GUARD, **MADE[panel.env_id], **panel.make_kwargs}
    made |= {name: value for name, value in play["env"].items() if name != "id"}
    made |= {name: None if value == "none" else value for name, value in play.get("env_kwargs", {}).items()}
    made |= {name: asked[name] for name in ("max_turns", "tool_name") if name in asked} | asked.get("env_kwargs", {})
    return {name: value for name, value in made.items() if (name, value) != ("split", None)}


def speech(preset: Mapping[str, Any], asked: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset says of how an agent is spoken to; under another channel not what belongs to its own."""
    chat = dict(preset.get("agent", {}).get("chat", {}))
    own, channel = chat.get("channel"), asked.get("channel")
    if "system" in chat:
        chat["system"] = chat["system"].format(tool=made["tool_name"], argument=made["tool_argument"])
    if channel is not None and channel != own and not (own == "tool" and channel == "tool:qwen"):
        chat = {name: chat[name] for name in chat if name not in ("channel", "system", "observation_role")}
    return chat


@pytest.mark.parametrize(
    "name", ["alfworld-valid-seen-v1", "alfworld-loops-v1", "search-loops-v1", "webshop-papers-test-v1"]
)
def test_the_layers_stand_on_top_of_each_other(name: str) -> None:
    panel = load_panel(name)
    world = panel.env_id.partition("/")[2].partition("-")[0].lower()
    folders = [path for path in FOLDERS if path.parts[-3].partition("-")[0] == world]
    assert len(folders) == 6
    presets: list[dict[str, Any]] = [{}, *(row for row in PRESETS if row["play"]["env"]["id"] == panel.env_id)]
    assert len(presets) >= 4
    for preset in presets:
        for asked in ASKED.values():
            made = game(panel, preset, asked)
            chat = speech(preset, asked, made)
            named = {"preset": preset["name"]} if preset else {}
            for path in [None, *folders[: 1 if preset else None]]:
                if path is None and "temperature" in asked:
                    continue
                agent = {} if path is None else {"agent": f"model:{path.parent}"}
                found = resolve_play([("test", {**named, **agent, **asked})], usual=EVAL_DEFAULTS, panel=panel).spec
                assert make_arguments(found.play) == made
                assert found.play.samples == asked.get("samples", preset.get("play", {}).get("samples", 4))
                given = to_table(found.agent)
                if path is None:
                    bare = {"channel": "none", "system": None} | {
                        key: chat[key] for key in ("channel", "system") if key in chat
                    }
                    bare |= {"channel": asked.get("channel", bare["channel"])}
                    assert given == {"kind": "player", "name": "expert", "noise": 0.0, "chat": bare}
                    continue
                own = json.loads(path.read_text())
                own["thinking"] = {None: "auto", True: "on", False: "off"}[own["thinking"]]
                assert own.pop("memory", "all") == "all"
                assert own.pop("prompts", None) is None
                heat = preset.get("agent", {}).get("temperature", 0.85)
                wanted = {**SPOKEN, **own, **chat, **{key: asked[key] for key in SPOKEN if key in asked}}
                if wanted["memory"] == "window:3":
                    wanted["memory"] = {"kind": "window", "turns": 3}
                if wanted["memory"]["kind"] == "verl-agent":
                    wanted["memory"] = {"sha256": "", **wanted["memory"]}
                assert given["chat"] == wanted
                assert given["temperature"] == asked.get("temperature", heat)
                assert given["engine"] == {"kind": "local", "dtype": "float32", "device": "auto", "threads": 0}


def of_words(*words: str) -> Resolved[EvalSpec]:
    """What `turngym eval` with these words plays."""
    asked = VERB.asked(words)
    assert asked is not None
    return resolve_play(asked.layers, usual=EVAL_DEFAULTS)


WORDS = {
    "expert": (),
    "preset": ("--preset", "turnopd", "--max-turns", "9", "--limit", "3"),
    "model": ("--agent", f"model:{STUDENT}", "--preset", "verl-agent", "--temperature", "0", "--policy-server", "a:1"),
    "endpoint": (
        "--agent",
        "openai:org/m:7b",
        "--extra-body",
        '{"top_p": 0.5}',
        "--system",
        'A "b"\n# c',
        "--seed",
        "7",
    ),
    "none": ("--max-turns", "none", "--sampling", "published:64", "--noise", "0.25", "--workers", "2"),
    "any keys": ("--env-kwargs", '{"a": null, "b": "none", "c": {"d": [null, "none"]}}'),
    "null": ("--env-kwargs", '{"a": null, "c": {"d": [null]}}'),
    "examples": ("--agent", "pkg.mod:make", "--examples", "skills:alfworld", "--memory", "window:2", "--data", "x"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_is_printed_is_read_again_to_the_byte(kind: str, tmp_path: Path) -> None:
    found = of_words("--panel", PANEL, *WORDS[kind])
    file = tmp_path / "a.toml"
    file.write_text(whole_toml(found))
    again = of_words("--config", str(file))
    assert again.spec == found.spec
    assert to_toml(again.spec).encode() == to_toml(read_toml(file)).encode()


def test_the_file_of_an_evaluation_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--panel", PANEL, "--limit", "2", "--samples", "1", "--noise", "0.5", "--seed", "3"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert main(["eval", "--config", str(tmp_path / "a" / "spec.toml"), "--out", str(tmp_path / "b")]) == 0
    (first,), (second,) = (read_specs(tmp_path / name / "trace.jsonl").values() for name in "ab")
    assert first == second
    episodes = [read_trace(tmp_path / name / "trace.jsonl")[0] for name in "ab"]
    assert [one.turns for one in episodes[0]] == [one.turns for one in episodes[1]]
    capsys.readouterr()
    assert main(["eval", "--config", str(tmp_path / "a" / "spec.toml"), "--samples", "2", "--print"]) == 0
    said = capsys.readouterr().out
    assert "samples = 2  # command line" in said
    assert f"noise = 0.5  # {tmp_path / 'a' / 'spec.toml'}" in said


# Every setting.

NEEDED: dict[str, Any] = {
    "agent.folder": BARE,
    "agent.model": "m",
    "agent.name": "pkg.mod:make",
    "agent.trace": "t.jsonl",
    "agent.engine.policy_server": "http://a:1",
    "compute.workers.processes": 2,
    "compute.workers.actors": 2,
    "agent.chat.memory.turns": 2,
    "agent.chat.examples.file": "t.txt",
    "agent.chat.examples.folder": "alfworld",
    "play.tasks.task": ["generated/small/train/0"],
    "play.tasks.panel": PANEL,
    "play.tasks.sampling.limit": 4,
}
"""Values of settings that have no default."""
VALUES: dict[str, Any] = {
    "play.env.id": "turngym/WebShop-v0",
    "play.env.split": "valid_seen",
    "play.env_kwargs": {"part": "eval"},
    "play.scoring": {"scored_with": "x"},
    "play.tasks.panel": "alfworld-generated-eval",
    "agent.endpoint.base_url": "http://b/v1",
    "agent.endpoint.extra_body": '{"a": 1}',
    "preset": "react",
}
"""Other values of settings whose type does not say one."""
BESIDE: dict[str, dict[str, Any]] = {
    "agent.endpoint.price_in": {"agent.endpoint.price_out": 1.0},
    "agent.endpoint.price_cached": {"agent.endpoint.price_in": 1.0, "agent.endpoint.price_out": 1.0},
    "agent.endpoint.price_out": {"agent.endpoint.price_in": 1.0},
}
"""What must be given beside a setting."""
FOUND = ("play.tasks.sha256", "play.tasks.size")
"""Settings that the panel says, and nobody else."""


def leaves(
    cls: type[Any], above: str = "", kinds: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Path, field, and the kinds of tables that it needs, of every setting, once for each kind that has it."""
    kinds = dict(kinds or {})
    for field in fields_of(cls):
        path = f"{above}{field.name}"
        tables = settings_of(EvalSpec)[path].tables
        mine = [one for one in tables if one in getattr(field.type, "__args__", (field.type,))]
        if not tables:
            yield path, field, kinds
        for table in mine:
            tag = kind_of(table)
            yield from leaves(table, f"{path}.", {**kinds, **({} if tag is None else {path: tag})})


LEAVES = {path: (field, kinds) for path, field, kinds in reversed(list(leaves(EvalSpec)))}


def other_value(path: str, field: Any, now: Any) -> Any:
    """A value of a setting that is not `now`."""
    if path in VALUES:
        return VALUES[path]
    if choices := [one for one in choices_of(field.type) if one != now]:
        return choices[0]
    if isinstance(now, bool):
        return not now
    if isinstance(now, int | float):
        return now / 2 if isinstance(now, float) and now else now + 1
    if isinstance(now, tuple | list):
        return [*now, "generated/small/train/1"]
    return 5 if "int" in str(field.type) or "float" in str(field.type) else "other"


def test_every_setting_is_one_of_the_leaves() -> None:
    settings = settings_of(EvalSpec)
    assert set(LEAVES) == {path for path, one in settings.items() if not one.tables}


@pytest.mark.parametrize("path", sorted(set(LEAVES) - set(FOUND)))
def test_every_setting_changes_the_spec_and_nothing_else(path: str) -> None:
    field, kinds = LEAVES[path]
    asked: dict[str, Any] = {}
    for table, kind in kinds.items():
        put(asked, f"{table}.kind", kind)
    for name, value in NEEDED.items():
        table = name.rpartition(".")[0]
        if any(name == one and kinds.get(table) == kinds_.get(table) for one, kinds_ in required(kinds)):
            put(asked, name, value)
    for name, value in BESIDE.get(path, {}).items():
        put(asked, name, value)
    usual = EVAL_DEFAULTS if at(asked, "play.tasks.panel") else {"play": {"samples": 1, "tasks": {"kind": "first"}}}
    base = resolve_play([("test", asked)], usual=usual).spec
    now: Any = base
    for name in path.split("."):
        now = getattr(now, name)
    more: dict[str, Any] = {}
    put(more, path, other_value(path, field, now))
    changed = resolve_play([("test", asked), ("more", more)], usual=usual).spec
    differ = diff(base, changed)
    if path in ("play.env.id", "play.tasks.panel", "preset"):
        assert path in differ
    elif get_origin(field.type) is dict:
        assert {one.rpartition(".")[0] for one in differ} == {path} or set(differ) <= {path, f"{path}.scored_with"}
    else:
        assert set(differ) == {path}


def required(kinds: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Settings without a default of the chosen kinds."""
    for path, field, own in leaves(EvalSpec):
        if field.default is NODEFAULT and all(kinds.get(table) == kind for table, kind in own.items()):
            yield path, own


COST = {
    "preset",
    "agent.folder",
    *(f"agent.chat.examples.{name}" for name in ("file", "folder")),
    *(f"agent.endpoint.{name}" for name in ("base_url", "key_env", "request_deadline", "request_retries", "handshake")),
    *(f"agent.endpoint.{name}" for name in ("price_in", "price_cached", "price_out")),
    *(f"agent.engine.{name}" for name in ("device", "threads", "policy_server", "server_parallel", "server_deadline")),
}


def test_what_a_setting_changes() -> None:
    for path in LEAVES:
        if path in COST or path.startswith("compute."):
            wanted = "cost"
        elif path.startswith(("play.tasks.", "play.samples")):
            wanted = "amount"
        elif path == "play.seed":
            wanted = "seed"
        elif path.startswith("agent.") and path != "agent.temperature":
            wanted = "player"
        else:
            wanted = "game"
        assert meaning(path) == wanted, path


# What cannot be meant is refused, and the layer is named.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"agent": "expert", "temperature": 0.5}, "temperature is a setting of agent = model or"),
    "noise": ({"agent": "random", "noise": 0.5}, "noise is a setting of agent = player or own; agent is random"),
    "dtype": (
        {"agent": f"model:{STUDENT}", "policy_server": "http://a:1", "dtype": "bfloat16"},
        "dtype is a setting of agent.engine = local; agent.engine is servers",
    ),
    "prompts": (
        {"agent": f"model:{STUDENT}", "memory": "all", "prompts": "own"},
        "prompts is a setting of agent.chat.memory = verl-agent; agent.chat.memory is all",
    ),
    "base_url": ({"agent": f"model:{STUDENT}", "base_url": "http://a"}, "agent is model"),
    "draw": ({"panel": PANEL, "draw": True}, "draw is a setting of play.tasks = first; play.tasks is panel"),
    "unknown": ({"temprature": 0.5}, "there is no setting 'temprature'. Did you mean 'temperature'"),
    "twice": ({"max_turns": 5, "env_kwargs": {"max_turns": 6}}, "max_turns is given by itself and among env_kwargs"),
    "channel": ({"env_kwargs": {"channel": "text"}}, "env_kwargs has channel, which is the agent's"),
    "infinite": (
        {"agent": f"model:{STUDENT}", "temperature": float("inf")},
        "temperature is inf; valid: a finite number",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_of_another_kind_are_refused_in_one_line(kind: str) -> None:
    asked, said = REFUSED[kind]
    with pytest.raises(SettingsError) as caught:
        resolve_play([("the words", {"panel": PANEL, **asked})], usual=EVAL_DEFAULTS)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert "the words" in text or kind == "infinite"


def test_who_says_a_setting_of_another_kind() -> None:
    """The file is named, not the command line that chose the kind."""
    layers = [("a.toml", {"panel": PANEL, "temperature": 0.5}), ("command line", {"agent": "expert"})]
    with pytest.raises(SettingsError, match=r"^a\.toml: temperature is a setting of"):
        resolve_play(layers, usual=EVAL_DEFAULTS)
    # what a preset or a folder says beside another kind is nobody's mistake
    found = resolve_play([("command line", {"panel": PANEL, "preset": "react"})], usual=EVAL_DEFAULTS).spec
    assert set(to_table(found.agent)) == {"kind", "name", "noise", "chat"}


def test_what_a_panel_says_nobody_else_can() -> None:
    for asked in ({"play.tasks.sha256": "0" * 64}, {"play.tasks.size": 5}):
        with pytest.raises(PanelError, match="the settings say"):
            evaluate(PANEL, "expert", progress=False, **asked)
    with pytest.raises(PanelError, match=r"is a panel of turngym/ALFWorld-v0; asked for is turngym/WebShop-v0"):
        evaluate(PANEL, "expert", env="turngym/WebShop-v0", progress=False)


def test_auto_is_what_would_hold_without_it() -> None:
    """`--channel auto` is as the model was trained, or as the preset says."""
    model = {"agent": f"model:{STUDENT}"}
    for asked in (model, {**model, "preset": "turnopd"}, {"preset": "turnopd"}):
        layers = [("test", {"panel": PANEL, **asked})]
        same = [("test", {"panel": PANEL, "channel": "auto", **asked})]
        assert resolve_play(same, usual=EVAL_DEFAULTS).spec == resolve_play(layers, usual=EVAL_DEFAULTS).spec
    assert resolve_agent({**model, "channel": "auto"}) == resolve_agent(model)


def test_every_value_has_its_origin() -> None:
    found = of_words("--panel", PANEL, "--agent", f"model:{STUDENT}", "--preset", "react", "--max-turns", "9")
    origins = {
        "play.samples": "preset react",
        "play.env.max_turns": "command line",
        "play.env.on_invalid": "preset react",
        "play.env.penalty": "environment",
        "play.env.split": f"panel {PANEL}-v1",
        "play.env_kwargs.words": "preset react",
        "play.env_kwargs.engine": "environment",
        "play.tasks.sha256": f"panel {PANEL}-v1",
        "agent.folder": "command line",
        "agent.temperature": "preset react",
        "agent.chat.max_new_tokens": "preset react",
        "agent.chat.max_context": "turngym.json of the model",
        "preset": "command line",
    }
    assert {path: found.origins[path] for path in origins} == origins
    assert "agent.chat.examples" not in found.origins, "nobody says it"
    text = to_toml(found.spec, found.origins)
    assert "max_turns = 9  # command line\n" in text
    assert 'examples = "none"\n' in text


# What an evaluation has lost is said, wherever it is read.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    evaluate(PANEL, "expert", noise=0.3, samples=2, limit=3, max_turns=10, out=out, progress=False)
    return out


def copied(whole: Path, into: Path, lines: int) -> Path:
    """The first lines of the trace of an evaluation, as one that was killed leaves them."""
    into.mkdir()
    kept = (whole / "trace.jsonl").read_bytes().splitlines(keepends=True)[:lines]
    (into / "trace.jsonl").write_bytes(b"".join(kept))
    return into


def test_a_killed_evaluation_says_what_is_missing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = copied(whole, tmp_path / "cut", 5)
    assert (rescore(cut).missing, rescore(whole).missing) == (2, 0)
    assert main(["eval", "--rescore", str(cut)]) == 1
    assert "2 of 6 episodes are missing" in capsys.readouterr().out
    assert main(["eval", "--rescore", str(cut), "--max-errors", "2"]) == 0
    assert main(["eval", "--rescore", str(whole)]) == 0
    assert main(["eval", "--compare", str(whole), str(cut)]) == 1
    said = capsys.readouterr().out
    assert "second: of 6 episodes 2 are missing" in said
    assert "first: of" not in said
    assert main(["eval", "--compare", str(whole), str(cut), "--max-errors", "2"]) == 0
    assert main(["eval", "--compare", str(whole), str(whole)]) == 0


def test_a_comparison_over_errors_has_their_bounds(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run beside a copy of itself whose lost episodes have become errors."""
    broken = tmp_path / "broken"
    (spec,) = read_specs(whole / "trace.jsonl").values()
    episodes = read_trace(whole / "trace.jsonl")[0]
    lost = [one for one in episodes if not one.success]
    assert 0 < len(lost) < len(episodes)
    with TraceWriter(broken / "trace.jsonl", spec) as writer:
        for one in episodes:
            writer.write(one if one.success else as_error(one))
    assert main(["eval", "--compare", str(whole), str(broken)]) == 1
    said = capsys.readouterr().out
    assert f"second: of 6 episodes {len(lost)} ended in errors, which no number counts (success " in said
    share = 100 * (6 - len(lost)) / 6
    assert f"{share:.1f} to 100.0 %" in said


def as_error(episode: Any) -> Any:
    return replace(episode, status=Status.ERROR_ENGINE)


OTHERWISE = {"samples": 1, "limit": 2, "seed": 1, "noise": 0.25, "max_turns": 8, "env_kwargs": {"reading": "lenient"}}


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_setting_into_the_same_folder_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "a", 99)
    given: dict[str, Any] = {"noise": 0.3, "samples": 2, "limit": 3, "max_turns": 10, "progress": False}
    before = (folder / "trace.jsonl").read_bytes()
    with pytest.raises(EvaluationError, match="write to another folder"):
        evaluate(PANEL, "expert", out=folder, **{**given, name: OTHERWISE[name]})
    assert (folder / "trace.jsonl").read_bytes() == before
    assert evaluate(PANEL, "expert", out=folder, slots=1, **given).resumed == 6


class Unreachable:
    """An agent whose server is not there."""

    name = "unreachable"
    writer = ResponseWriter()

    def respond(self, waiting: Any) -> Any:
        raise TurngymError("nobody answers")

    def release(self, conversation: Any) -> None: ...


def test_what_failed_before_its_first_episode_is_begun_with_other_settings(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit": 2, "samples": 1, "out": tmp_path, "progress": False}
    with pytest.raises(TurngymError, match="nobody answers"):
        evaluate(PANEL, Unreachable(), **settings)
    assert evaluate(PANEL, "expert", max_turns=10, **settings).resumed == 0
    assert tomllib.loads((tmp_path / "spec.toml").read_text())["play"]["env"]["max_turns"] == 10
    rollout: dict[str, Any] = {"tasks": 1, "out": tmp_path / "rollout.jsonl", "progress": False}
    with pytest.raises(TurngymError, match="nobody answers"):
        play_episodes("turngym/ALFWorld-v0", Unreachable(), **rollout)
    assert len(play_episodes("turngym/WebShop-v0", "expert", **rollout).episodes) == 1
    (spec,) = read_specs(rollout["out"]).values()
    assert spec["play"]["env"]["id"] == "turngym/WebShop-v0"


def test_a_rollout_holds_one_player_in_one_game(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    play_episodes(tasks=1, out=out, progress=False)
    for other in ({"agent": "random"}, {"max_turns": 5}, {"preset": "react"}):
        with pytest.raises(TurngymError, match="one player in one game"):
            play_episodes(tasks=2, out=out, append=True, progress=False, **other)
    assert len(play_episodes(tasks=2, samples=2, seed=1, out=out, append=True, progress=False).episodes) == 4
    assert len(read_trace(out)[0]) == 5


@pytest.mark.parametrize("limit", [1, 6, 16, 67, 134, 500])
def test_a_limit_takes_its_share_of_every_category(limit: int) -> None:
    tasks = load_panel("alfworld-valid-unseen").tasks
    chosen = part_of(tasks, PartOfPanel(limit=limit))
    assert len(chosen) == min(limit, len(tasks))
    for category in {task.category for task in tasks}:
        share = limit * sum(task.category == category for task in tasks) / len(tasks)
        assert abs(sum(task.category == category for task in chosen) - min(share, share * len(tasks) / limit)) <= 1
    # in the panel's order, and more tasks are the same and others
    assert [task for task in tasks if task in chosen] == list(chosen)
    assert {*chosen} <= {*part_of(tasks, PartOfPanel(limit=limit + 1))}
    assert part_of(tasks, PartOfPanel(limit=limit, spread=False)) == tasks[:limit]
    assert part_of(tasks, Whole()) == tasks


def test_which_tasks_a_limit_takes_can_be_asked_for(tmp_path: Path) -> None:
    tasks = load_panel(PANEL).tasks
    for spread in (True, False):
        out = tmp_path / str(spread)
        words = [] if spread else ["--no-spread"]
        assert main(["eval", "--panel", PANEL, "--limit", "5", "--samples", "1", *words, "--out", str(out)]) == 0
        played = {episode.task.task_id for episode in read_trace(out / "trace.jsonl")[0]}
        assert played == {task.task_id for task in part_of(tasks, PartOfPanel(limit=5, spread=spread))}
    assert len({one.category for one in part_of(tasks, PartOfPanel(limit=5))}) == 5
