"""Study files: which cells follow from them, with which settings, and what is refused before anything is run."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from late import late

from turngym.agents.worlds.built_in import WORLDS
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.nested import at
from turngym.scripts.main import main
from turngym.scripts.study.cells import Cell, cells_of
from turngym.scripts.study.study_file import built_in, read_study_file
from turngym.trainers.algorithm import FixedDepth
from turngym.trainers.algorithms.tcod import Curriculum
from turngym.trainers.algorithms.turnopd import AdaptiveDepth
from turngym.trainers.run import build_algorithm
from turngym.trainers.token_weights import Blend, Static, TurnLevel
from turngym.trainers.train_config import TrainConfig, require_setting

SHORT = """
title = "Entropy credit against OPD"
world = "alfworld-loops"
seeds = [0, 1]
baseline = "opd"
train = { steps = 60, episodes = 32 }
[methods.opd]
[methods.grpo]
optimizer.lr = 3e-4
"""


def cells(tmp_path: Path, text: str, *changes: str) -> dict[str, Cell]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    study_cells = cells_of(read_study_file(path, changes), tmp_path / "out")
    return {f"{cell.world}/{cell.folder.name}": cell for cell in study_cells}


def built(cell: Cell) -> Any:
    """The algorithm that a cell trains with."""
    return build_algorithm(training(cell))


def training(cell: Cell) -> TrainConfig:
    assert isinstance(cell.spec, TrainConfig)
    return cell.spec


def said(cell: Cell, *names: str) -> list[Any]:
    """The values of a training run's settings."""
    return [at(cell.settings, require_setting(training(cell).algorithm, name, "test").path) for name in names]


def test_the_shortest_file(tmp_path: Path) -> None:
    by_name = cells(tmp_path, SHORT)
    assert list(by_name) == [f"alfworld-loops/{name}-seed{seed}" for seed in (0, 1) for name in ("opd", "grpo")]
    opd, grpo = by_name["alfworld-loops/opd-seed1"], by_name["alfworld-loops/grpo-seed0"]
    # the world's own settings, then [train], then the method's
    assert said(opd, "seed", "steps", "episodes", "optimizer.lr") == [1, 60, 32, 1e-3]
    assert said(opd, "panel", "max_turns", "eval_every", "eval_samples") == ["alfworld-loops-v1", 48, 6, 4]
    assert said(grpo, "optimizer.lr", "optimizer.minibatches", "grpo.weight") == [3e-4, 2, "trajectory"]
    names = ("models.student", "optimizer.minibatches", "run.episodes", "optimizer.lr", "run.eval_every")
    where = str(tmp_path / "mine.toml")
    assert [grpo.origins[name].replace(where, "mine").replace(os.path.relpath(where), "mine") for name in names] == [
        *("world alfworld-loops", "world alfworld-loops", "mine: train", "mine: methods.grpo", "study")
    ]
    # who learns from the reward alone has no teacher
    assert Path(str(training(opd).teacher)).parts[-2:] == ("alfworld-loops", "teacher")
    assert training(grpo).teacher is None
    # runs with the same weights, tasks and seed share their first evaluation
    starts = [by_name[f"alfworld-loops/{name}"].same_start for name in ("opd-seed0", "grpo-seed0", "opd-seed1")]
    assert starts[0] == starts[1] != starts[2]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        *(("optimizer.lr = 0.5", True), ("judge = 'skills:alfworld'", True), ("sdar.n = 2", True)),
        *(("examples = 'skills:alfworld'", False), ("system = 'Hurry.'", False), ("memory = 'window:2'", False)),
        ("env_kwargs.on_invalid = 'reject'", False),
    ],
)
def test_what_changes_the_first_evaluation_is_evaluated_by_itself(tmp_path: Path, changed: str, same: bool) -> None:
    text = f"{SHORT}\n[methods.sdar]\n[methods.other]\nof = 'sdar'\n{changed}\n"
    by_name = cells(tmp_path, text)
    starts = [by_name[f"alfworld-loops/{name}-seed0"].same_start for name in ("sdar", "other")]
    assert (starts[0] == starts[1]) == same


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("of = 'opd'\nmax_turns = 7", "other is evaluated with env.max_turns 7 in alfworld-loops, opd with 48"),
        ("of = 'opd'\neval_temperature = 0.5", "temperature 0.5 in alfworld-loops, opd with 0.85"),
        ("of = 'opd'\neval_temperature = 0.85", ""),
        ("of = 'opd'\npanel = 'alfworld-quickstart'", "tasks.panel 'alfworld-quickstart-v1' in"),
        # the panel says it, whatever is trained on
        ("of = 'opd'\nenv_kwargs.on_invalid = 'reject'\nsplit = 'train'", ""),
        ("of = 'opd'\ndepth = 6", ""),
        ("agent = 'expert'\nmax_turns = 7", "max_turns 7 in"),
        ("agent = 'openai:m'\nbase_url = 'http://h/v1'\ntemperature = 0.5", "temperature 0.5 in"),
        ("agent = 'random'\npanel = 'alfworld-generated-eval'", "methods.other.panel: it is its world's"),
    ],
)
def test_methods_of_one_world_are_evaluated_in_one_game(method: str, said: str, tmp_path: Path) -> None:
    text = f"{SHORT}\n[methods.other]\n{method}\n"
    if not said:
        assert cells(tmp_path, text)
        return
    with pytest.raises(SettingsError, match=re.escape(said)):
        cells(tmp_path, text)


