"""The search environment: the contract, Search-R1's turns, budgets, failures, snapshots."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import search_toy as toy

from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.core.episode import Status
from turngym.core.errors import EnvBackendError, TaskError, TurngymError
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.turn_protocol import INVALID
from turngym.envs.testing import EnvContract
from turngym.retrieval.core import Hit


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield toy.write_toy(Path(folder))


def make(files: dict[str, str], **options: Any) -> ActionGuard:
    return guard_of(gym.make("turngym/Search-v0", **{**files, **options}))


class TestToyFiles(EnvContract):
    env_id = "turngym/Search-v0"
    make_kwargs: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _files(self, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "make_kwargs", files)

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        return guard.base.sample_action(rng) or "<answer></answer>"


@pytest.mark.long
class TestRealQuestions(EnvContract):
    env_id = "turngym/Search-v0"
    make_kwargs: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _data(self, search_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "make_kwargs", {"source": "multihop", "data": str(search_data)})


def test_a_whole_episode(files: dict[str, str]) -> None:
    env = make(files)
    observation, info = env.reset(options={"task": "hotpotqa/a"})
    assert observation == "Question: Where was the director of the 1961 film The Glass Orchard from?"
    assert info["admissible_actions"] is None
    assert info["admissible_templates"] == ["<search>query</search>", "<answer>answer</answer>"]
    step = env.step("<think>Who directed it?</think> <search> 1961 film director </search> I wait.")
    lines = step[0].split("\n")
    assert lines[2].startswith('<information>Doc 1(Title: "The Glass Orchard") The Glass Orchard is a 1961 film')
    assert step[0].startswith("\n\n<information>")
    assert step[0].endswith("</information>\n\n")
    assert (step[1], step[2], step[4]["searches"], step[4]["gold_found"]) == (0.0, False, 1, 1.0)
    assert step[4]["answer_f1"] == 0.0
    assert step[4]["action"] == "<search>1961 film director</search>"
    last = env.step("<think>So.</think><answer>the  Tarnby.</answer>")
    assert (last[0], last[1], last[2], last[4]["success"]) == ("", 1.0, True, True)
    assert last[4]["answer_f1"] == 1.0


def test_questions_get_their_mark_and_the_category_is_the_data_source(files: dict[str, str]) -> None:
    env = make(files)
    observation, info = env.reset(options={"task": "musique/b"})
    assert observation.endswith("was born?")
    assert info["category"] == "musique"


def test_invalid_responses_get_the_published_text_and_cost_a_turn(files: dict[str, str]) -> None:
    env = make(files, max_turns=3)
    env.reset(options={"task": "popqa/c"})
    observation, reward, _, _, info = env.step("I do not know")
    assert observation == INVALID == env.base.invalid_observation
    assert "put the query between <search> and </search>" in observation
    assert (reward, info["verdict"], info["turn"], info["env_steps"]) == (0.0, "inadmissible", 1, 0)
    assert env.step("<search> </search>")[4]["verdict"] == "inadmissible"
    bare = SearchEnv(**files)
    bare.reset(options={"task": "popqa/c"})
    assert bare.step("I do not know")[0] == INVALID
    polite = make(files, on_invalid="reject")
    polite.reset(options={"task": "popqa/c"})
    assert "holds no <search>query</search>" in polite.step("I do not know")[0]


def test_the_last_turn_cannot_search(files: dict[str, str]) -> None:
    shelf = toy.Shelf(toy.passages())
    env = make(files, retriever=shelf, max_turns=3, on_invalid="reject")
    env.reset(options={"task": "popqa/c"})
    assert [env.step(f"<search>{word}</search>")[4]["verdict"] for word in ("one", "two")] == ["ok", "ok"]
    assert env.describe()["admissible_templates"] == ["<answer>answer</answer>"]
    observation, _, _, truncated, info = env.step("<search>three</search>")
    assert "the last turn cannot search; only <answer>answer</answer> is possible" in observation
    assert (truncated, info["verdict"], len(shelf.asked)) == (True, "inadmissible", 2)
    env.reset(options={"task": "popqa/c"})
    assert env.describe()["admissible_templates"][0] == "<search>query</search>"


@pytest.mark.parametrize("channel", [None, "text", "tool"])
def test_the_last_turn_cannot_search_after_invalid_ones_either(files: dict[str, str], channel: str | None) -> None:
    """Search-R1 counts turns, not searches: what comes back in the last one could not be answered."""
    shelf = toy.Shelf(toy.passages())
    env = make(files, retriever=shelf, max_turns=3, channel=channel)
    tool = '<tool_call>{"name": "search", "arguments": {"query": "Tarnby"}}</tool_call>'
    search = tool if channel == "tool" else "<search>Tarnby</search>"
    env.reset(options={"task": "popqa/c"})
    verdicts = [env.step(text)[4]["verdict"] for text in ("I wonder.", search)]
    assert verdicts == ["malformed" if channel else "inadmissible", "ok"]
    assert env.describe()["admissible_templates"] == ["<answer>answer</answer>"]
    assert str(env.expert_action()).startswith("<answer>")
    moved = pickle.loads(pickle.dumps(env))
    for last in (env, moved):
        _, _, _, truncated, info = last.step(search)
        assert (truncated, info["verdict"], info["searches"], len(shelf.asked)) == (True, "inadmissible", 1, 1)
    # a search that failed was no turn: the same turn is played again
    env = make(files, retriever=shelf, max_turns=2, channel=channel)
    env.reset(options={"task": "popqa/c"})
    shelf.dead = True
    for _ in range(3):
        with pytest.raises(EnvBackendError):
            env.step(search)
    shelf.dead = False
    assert env.step(search)[4]["verdict"] == "ok"


@pytest.mark.parametrize("found", [None, [], [[], []], [None], [["text"]], [[SimpleNamespace(score=1.0)]]])
def test_what_a_retriever_of_ones_own_gives_is_hits_or_a_failed_search(files: dict[str, str], found: Any) -> None:
    class Odd(toy.Shelf):  # type: ignore[misc, name-defined]
        def search(self, queries: Any, k: int) -> Any:
            return found

    env = make(files, retriever=Odd(toy.passages()))
    env.reset(options={"task": "popqa/c"})
    with pytest.raises(EnvBackendError, match="the retriever"):
        env.step("<search>more</search>")


def test_both_limits_of_searches_hold(files: dict[str, str]) -> None:
    env = make(files, max_turns=6, max_searches=1, on_invalid="reject")
    env.reset(options={"task": "popqa/c"})
    env.step("<search>one</search>")
    assert "no search is left after 1" in env.step("<search>two</search>")[0]
    env = make(files, max_turns=3, search_turns=3)
    env.reset(options={"task": "popqa/c"})
    assert [env.step("<search>one</search>")[4]["searches"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("topk", "5"), ("topk", 0), ("max_searches", 1.5), ("search_turns", -1), ("doc_tokens", "x"), ("doc_tokens", 0)],
)
def test_limits_are_whole_numbers(files: dict[str, str], name: str, value: Any) -> None:
    with pytest.raises(TaskError, match=f"{name} is {value!r}; it must be"):
        SearchEnv(**files, **{name: value})


def test_a_repeated_query_has_no_effect(files: dict[str, str]) -> None:
    env = make(files)
    env.reset(options={"task": "popqa/c"})
    first, second = (env.step("<search>Tarnby</search>") for _ in range(2))
    assert first[0] == second[0]
    assert (first[4]["verdict"], second[4]["verdict"]) == ("ok", "no_effect")


def test_finding_nothing_is_an_observation_and_failing_is_an_error(files: dict[str, str]) -> None:
    shelf = toy.Shelf()
    env = make(files, retriever=shelf)
    env.reset(options={"task": "popqa/c"})
    observation = env.step("<search>nothing like it</search>")[0]
    assert observation == "\n\n<information>No passage was found.</information>\n\n"
    state = env.get_state()
    shelf.dead = True
    with pytest.raises(EnvBackendError, match=r"popqa/c: .*no answer from the shelf"):
        env.step("<search>more</search>")
    shelf.dead = False
    env.set_state(state)
    assert env.step("<search>more</search>")[4]["searches"] == 2


def test_episodes_say_that_the_retriever_died(files: dict[str, str]) -> None:
    shelf = toy.Shelf(toy.passages())
    jobs = [Job(task_id=task_id) for task_id in make(files).task_ids()]
    alive = rollout(jobs, lambda: make(files, retriever=shelf), ExpertAgent())
    assert [episode.status for episode in alive] == [Status.COMPLETED] * 4

    class Dying(toy.Shelf):  # type: ignore[misc, name-defined]
        def search(self, queries: Any, k: int) -> Any:
            self.dead = len(self.asked) >= 3
            return super().search(queries, k)

    dying = Dying(toy.passages())
    episodes = rollout(jobs, lambda: make(files, retriever=dying), ExpertAgent(), slots=1)
    assert [episode.status.value for episode in episodes] == ["completed", "error_env", "error_env", "error_env"]
    assert "no answer from the shelf within 20 s" in episodes[1].meta["error"]
    assert [len(episode.turns) for episode in episodes] == [3, 1, 0, 0]


@pytest.mark.parametrize("channel", ["text", "tool"])
def test_agents_play_over_both_channels(files: dict[str, str], channel: str) -> None:
    jobs = [Job(task_id=task_id) for task_id in make(files).task_ids()]
    for agent in (ExpertAgent(), ExpertAgent(noise=0.5, mistakes=0.5), RandomAgent()):
        episodes = rollout(jobs, lambda: make(files, channel=channel), agent)
        assert {episode.status for episode in episodes} <= {Status.COMPLETED, Status.TRUNCATED_TURNS}
    plain = rollout(jobs, lambda: make(files, channel=channel), ExpertAgent())
    assert [episode.success for episode in plain] == [True] * 4
    first = plain[0].turns[0].response
    assert first.startswith("<search>" if channel == "text" else '<tool_call>\n{"name": "search"')
    assert plain[0].turns[-1].response == "<answer>Tarnby</answer>"


def test_the_format_reward_reads_whole_responses(files: dict[str, str]) -> None:
    def play(*responses: str, **options: Any) -> float:
        env = make(files, reward="format", format_scores=(0.2, 0.1, 0.05), **options)
        env.reset(options={"task": "hotpotqa/a"})
        return [env.step(response)[1] for response in responses][-1]

    think = "<think>hm</think>\n"
    assert play(f"{think}<search>Velma Orr</search> tail", f"{think}<answer>Tarnby</answer>") == 1.0
    assert play("<search>Velma Orr</search>", f"{think}<answer>Tarnby</answer>") == 0.8
    assert play(f"{think}<search>Velma Orr</search>", f"{think}<answer>Ostrel</answer>") == 0.25
    assert play(f"{think}<search>Haldia</search>", f"{think}<answer>Leck</answer>") == 0.2
    assert play("<answer>Leck</answer>") == 0.1
    assert play("no tags", f"{think}<answer>Tarnby</answer>") == 0.8
    call = '<tool_call>{"name": "search", "arguments": {"query": "Velma Orr"}}</tool_call>'
    assert play(think + call, f"{think}<answer>Tarnby</answer>", channel="tool") == 1.0
    assert play(f"{think}<search>Velma Orr", f"{think}<answer>Tarnby", channel="text") == 1.0


def test_containment_and_the_published_rule(files: dict[str, str]) -> None:
    for options, text, reward in (
        ({"reward": "em"}, "in Tarnby", 0.0),
        ({"reward": "sub_em"}, "in Tarnby", 1.0),
        ({"strict_compat": True}, "Tarnby", 1.0),
        ({"strict_compat": True}, "Lisbon", 0.0),
    ):
        env = make(files, **options)
        env.reset(options={"task": "hotpotqa/a"})
        assert env.step(f"<answer>{text}</answer>")[1] == reward, (options, text)


@pytest.mark.parametrize("text", [None, "search once more", "search again the author."])
def test_who_reads_searches_again_only_where_it_is_told_to(text: str | None) -> None:
    env = gym.make("turngym/Search-v0", source="world", config="tiny", topk=1, split="train").unwrapped
    found: dict[int, list[bool]] = {}
    for seed in range(12):
        env.reset(seed=seed)
        player, over, actions = env.make_player("reading"), False, []
        if text is not None:
            player.read(text)
        while not over:
            actions.append(player.act())
            over = env.step(actions[-1])[2]
            player.observe(actions[-1])
        hops = len(env.question.hops)
        queries = [f"<search>{query}</search>" for query in env.question.hops]
        assert actions[:-1] == (queries if text and "again" in text else queries[:1])
        assert actions[-1].startswith("<answer>")
        found.setdefault(min(hops, 2), []).append(env.success)
    assert all(found[1])
    assert all(found[2]) == (text is not None and "again" in text)


def test_who_reads_answers_when_it_may_search_no_more() -> None:
    env = gym.make("turngym/Search-v0", source="world", config="tiny", topk=1, split="train", max_searches=1).unwrapped
    env.reset(seed=next(seed for seed in range(12) if env.reset(seed=seed) and len(env.question.hops) > 1))
    player = env.make_player("reading")
    player.read("search again")
    env.step(player.act())
    assert player.act().startswith("<answer>")


def test_players(files: dict[str, str]) -> None:
    found = {}
    for task_id in make(files).task_ids():
        env = make(files)
        env.reset(options={"task": task_id})
        player = env.base.make_player("single-shot")
        while not env.step(player.act() or "")[2]:
            player.observe("")
        found[task_id] = (env.base.describe()["searches"], env.success)
    assert found["popqa/c"] == found["popqa/d"] == (1, True)
    with pytest.raises(Exception, match="Did you mean 'single-shot'"):
        env.base.make_player("single-shoot")
    rng = np.random.default_rng(0)
    env.reset(options={"task": "popqa/c"})
    assert {str(env.base.plausible_mistake(rng)) for _ in range(20)} >= {"<search></search>"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"doc_format": "search-r1"}, "Did you mean 'search_r1'"),
        ({"reward": "f1"}, "reward is 'f1'; valid: em, sub_em, format"),
        ({"format_scores": (2, 0, 0)}, "coefficient s is 2"),
        ({"split": "dev"}, "has no split 'dev'; its splits are: eval"),
        ({"source": "hotpot"}, "Did you mean 'hotpotqa'"),
        ({"source": "nowhere.jsonl"}, "no question file"),
    ],
)
def test_wrong_options_are_said(files: dict[str, str], options: dict[str, Any], text: str) -> None:
    with pytest.raises(TaskError, match=text):
        make(files, **options)


def test_questions_without_a_corpus_need_a_retriever(files: dict[str, str]) -> None:
    env = make({"source": files["source"]})
    env.reset(options={"task": "popqa/c"})
    with pytest.raises(TaskError, match=r"popqa questions .*retriever="):
        env.step("<search>Tarnby</search>")
    spec = make({"source": files["source"]}, retriever=f"bm25:{files['corpus']}")
    spec.reset(options={"task": "popqa/c"})
    assert "river Leck" in spec.step("<search>Tarnby</search>")[0]
    assert spec.task.sha256 == env.task.sha256 != make(files).base.source.name


class Backwards:
    fingerprint = "backwards"

    def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        return list(reversed(hits))


def test_passages_can_be_ordered_again(files: dict[str, str]) -> None:
    shelf = toy.Shelf(toy.passages())
    for given in ({}, {"retriever": shelf}, {"retriever": f"bm25:{files['corpus']}"}):
        found = {}
        for rerank in (None, Backwards()):
            env = make(files, rerank=rerank, topk=20, **given)
            env.reset(options={"task": "hotpotqa/a"})
            env.step("<search>film Orchard Orr Maro</search>")
            found[rerank is None] = [hit.passage.id for hit in env.base.scene.hits]
        assert len(found[True]) > 2
        assert found[False] == found[True][::-1]
    env = make(files, rerank="coverage")
    env.reset(options={"task": "hotpotqa/a"})
    env.step("<search>1961 film Glass Orchard director</search>")
    assert 1 / 11 < env.base.scene.hits[0].score < 1 / 11 + 0.11
    env = make(files, rerank="covrage")
    env.reset(options={"task": "hotpotqa/a"})
    with pytest.raises(TurngymError, match="no reranker 'covrage'"):
        env.step("<search>film</search>")


def test_very_long_queries_are_cut_not_refused(files: dict[str, str]) -> None:
    shelf = toy.Shelf(toy.passages())
    env = make(files, retriever=shelf, topk=2)
    env.reset(options={"task": "popqa/c"})
    env.step(f"<search>{'x' * 100_000}</search>")
    assert [(len(query), k) for query, k in shelf.asked] == [(2000, 2)]
