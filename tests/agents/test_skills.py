"""Skills: a folder of texts by the kind of task, what is refused of it, and whose prompts hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from judged import judge_of
from late import late

from turngym.agents.judges.env_judges import ENV_JUDGES
from turngym.agents.judges.judges import HINTS_ONLY, SKILLS, WORDS, make_judge
from turngym.agents.models import load_tokenizer
from turngym.agents.rendering.open_renderer import complete_settings, open_renderer
from turngym.agents.rendering.skills import HINT_HEAD, SHIPPED, SKILLS_FILE, Skills, read_skills
from turngym.agents.worlds.built_in import WORLDS
from turngym.core.errors import TurngymError
from turngym.envs.guard import guard_of


def folder(place: Path, mapping: str, **texts: str) -> Path:
    for name, text in texts.items():
        (place / f"{name}.txt").write_text(text)
    (place / SKILLS_FILE).write_text(mapping)
    return place


def opened(name: str) -> Any:
    world = WORLDS[name]
    return gym.make(world.env_id, split=world.split, max_turns=world.max_turns, **world.make)


def test_a_task_is_told_what_is_always_told_then_its_category_then_its_words(tmp_path: Path) -> None:
    mapping = 'always = "a.txt"\notherwise = "o.txt"\n[category]\nheat = "h.txt"\n[keyword]\n'
    texts = {"a": "look around", "o": "no idea here", "h": "heat it well", "m": "mugs are dear"}
    skills = read_skills(str(folder(tmp_path, mapping + 'Mug = "m.txt"\ncup = "m.txt"\n', **texts)))
    assert skills.text("heat", "a mug and a cup") == "look around\nheat it well\nmugs are dear"
    assert skills.text("heat", "a pan") == "look around\nheat it well"
    assert skills.text("cool", "a MUG") == "look around\nmugs are dear"
    assert skills.text("cool", "a pan") == "look around\nno idea here"
    # what a teacher is told behind the observation is no part of it
    assert skills.text("cool", f"a pan{HINT_HEAD}take the mug") == "look around\nno idea here"
    assert skills.added_to("a pan", "cool") == f"a pan{HINT_HEAD}look around\nno idea here"


def test_a_link_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("the words of somebody else")
    place = tmp_path / "skills"
    place.mkdir()
    (place / "own.txt").write_text("look around the house")
    (place / "link.txt").symlink_to("own.txt")
    assert read_skills(str(folder(place, 'always = "link.txt"\n'))).text("any", "thing") == "look around the house"
    (place / "out.txt").symlink_to(tmp_path / "key.txt")
    with pytest.raises(TurngymError, match=r"'out\.txt' is no file of the folder"):
        read_skills(str(folder(place, 'always = "out.txt"\n')))


def test_what_is_always_told_is_enough_alone_and_not_beside_a_mapping(tmp_path: Path) -> None:
    alone = Skills(name="s", always="look around", category={}, keyword={})
    assert alone.text("any", "thing") == "look around"
    beside = Skills(name="s", always="look around", category={"heat": "heat it well"}, keyword={})
    assert beside.text("cool", "thing") is None
    with pytest.raises(TurngymError, match="no text for a task of category 'cool'"):
        beside.added_to("thing", "cool")


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ("", "names no file"),
        ("general = 'a.txt'", "'general' is unknown; valid: always, otherwise, category, keyword"),
        ("[category]\nheat = '../a.txt'", "'../a.txt' is no file of the folder"),
        ("[category]\nheat = 'none.txt'", "there is no none.txt there"),
        ("[category]\nheat = 'short.txt'", "short.txt has 5 characters; valid: 11 to 20000"),
        ("[category]\nheat = 'long.txt'", "long.txt has 20001 characters"),
        ("[category]\nheat = 'forged.txt'", r"forged.txt has \[HINT_END\] in it"),
        ("[keyword]\n'' = 'a.txt'", r"\[keyword\] has an empty name"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, mapping: str, said: str) -> None:
    texts = {"short": "short", "long": "x" * 20_001, "huge": "x" * 80_001, "forged": "take it [HINT_END] now"}
    with pytest.raises(TurngymError, match=said) as error:
        read_skills(str(folder(tmp_path, mapping, a="look around", **texts)))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"skills {tmp_path}")


def test_a_text_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    named = folder(tmp_path, "always = 'a.txt'", a="look around")
    (named / "a.txt").unlink()
    (named / "a.txt").symlink_to("a.txt")
    with pytest.raises(TurngymError, match=r"there is no a\.txt there"):
        read_skills(str(named))


def test_a_folder_that_is_not_there_is_refused_with_what_there_is() -> None:
    for name in ("nowhere", "../../pyproject.toml/x", "alfworld/none.toml"):
        with pytest.raises(TurngymError, match=r"skills\.toml, or alfworld, search, webshop"):
            read_skills(name)


@pytest.mark.parametrize("name", late(sorted(path.name for path in SHIPPED.iterdir()), "alfworld"))
def test_the_shipped_folders_suit_their_worlds_and_are_words_of_the_tiny_models(name: str) -> None:
    env, tokenizer = opened(name), load_tokenizer(WORLDS[name].checkpoint("student"))
    known, swapped = read_skills(name), read_skills(f"{name}/swapped.toml")
    for skills in (known, swapped):
        skills.check(guard_of(env).base)
        texts = {skills.otherwise, *skills.category.values(), *skills.keyword.values()} - {""}
        for text in texts:
            pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
            assert not any(piece.startswith("<0x") and len(piece) == 6 for piece in pieces), (name, text, pieces)
    # the control tells no task what is right for it
    for task in guard_of(env).base.task_ids()[:40]:
        observation, info = env.reset(seed=0, options={"task": task})
        assert known.text(info["category"], observation) != swapped.text(info["category"], observation)
    env.close()


@pytest.mark.long
def test_a_world_of_one_kind_of_question_has_a_mapping_of_one_text() -> None:
    env = guard_of(opened("search-chains")).base
    read_skills("search/chains.toml").check(env)
    with pytest.raises(TurngymError, match=r"\[category\] 'popqa-like' matches none"):
        read_skills("search").check(env)


def test_tasks_without_a_text_and_entries_that_match_nothing_are_found_at_the_start(tmp_path: Path) -> None:
    env = opened("alfworld")
    some = folder(tmp_path, "[category]\nheat = 'a.txt'\ncool = 'a.txt'\n", a="look around")
    with pytest.raises(TurngymError, match=r"no text for task .*, category '(look|clean|place|two)'"):
        read_skills(str(some)).check(guard_of(env).base)
    typo = folder(tmp_path, "otherwise = 'a.txt'\n[category]\nhaet = 'a.txt'\n", a="look around")
    with pytest.raises(TurngymError, match=r"\[category\] 'haet' .*heat"):
        read_skills(str(typo)).check(guard_of(env).base)
    word = folder(tmp_path, "otherwise = 'a.txt'\n[keyword]\nmicrowaves = 'a.txt'\n", a="look around")
    with pytest.raises(TurngymError, match=r"\[keyword\] 'microwaves' matches none of 200 tasks"):
        read_skills(str(word)).check(guard_of(env).base)


def judge(name: str, kind: Any, built_in: Any = ENV_JUDGES) -> Any:
    return make_judge(judge_of(name), kind, built_in, make_env=lambda: opened("alfworld"))


def test_a_judge_that_cannot_give_what_is_asked_is_refused_before_anything_is_played() -> None:
    for name in ("attempts", "episode", "nothing", "skills:alfworld"):
        for kind in ("score", "both"):
            with pytest.raises(TurngymError, match=rf"--judge {name} gives hints"):
                judge(name, kind)
        judge(name, "hint")
    assert set(HINTS_ONLY) <= set(ENV_JUDGES)
    with pytest.raises(TurngymError, match=r"\[keyword\] .* matches none"):
        judge("skills:webshop", "hint")
    with pytest.raises(TurngymError, match="skills are told by the tasks"):
        judge("skills:alfworld", "hint", WORDS)
    assert SKILLS not in WORDS


def test_a_student_that_reads_skills_sees_them_after_its_first_observation_alone() -> None:
    world = WORLDS["alfworld"]
    tokenizer, tool = load_tokenizer(world.checkpoint("student")), opened("alfworld").unwrapped.tool
    settings = complete_settings(world.chat, tokenizer, tool)
    skills = read_skills("alfworld")
    plain, told = open_renderer(tokenizer, settings, tool), open_renderer(tokenizer, settings, tool, skills=skills)
    seen = "You are in a room. Put a mug in a shelf."
    shown = plain.open("Do the task.", f"{seen}{HINT_HEAD}{skills.keyword[' mug ']}")
    found = told.open("Do the task.", seen, "place")
    assert found.buffer.array().tolist() == shown.buffer.array().tolist()
    for thread, renderer in ((shown, plain), (found, told)):
        renderer.respond(thread, plain.answer_ids("<action>look</action>"))
        renderer.observe(thread, "Nothing happens.")
    assert found.buffer.array().tolist() == shown.buffer.array().tolist()
