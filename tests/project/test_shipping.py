"""What is shipped: bounded dependencies, cards beside checkpoints, a source distribution that can run its tests."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from import_graph import ROOMS
from wheels import ROOT, clean_copy, tracked

from turngym.agents.worlds import REAL_WORLDS, WORLDS, load_world
from turngym.agents.worlds.worlds import CHECKPOINTS

UNBOUNDED = {
    "regex": "its versions are dates",
    "pyarrow": "a major version every quarter, by the calendar; reading and writing Parquet has stayed as it was",
}
"""Dependencies without an upper bound, and why: one would shut users out and protect them from nothing."""


def dependencies() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


@pytest.mark.parametrize("extra", dependencies())
def test_every_dependency_has_both_bounds(extra: str) -> None:
    for line in dependencies()[extra]:
        name = re.split(r"[\s\[<>=!~]", line)[0]
        assert "<" in line or "==" in line or name in UNBOUNDED, f"[{extra}] {line}: no upper bound"
        # another extra gives the lower one
        assert ">" in line or "==" in line or extra in ("verl", "mcp"), f"[{extra}] {line}: no lower bound"


def test_what_has_no_bound_is_still_needed() -> None:
    lines = {line for lines in dependencies().values() for line in lines}
    assert {name for name in UNBOUNDED if any(re.match(rf"{name}\b[^<]*$", line) for line in lines)} == set(UNBOUNDED)


def test_constraints_are_within_the_bounds() -> None:
    version = pytest.importorskip("packaging.version").Version
    requirement = pytest.importorskip("packaging.requirements").Requirement
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    lines = [requirement(line) for name, lines in dependencies().items() if name != "verl" for line in lines]
    tested = [one for one in lines if one.name in pins]
    assert {one.name for one in tested} == set(pins) - {"tokenizers"}  # transformers bounds it
    assert [one for one in tested if version(pins[one.name]) not in one.specifier] == []


def bootstrap() -> Any:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_newest_takes_no_constraints_but_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool, calls = bootstrap(), []
    (tmp_path / "venv-newest" / "bin").mkdir(parents=True)
    monkeypatch.setattr(tool, "VENV", tmp_path / "venv")
    monkeypatch.setattr(tool, "PYTHON", tmp_path / "venv" / "bin" / "python")
    (tmp_path / "venv-newest" / "bin" / "python").touch()
    monkeypatch.setattr(tool, "run", lambda *words, check=True: calls.append(words) or 0)
    asked = subprocess.CompletedProcess([], 0, stdout="[]")
    monkeypatch.setattr(tool.subprocess, "run", lambda *words, **more: asked)
    assert tool.newest(["-x"]) == 0
    assert tool.newest(["--newest-torch"]) == 0
    pinned, tests, free, _ = calls
    torch = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
    assert torch in pinned
    assert torch not in free
    assert "-U" in pinned
    assert "constraints.txt" not in {*pinned, *free}
    assert tests[-1] == "-x"


def test_an_extra_that_does_not_install_costs_its_own_tests_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tool, wanted = bootstrap(), []
    monkeypatch.setattr(tool, "VENV", tmp_path)
    monkeypatch.setattr(tool, "other_python", lambda: None)
    monkeypatch.setattr(tool, "install", lambda *words, check=True: wanted.append(words[-1]) or int("ray" in words[-1]))
    tool.set_up_tests()
    together, needed, *others = [words for words in wanted if words.startswith(".")]
    assert together == f"{needed[:-1]},{','.join(tool.OPTIONAL)}]"
    assert others == [f".[{extra}]" for extra in tool.OPTIONAL]
    assert capfd.readouterr().out.count("did not install") == 1
    # what is there is not installed again, unless its bounds have changed
    wanted.clear()
    assert tool.set_up("train,spacy") == 0
    assert wanted == []
    (tmp_path / "turngym-extras").write_text("of other bounds\ntrain\nspacy\n")
    tool.set_up("train,spacy")
    assert wanted == [tool.pinned_torch(), ".[train,spacy]"]


def test_every_test_is_in_the_quick_or_the_long_job_and_ci_runs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    tool, chosen = bootstrap(), []
    monkeypatch.setattr(tool, "set_up_tests", lambda: None)
    monkeypatch.setattr(tool, "run", lambda *words, check=True: chosen.append(words) or 0)
    monkeypatch.setattr(tool, "failed", lambda *words: "")
    assert (tool.test([]), tool.long([])) == (0, 0)
    tests = [" ".join(words[words.index("-m", 2) + 1 :]) for words in chosen if "pytest" in words]
    assert tests == ["not long and not sglang and not vllm", "long and not nightly and not sglang and not vllm"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"python3 scripts/bootstrap.py {job} " in ci for job in ("test", "long", "sglang", "vllm"))


def test_a_tool_that_fails_fails_the_job_and_says_why_behind_the_tests(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = bootstrap()
    monkeypatch.setattr(tool, "PYTHON", sys.executable)
    monkeypatch.setattr(tool, "set_up_tests", lambda: None)
    monkeypatch.setattr(tool, "TOOLS", (["-m", "this", "-q"], ["-m", "no_such_tool", "check"]))
    monkeypatch.setattr(tool, "run", lambda *words, check=True: print("the tests") or 0)
    assert tool.test([]) == 1
    said = capfd.readouterr().out
    assert said.startswith("the tests\n[bootstrap] failed: -m no_such_tool check\n")
    assert "No module named no_such_tool" in said
    assert "Zen" not in said


def test_newest_names_what_the_bounds_hold_back() -> None:
    rows = [
        {"name": "Flask", "version": "3.1", "latest_version": "4.0.1"},
        {"name": "numpy", "version": "2.4", "latest_version": "2.5"},
        {"name": "torch", "version": "2.13", "latest_version": "2.15"},
        {"name": "of-others", "version": "1", "latest_version": "9"},
        {"name": "inspect_ai", "version": "0.3.285", "latest_version": "0.4.0"},
    ]
    found = bootstrap().held_back(rows, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found == ["Flask 3.1: 4.0.1 is out (bound: <4)", "inspect_ai 0.3.285: 0.4.0 is out (bound: <0.4)"]


def tensors(path: Path) -> dict[str, dict[str, Any]]:
    """Names of a safetensors file with their types and shapes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        found = json.loads(file.read(length))
    return {name: row for name, row in found.items() if name != "__metadata__"}


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("name", WORLDS)
def test_the_card_of_a_checkpoint_says_what_it_is(name: str, role: str) -> None:
    world = load_world(name)
    folder, recipe = world.checkpoint(role), world.recipes[role]
    card = (folder / "README.md").read_text(encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = tensors(folder / "model.safetensors")
    (kind,) = {{"F32": "float32", "F16": "float16"}[row["dtype"]] for row in stored.values()}
    said = dict(re.findall(r"^\| (\w[^|]*?) \| ([^|]+?) \|$", card, re.MULTILINE))
    layers, width, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    shape = f"{layers} layers, width {width}, {heads} heads, feed-forward {config['intermediate_size']}"
    assert said["architecture"] == f"{config['architectures'][0]}, {shape}"
    assert said["parameters"] == f"{sum(math.prod(row['shape']) for row in stored.values()):,}"
    assert said["vocabulary"] == f"{config['vocab_size']} phrases"
    assert said["context"] == f"{config['max_position_embeddings']:,} tokens"
    assert said["stored as"] == f"{kind}, {(folder / 'model.safetensors').stat().st_size:,} bytes"
    assert said["license"].startswith("MIT")
    flowing = " ".join(card.split())
    assert f"{recipe.steps} updates of {recipe.episodes} episodes, learning rate {recipe.lr:g}" in flowing
    assert f"seed {recipe.seed}, loss averaged by {recipe.weight.removesuffix('_mean')}" in flowing
    assert recipe.players in card
    assert f"turngym pretrain --world {name} --role {role} " in flowing
    assert f"ost {world.max_turns} turns" in flowing
    assert f"`{world.panel}`" in card
    page = ROOT / re.findall(r"from `(docs/[\w/]+\.md)`", flowing)[0]
    for figure in re.findall(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", card):
        assert figure in page.read_text(encoding="utf-8"), f"{figure} is not on {page.name}"


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("name", REAL_WORLDS)
def test_the_card_of_an_adapter_says_what_it_is(name: str, role: str) -> None:
    folder = CHECKPOINTS / name / role
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(REAL_WORLDS[name].base)
    stored = tensors(folder / "adapter_model.safetensors")
    assert len(stored) == 2 * 7 * 30  # A and B of seven layers in each of thirty
    assert {row["shape"][0] for layer, row in stored.items() if ".lora_A." in layer} == {config["r"]}
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size < 6_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"rank {config['r']}, all linear layers but the head" in card
    assert f"{size:,} bytes" in card
    figures = re.findall(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", card)
    page = (ROOT / "docs" / "research" / "real_model.md").read_text(encoding="utf-8")
    assert figures
    assert all(figure in page for figure in figures)


def test_every_file_is_declared_or_only_for_a_checkout() -> None:
    """Nothing lies in a package that the wheel neither has nor leaves out on purpose."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    declared = {path for room in ROOMS for path in declared_in(room, tool)}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    if listed == [""]:
        pytest.skip("not a checkout of git")
    rooms = ("envs/", "agents/", "trainers/", "retrieval/", "scripts/")
    data = {name for name in listed if name.startswith(rooms) and not name.endswith(".py")}
    # packages of their own, the former but for the quickstart's
    apart = ("agents/worlds/checkpoints/", "scripts/examples/turngym_scienceworld/")
    assert {name for name in data - declared if not name.startswith(apart)} == {
        "scripts/launch/proxy_opd_hints.sh",
        "scripts/launch/proxy_prm_rl.sh",
    }


def declared_in(room: str, tool: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for package, patterns in tool["package-data"].items():
        if package.split(".")[1] == room:
            folder = ROOT / package.removeprefix("turngym.").replace(".", "/")
            for pattern in patterns:
                matched = [path for path in folder.glob(pattern) if path.is_file()]
                assert matched, f"{package}: {pattern} matches nothing"
                found |= {path.relative_to(ROOT).as_posix() for path in matched}
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a clean copy, unpacked."""
    work = tmp_path_factory.mktemp("sdist")
    source = clean_copy(ROOT, work)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(work)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work / "out", filter="data")
    (folder,) = (work / "out").iterdir()
    return folder


@pytest.mark.long
def test_the_source_distribution_is_the_checkout(sdist: Path) -> None:
    missing = {name for name in tracked(ROOT) if not (sdist / name).exists()}
    # links for type checkers, and what git itself reads
    assert {name for name in missing if not name.startswith(".links/")} <= {".gitignore"}
    for name in ("NOTICE", "LICENSE"):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.long
def test_the_source_distribution_runs_its_tests(sdist: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "tests/retrieval/test_lucene_words.py"]
    done = subprocess.run(words, cwd=sdist, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_notice_has_the_license_of_what_it_is_derived_from() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "Copyright (c) 2020 Mohit Shridhar and others" in notice
    assert "The above copyright notice and this permission notice shall be included" in notice
    for name in re.findall(r"(?:envs|retrieval|scripts|agents|docs)/[\w./*-]+\w", notice):
        assert list(ROOT.glob(name)), f"NOTICE names {name}, which is not there"


def test_images_are_pinned_and_without_root() -> None:
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    stages: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            stages[line.split(" AS ")[1]] = []
        elif stages:
            stages[[*stages][-1]].append(line)
    assert list(stages) == ["base", "eval", "train"]
    for name in ("eval", "train"):
        stage = stages[name]
        assert "USER 1000" in stage
        after = stage[stage.index("USER 1000") :]
        assert not [line for line in after if line.startswith(("RUN", "COPY", "USER root"))]
        installs = [line for line in stage if line.startswith("RUN pip")]
        assert all("constraints.txt" in line for line in installs)
        extras = re.findall(r"'\.\[([\w,]+)\]'", " ".join(installs))[0].split(",")
        assert set(extras) <= set(dependencies())


def test_pages_install_from_a_clone() -> None:
    """The package is not on PyPI: by its name pip finds it only where it is installed."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        found = re.findall(r"pip install [^`\n]*'turngym\[([a-z,]+)\]'", page.read_text(encoding="utf-8"))
        assert not found, f"{page.name}: pip install 'turngym[{found[0]}]'; write pip install -e '.[{found[0]}]'"


@pytest.mark.parametrize(
    ("tag", "said"), [("v9.9.9", "the tag is v9.9.9, scripts/turngym"), ("0.2.0", "the tag is 0.2.0")]
)
def test_a_release_is_of_the_version(tag: str, said: str) -> None:
    command = [str(ROOT / ".ci" / "release"), tag, "https://github.com/OWNER/NAME"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (ROOT / "dist").exists() or done.stdout == ""


def test_a_tag_publishes_what_was_tried() -> None:
    flow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert ".ci/release" in flow
    assert [job in flow for job in ("needs: build", "needs: try")] == [True, True]
    assert all(f'"3.{minor}"' in flow for minor in (11, 12, 13, 14))