def test_an_expert_is_known_before_the_first_cell_begins(tmp_path: Path) -> None:
    text = f"{SHORT}\n[methods.sft]\nexpert = "
    with pytest.raises(SettingsError, match=r"mine\.toml, sft in alfworld-loops: .*Did you mean 'searching'"):
        cells(tmp_path, f"{text}'serching'")
    assert cells(tmp_path, f"{text}'searching'")


def test_agents_play_by_the_rules_of_their_world(tmp_path: Path) -> None:
    more = "[methods.expert]\nagent = 'expert'\n[methods.again]\nof = 'expert'\n[methods.m]\nagent = 'openai:m'\n"
    changes = [
        "train = { max_turns = 3, eval_temperature = 0.5, optimizer.lr = 1.0 }",
        "train.env_kwargs = { reading = 'lenient' }",
    ]
    by_method = {cell.method: cell for cell in cells(tmp_path, SHORT + more, *changes, "seeds = [4]").values()}
    expert, model = by_method["expert"].settings, by_method["m"].settings
    assert expert == by_method["again"].settings
    paths = ("play.env.max_turns", "play.env.reading", "play.tasks.panel", "play.samples", "play.seed", "agent.name")
    assert [at(expert, path) for path in paths] == [3, "lenient", "alfworld-loops-v1", 4, 4, "expert"]
    assert said(by_method["opd"], "max_turns", "eval_temperature") == [3, 0.5]
    assert [at(model, path) for path in ("play.env.max_turns", "agent.temperature")] == [3, 0.5]
    assert {json.dumps(by_method[name].game["env"]) for name in by_method} == {json.dumps(expert["play"]["env"])}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((f"{key} = 'expert'", f"methods.expert.{key}: an agent is not trained") for key in ("algorithm", "text")),
        *((f"{key} = 'x'", f"methods.expert: there is no setting '?{key}") for key in ("student", "rescore")),
        ("env = 'turngym/WebShop-v0'", "alfworld-loops-v1 is a panel of turngym/ALFWorld-v0"),
        ("in.alfworld-loops.samples = 2", "expert.in.alfworld-loops.samples: write it as samples in"),
        *((f"agent = '{name}'", f"unknown agent '{name}'") for name in ("exprt", "first-hit")),
        ("panel = 'alfworld-loops'", "methods.expert.panel: it is its world's"),
        ("episodes = 3", "there is no setting 'episodes'"),
    ],
)
def test_what_no_evaluation_has_is_refused_of_an_agent(change: str, said: str, tmp_path: Path) -> None:
    name = "" if change.startswith("agent") else "agent = 'expert'\n"
    with pytest.raises(TurngymError, match=said):
        cells(tmp_path, f"{SHORT}[methods.expert]\n{name}{change}\n")


def test_a_list_of_worlds_chooses_among_those_of_the_file(tmp_path: Path) -> None:
    text = SHORT.replace('world = "alfworld-loops"\n', "") + "[worlds.webshop]\nmax_turns = 7\n[worlds.search]\n"
    by_name = cells(tmp_path, text, 'worlds = ["webshop", "alfworld"]')
    assert {cell.world for cell in by_name.values()} == {"webshop", "alfworld"}
    assert said(by_name["webshop/opd-seed0"], "max_turns") == [7]
    assert said(by_name["alfworld/opd-seed0"], "max_turns") != [7]


def test_a_method_is_run_in_worlds_of_its_own(tmp_path: Path) -> None:
    text = 'worlds = ["alfworld", "search"]\n[methods.opd]\n'
    text += '[methods.short]\nof = "opd"\ndepth = 12\nworlds = ["alfworld"]\n'
    assert [*cells(tmp_path, text)] == ["alfworld/opd-seed0", "alfworld/short-seed0", "search/opd-seed0"]
    # where a --set leaves out the world, nothing of the method is run
    assert [*cells(tmp_path, text, 'worlds = ["search"]')] == ["search/opd-seed0"]


def test_each_layer_overrides_the_one_before(tmp_path: Path) -> None:
    text = """
    evaluate = { times = 2 }
    train = { steps = 20, episodes = 5, optimizer.lr = 1.0, optimizer.weight_decay = 0.5 }
    [worlds.alfworld]
    [worlds.shop]
    world = "webshop"
    episodes = 6
    max_turns = 7
    [methods.opd]
    episodes = 8
    in.shop.optimizer.lr = 3.0
    [methods.turnopd]
    optimizer.lr = 2.0
    """
    by_name = cells(tmp_path, text)
    names = ("alfworld/opd-seed0", "alfworld/turnopd-seed0", "shop/opd-seed0", "shop/turnopd-seed0")
    assert [said(by_name[name], "episodes") for name in names] == [[8], [5], [8], [6]]
    assert [said(by_name[name], "optimizer.lr") for name in names] == [[1.0], [2.0], [3.0], [2.0]]
    assert [said(by_name[name], "optimizer.weight_decay") for name in names] == [[0.5]] * 4
    assert said(by_name["shop/opd-seed0"], "max_turns", "panel") == [7, "webshop-quickstart-v1"]
    changed = cells(tmp_path, text, "methods.turnopd.optimizer.lr = 9.0", "seeds = [4]")
    assert said(changed["shop/turnopd-seed4"], "optimizer.lr") == [9.0]
    # a text of a table of any keys is a value of the setting that it turns out to be
    own = 'train = {"grpo.scale" = "none", env_kwargs.words = "none"}'
    scaled = cells(tmp_path, SHORT, 'methods.opd.algorithm = "grpo"', own)["alfworld-loops/opd-seed0"]
    assert (*said(scaled, "grpo.scale"), training(scaled).play.env_kwargs["words"]) == ("none", None)


def test_what_methods_share_is_for_those_that_read_it(tmp_path: Path) -> None:
    text = """
    world = "alfworld"
    [train]
    steps = 20
    dual_clip = 2.0
    distill = { top_k = 7, support = "student" }
    turnopd.n_min = 3
    grpo.kl = "k1"
    [methods.opd]
    [methods.sampled]
    of = "opd"
    distill.form = "sampled"
    [methods.sage-opd]
    [methods.turnopd]
    [methods.depth]
    of = "turnopd"
    turnopd.weight = "trajectory"
    [methods.grpo]
    grpo.kl_coef = 0.1
    """
    by_method = {cell.method: cell for cell in cells(tmp_path, text).values()}
    for name in ("opd", "turnopd"):
        assert said(by_method[name], "distill.top_k", "distill.support") == [7, "student"]
    # the algorithm lacks it, or another setting leaves it unread
    assert said(by_method["sage-opd"], "distill.top_k") == [7]
    assert said(by_method["sampled"], "distill.form", "distill.top_k", "distill.support") == ["sampled", 50, "teacher"]
    clipped = {name for name, cell in by_method.items() if at(cell.settings, "method.dual_clip") == 2.0}
    assert clipped == {"sampled", "grpo"}
    assert said(by_method["turnopd"], "turnopd.n_min") == [3]
    assert said(by_method["depth"], "turnopd.n_min", "turnopd.weight") != [3, "trajectory"]
    assert said(by_method["grpo"], "grpo.kl") == ["k1"]
    # what a method says itself must be read
    with pytest.raises(SettingsError, match=r"mine\.toml: methods\.sampled: top_k is 3; it needs "):
        cells(tmp_path, text, "methods.sampled.distill.top_k = 3")


def test_a_warm_up_fits_short_runs_unless_it_was_asked_for(tmp_path: Path) -> None:
    short = cells(tmp_path, SHORT, "train.steps = 20")["alfworld-loops/opd-seed0"]
    asked = cells(tmp_path, SHORT, "train.steps = 20", "train.optimizer.lr_warmup = 9")["alfworld-loops/opd-seed0"]
    assert said(short, "optimizer.lr_warmup") + said(asked, "optimizer.lr_warmup") == [4, 9]


def test_evaluations(tmp_path: Path) -> None:
    more = "evaluate = { times = 5, tasks = 7, samples = 2, average = true }"
    cell = cells(tmp_path, SHORT, more)["alfworld-loops/opd-seed0"]
    assert said(cell, "eval_every", "eval_limit", "eval_spread", "eval_samples") == [12, 7, True, 2]
    assert said(cell, "checkpoint_every", "keep_checkpoints") == [12, 4]
    assert said(cells(tmp_path, SHORT)["alfworld-loops/opd-seed0"], "keep_checkpoints") == [2]


def test_models_that_are_made_first(tmp_path: Path) -> None:
    text = """
    evaluate = { times = 2 }
    train.steps = 4
    [worlds.alfworld]
    student = "starts.warm"
    [starts.warm]
    algorithm = "sft"
    steps = 3
    [starts.strong]
    algorithm = "grpo"
    [methods.grpo]
    [methods.opd]
    teacher = "starts.strong"
    """
    by_name = cells(tmp_path, text)
    warm, strong = by_name["alfworld/start-warm"], by_name["alfworld/start-strong"]
    assert (warm.is_start, warm.steps, training(warm).evaluation) == (True, 3, None)
    # the start itself begins with the world's student
    assert training(warm).models.student.parts[-2:] == ("alfworld", "student")
    grpo, opd = by_name["alfworld/grpo-seed0"], by_name["alfworld/opd-seed0"]
    assert (training(grpo).models.student, grpo.needs) == (warm.model, (warm,))
    assert (training(opd).models.student, training(opd).teacher) == (warm.model, strong.model)
    assert list(by_name)[:2] == ["alfworld/start-warm", "alfworld/start-strong"]
    assert (opd.needs, warm.needs, strong.needs) == ((warm, strong), (), ())


def test_an_agent_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    by_name = cells(tmp_path, SHORT + '[methods.model]\nagent = "openai:m"\nbase_url = "http://127.0.0.1:1/v1"\n')
    cell = by_name["alfworld-loops/model-seed1"]
    assert cell.verb == "eval"
    paths = ("agent.kind", "agent.model", "agent.endpoint.base_url", "play.seed", "play.tasks.panel")
    url, panel = "http://127.0.0.1:1/v1", "alfworld-loops-v1"
    assert [at(cell.settings, path) for path in paths] == ["openai", "m", url, 1, panel]


def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    text = """
    [worlds.mine]
    env = "turngym/WebShop-v0"
    split = "train"
    panel = "webshop-quickstart"
    student = "models/s"
    [methods.grpo]
    """
    cell = cells(tmp_path, text)["mine/grpo-seed0"]
    assert said(cell, "play.env.id", "split", "student") == ["turngym/WebShop-v0", "train", "models/s"]


def test_an_algorithm_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entcredit.py").write_text(
        "from turngym.core import Spec\n"
        "from turngym.trainers import AlgorithmSpec\n"
        "from turngym.trainers.algorithms import grpo\n"
        "class Config(Spec):\n"
        '    """Entropy credit."""\n'
        "    power: float = 1.0\n"
        '    """Of the entropy."""\n'
        "ALGORITHM = AlgorithmSpec(\n"
        '    name="entcredit", config=Config, uses=frozenset({"reward"}),\n'
        "    build=lambda config, context: grpo.build(grpo.GrpoConfig(), context),\n"
        ")\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = SHORT + '[methods.mine]\nalgorithm = "entcredit:ALGORITHM"\nentcredit.power = 2.0\n'
    cell = cells(tmp_path, mine)["alfworld-loops/mine-seed0"]
    assert at(cell.settings, "method.entcredit") == {"power": 2.0}
    with pytest.raises(TurngymError, match=r"methods.mine: .*entcredit\.powr.*power"):
        cells(tmp_path, mine.replace("power", "powr"))
    sys.modules.pop("entcredit")


def test_every_row_of_the_study_of_turnopd_trains_what_it_says(tmp_path: Path) -> None:
    study = read_study_file("turnopd", ['worlds = ["webshop"]', "seeds = [5]"])
    by_method = {cell.method: built(cell) for cell in cells_of(study, tmp_path)}
    depth: dict[str, Any] = {name: algorithm.depth for name, algorithm in by_method.items()}
    weight: dict[str, Any] = {name: algorithm.weight for name, algorithm in by_method.items()}
    assert depth["opd"] == FixedDepth(h_max=12)
    # the shop's own schedule
    assert isinstance(depth["tcod"], Curriculum)
    assert (depth["tcod"].schedule.eta, depth["tcod"].schedule.k_max) == (4, 15)
    assert isinstance(depth["turnopd"], AdaptiveDepth)
    assert (depth["turnopd"].config.p, depth["turnopd"].config.probe_share) == (0.8, 1.0)
    assert isinstance(weight["turnopd"], Blend)
    assert (depth["depth-only"], isinstance(weight["depth-only"], Static)) == (depth["turnopd"], True)
    assert (depth["blend-only"], isinstance(weight["blend-only"], Blend)) == (FixedDepth(h_max=12), True)
    assert (depth["hard-turn"], isinstance(weight["hard-turn"], TurnLevel)) == (depth["turnopd"], True)
    assert depth["partial"].config.probe_share == 0.25
    for p in (0.4, 0.6):
        assert (depth[f"p{p}-success"].config.p, depth[f"p{p}-success"].config.use_success) == (p, True)
    for p in (0.4, 0.6, 0.8):
        assert (depth[f"p{p}-all"].config.p, depth[f"p{p}-all"].config.use_success) == (p, False)
    plans = [depth["fixed-6"].plan(depth["fixed-6"].start(), step) for step in (1, 5, 8)]
    assert [plan.cap for plan in plans] == [6, 6, 6]
    assert isinstance(weight["fixed-6"], Static)
    for name in ("guided-opd", "atod", "sage-opd", "grpo-opd"):
        assert (by_method[name].name, depth[name]) == (name, FixedDepth(h_max=12))


@pytest.mark.parametrize(("world", "rate", "turns"), [("alfworld-loops", 1e-3, 48), ("webshop-loops", 2e-5, 30)])
def test_a_cell_learns_at_its_worlds_rate(world: str, rate: float, turns: int, tmp_path: Path) -> None:
    (cell,) = cells(tmp_path, f'world = "{world}"\n[methods.opd]\n').values()
    assert said(cell, "optimizer.lr", "max_turns", "panel") == [rate, turns, f"{world}-v1"]


@pytest.mark.parametrize("name", late(built_in(), "learn", "bench", "paper-luffy"))
def test_the_studies_that_come_along_can_be_run(name: str, tmp_path: Path) -> None:
    study = read_study_file(name, ["seeds = [0]"])
    study_cells = cells_of(study, tmp_path)
    assert study.title
    assert study.file.tables
    assert len({cell.folder for cell in study_cells}) == len(study_cells)


def test_the_list_and_the_commands_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study", "list"]) == 0
    said = capsys.readouterr().out
    assert "bench\n  Distillation, reward, and turns" in said
    assert max(map(len, said.splitlines())) <= 80
    assert main(["study", "run", "paper-luffy", "--print", "--processes", "8", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("torchrun --standalone --nproc-per-node 8 -m turngym train --config") == 18
    assert not list(tmp_path.iterdir()), "printing runs nothing"


def test_an_environment_of_ones_own_has_no_expert(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [worlds.own]
        env = "turngym/ALFWorld-v0"
        student = "models/mine"
        panel = "alfworld-quickstart"
        [methods.grpo-minillm]
        teacher = "models/mine"
        text = "expert"
        """
    )
    with pytest.raises(TurngymError, match="in own: text is 'expert', and only a built-in world has an expert; valid"):
        cells_of(read_study_file(path), tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('metods = "x"', "there is no setting 'metods'. Did you mean 'methods'"),
        ('baseline = "odp"', "baseline: there is no 'odp'. Did you mean 'opd'"),
        ('world = "alfworld-lops"', "there is no world 'alfworld-lops'. Did you mean 'alfworld-loops'"),
        ('worlds = ["alfworld"]', "valid is one of `world`"),
        ("seeds = [0, 0]", "seeds is [0, 0]; valid: different whole numbers"),
        ("methods = {}", ""),
        ("methods.grpo.optimizer.lrr = 1.0", "methods.grpo: there is no setting 'optimizer.lrr'"),
        ("methods.grpo.turnopd.weight = 'turn'", "there is no setting turnopd. It belongs to turnopd."),
        ("methods.sage-opd.distill.support = 'student'", "distill.support. It belongs to opd, "),
        ('methods.grpo.against = "grpo"', "methods.grpo.against: there is no 'grpo'"),
        ('methods.grpo.of = "grpo"', "goes round in a circle"),
        ("methods.opd.depth = 0", "methods.opd: depth is 0"),
        ("methods.grpo.eval_every = 3", "methods.grpo.eval_every: write it as times in [evaluate]"),
        ("methods.grpo.seed = 3", "methods.grpo.seed: it is no setting of a study; `seeds` lists them"),
        ('methods.grpo.student = "starts.warm"', "student: there is no 'warm'"),
        *((f"methods.'{name}' = {{}}", "names a folder") for name in ("a/b", "..", "a\\b")),
        ("worlds.'../../esc' = { world = 'search' }", "valid is one of `world`"),
        ("methods.opd.in.webshp.steps = 3", "methods.opd.in: there is no 'webshp'"),
        ("methods.opd.worlds = ['webshp']", "methods.opd.worlds: there is no 'webshp'"),
        *(
            (f"starts.warm = {{ algorithm = 'sft', {key} = 3 }}", f"starts.warm.{key}: a start is not compared")
            for key in ("seeds", "worlds", "group", "against", "agent")
        ),
        *((f"train.optimizer = {value}", "optimizer") for value in ("3", "[]", "['lr']")),
        ("methods.grpo.episodes = 12", "grpo in alfworld-loops: 12 episodes per step are not whole groups of 8"),
        ("train.distill.topk = 3", "train: there is no setting 'distill.topk'. Did you mean 'distill.top_k'"),
        ("starts.warm = { algorithm = 'sft', stepps = 3 }", "starts.warm: there is no setting 'stepps'"),
        ("starts.warm.algorithm = 'sftt'", "starts.warm: "),
        ("evaluate.samples = 0", "evaluate: samples is 0"),
        ("evaluate = { times = 2, average = true }", "evaluate.average needs 4 evaluations"),
        ("nonsense", "--set 'nonsense' is not TOML"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHORT)
    status = main(["study", "run", str(path), "--out", str(tmp_path / "out"), "--set", change, "--print"])
    error = capsys.readouterr().err.strip()
    if not said:
        assert status == 0
        return
    assert status == 2
    assert len(error.splitlines()) == 1
    assert said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("worlds", "said"),
    [
        ("worlds.'../../esc' = { world = 'search' }", "worlds '../../esc' names a folder"),
        ("worlds.a.world = ['b']", "there is no world ['b']"),
        ("worlds = 3", "worlds is 3"),
        ("worlds.alfworld = 3", "worlds is {'alfworld': 3}"),
    ],
)
def test_a_world_is_named_and_lies_within_the_study(worlds: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=re.escape(said)):
        cells(tmp_path, f"{worlds}\n[methods.opd]\n")


def test_a_world_that_a_set_leaves_out_may_have_settings(tmp_path: Path) -> None:
    text = "train.steps = 20\n[worlds.alfworld]\n[worlds.search]\n[methods.opd]\nin.search.episodes = 8\n"
    assert list(cells(tmp_path, text, "worlds = ['alfworld']")) == ["alfworld/opd-seed0"]


def test_no_two_cells_share_a_folder(tmp_path: Path) -> None:
    text = (
        SHORT
        + "student = 'starts.a-seed0'\n[starts.a-seed0]\nalgorithm = 'sft'\n[methods.start-a]\nalgorithm = 'opd'\n"
    )
    with pytest.raises(SettingsError, match="two cells would be alfworld-loops/start-a-seed0"):
        cells(tmp_path, text)
    # nor where letters are not told apart by their case
    with pytest.raises(SettingsError, match="two cells would be alfworld-loops/opd-seed0 and alfworld-loops/OPD-seed0"):
        cells(tmp_path, SHORT + "[methods.OPD]\nalgorithm = 'opd'\n")
    with pytest.raises(SettingsError, match="two cells would be "):
        cells(tmp_path, "[worlds.shop]\nworld = 'webshop'\n[worlds.Shop]\nworld = 'webshop'\n[methods.opd]\n")


def test_a_place_without_a_teacher_is_refused_for_who_distills(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f"""title = "own"
        [worlds.own]
        env = "turngym/ALFWorld-v0"
        panel = "alfworld-quickstart"
        student = "{WORLDS["alfworld"].checkpoint("student")}"
        [methods.grpo]
        [methods.opd]
        """
    )
    with pytest.raises(SettingsError, match="opd in own: opd distills from a teacher"):
        cells_of(read_study_file(path), tmp_path / "out")
    cells_of(read_study_file(path, ["methods.opd.teacher = 'folder'"]), tmp_path / "out")


OWN = """from turngym.core import Spec
from turngym.trainers.algorithm_spec import AlgorithmSpec
class Own(Spec):
    "Reads text."
def build(config, context):
    return context.tokenizer.encode("text")
ALGORITHM = AlgorithmSpec(name="own", config=Own, build=build)
"""


def test_an_own_method_may_read_the_tokenizer_which_no_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_method.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.toml"
    path.write_text(SHORT)
    assert cells_of(read_study_file(path, ['methods.own.algorithm = "own_method:ALGORITHM"']), tmp_path / "out")


def test_a_world_that_builds_on_one_may_have_another_environment(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'train = { steps = 10 }\n[worlds.mine]\nworld = "alfworld"\nenv = "turngym/WebShop-v0"\n'
        'panel = "webshop-quickstart"\n[methods.opd]\n'
    )
    (cell,) = cells_of(read_study_file(path), tmp_path / "out")
    assert isinstance(cell.spec, TrainConfig)
    assert cell.spec.play.env.id == "turngym/WebShop-v0"
    # the world's models stay; what it says of its own environment does not
    assert cell.spec.models.student.parts[-2:] == ("alfworld", "student")
    assert "config" not in cell.spec.play.env_kwargs
    assert cell.spec.play.env.split != "generated"
