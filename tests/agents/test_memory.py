"""What the agent is shown of an episode: exact prompts, the ids that stand for them, and training on such episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import SessionPool, load_world
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.agent import Conversation
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.memory import ALL, Memory, PastTurn, chat_messages
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.errors import AgentError, TurngymError
from turngym.envs.channels import TextChannel
from turngym.trainers import train
from turngym.trainers.batch import pack

LISTING = "\nAdmissible actions:\n- open door 2\n- wait"
PAST = (
    PastTurn(observation="You see 3 doors.", response="<think>a</think><action>wait</action>", action="wait"),
    PastTurn(observation="Nothing changes." + LISTING, response="hm", action=None, listing=LISTING),
    PastTurn(
        observation="Try again.",
        response="<think>The first\none.</think>\n<action>open door 1</action>",
        action="open door 1",
        thought="The first\none.",
    ),
)


def test_a_window_is_the_task_the_last_turns_and_the_present_observation() -> None:
    assert Memory("window:2").prompt("Open every door.", PAST, "door 1 is open") == (
        "Open every door.\n"
        "\n"
        "Turns taken: 3. The last 2, oldest first:\n"
        "Observation 2: Nothing changes.\n"
        "Action 2: (no action could be read)\n"
        "Observation 3: Try again.\n"
        "Action 3: open door 1\n"
        "\n"
        "Now turn 4. Observation 4: door 1 is open"
    )


def test_a_window_is_no_longer_than_the_episode_and_may_be_empty() -> None:
    assert Memory("window:2").prompt("T", (), "You see 3 doors.") == "You see 3 doors."
    assert Memory("window:5").prompt("T", PAST[:1], "o") == (
        "T\n\nTurns taken: 1. The last 1, oldest first:\nObservation 1: You see 3 doors.\nAction 1: wait\n\n"
        "Now turn 2. Observation 2: o"
    )
    assert Memory("window:0").prompt("T", PAST, "o") == "T\n\nTurns taken: 3.\n\nNow turn 4. Observation 4: o"


def test_a_react_transcript_has_every_thought_action_and_observation() -> None:
    assert Memory("react").prompt("T", PAST, "door 1 is open") == (
        "You see 3 doors.\n"
        "Action 1: wait\n"
        "Observation 1: Nothing changes.\n"
        "Action 2: (no action could be read)\n"
        "Observation 2: Try again.\n"
        "Thought 3: The first\none.\n"
        "Action 3: open door 1\n"
        "Observation 3: door 1 is open"
    )


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    for name in ("window", "window:-1", "window:x", "windows:2", ""):
        with pytest.raises(TurngymError, match=r"memory .* is unknown"):
            Memory(name)
    with pytest.raises(TurngymError, match="Did you mean"):
        ChatSettings(memory="raect")


def test_chat_messages_for_agents_that_speak_in_text() -> None:
    assert chat_messages(ALL, "S", "T", PAST[:1], "o") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "You see 3 doors."},
        {"role": "assistant", "content": "<think>a</think><action>wait</action>"},
        {"role": "user", "content": "o"},
    ]
    windowed = chat_messages(Memory("window:0"), "", "T", PAST[:1], "o")
    assert windowed == [{"role": "user", "content": "T\n\nTurns taken: 1.\n\nNow turn 2. Observation 2: o"}]


class Recorder(ModelAgent):
    """Keeps what it was shown as messages."""

    def respond(self, waiting: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), *(row.messages(self.renderer.memory) for row in waiting)]
        return super().respond(waiting)


@pytest.mark.parametrize("name", ["window:2", "react"])
@pytest.mark.parametrize("shown", [False, True])
def test_every_turn_is_a_segment_with_exactly_its_prompt(
    name: str, shown: bool, make_tokenizer: Any, make_policy: Any, make_doors: Any
) -> None:
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer, memory=Memory(name))
    policy = make_policy(tokenizer, renderer.template.end_id)
    agent = Recorder(policy, renderer, TextChannel())
    (episode,) = rollout([Job(task_id="doors/3", seed=1)], make_doors(max_turns=6, show_admissible=shown), agent)
    assert len(episode.segments) == episode.depth > 3
    assert [turn.segment for turn in episode.turns] == list(range(episode.depth))
    for turn, messages in zip(episode.turns, agent.seen, strict=True):
        wanted = renderer.template.render(messages)
        assert renderer.template.decode(episode.prompt_ids(turn).tolist()) == wanted
        assert turn.prompt_span == (0, len(episode.prompt_ids(turn)))
        # the present list alone, whole
        assert wanted.count("Admissible actions:") == shown
        assert turn.observation in wanted
        assert [message["role"] for message in messages] == ["system", "user"]
    text = agent.seen[3][1]["content"]
    if name == "window:2":
        assert text.startswith("You see 3 doors.")  # the environment has no statement: the first observation, whole
        assert "\nTurns taken: 3. The last 2, oldest first:\nObservation 2: " in text
        assert f"\nAction 3: {episode.turns[2].action}\n" in text
    # sessions of segments that nobody continues are given back
    assert len(policy.released) == episode.depth


def test_demonstrations_are_written_into_windows_and_become_rows(make_tokenizer: Any, make_doors: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(), memory=Memory("window:1"))
    (episode,) = rollout([Job(task_id="doors/3")], make_doors(), ExpertAgent(renderer))
    assert episode.success
    assert len(episode.segments) == episode.depth == 3
    batch = pack([episode], origins=("demonstration",))
    assert (batch.rows, batch.tokens) == (3, sum(turn.response_length for turn in episode.turns))


@pytest.mark.parametrize(
    ("env_id", "statement"),
    [
        ("turngym/ALFWorld-v0", "Your task is to: examine the pillow with the desklamp."),
        ("turngym/Search-v0", "Question: "),
        ("turngym/WebShop-v0", "Instruction: "),
    ],
)
def test_the_statement_stands_in_the_first_observation(env_id: str, statement: str) -> None:
    import gymnasium as gym

    env: Any = gym.make(env_id)
    observation, _ = env.reset(seed=0)
    assert env.unwrapped.statement.startswith(statement)
    assert env.unwrapped.statement.partition(": ")[2] in observation


def test_a_hint_behind_the_list_stays() -> None:
    turn = PastTurn(observation="o" + LISTING + "\nhint", response="", action=None, listing=LISTING)
    assert turn.bare == "o\nhint"
    assert PastTurn(observation="o", response="", action=None, listing=LISTING).bare == "o"


def test_settings_are_saved_and_older_files_are_read(tmp_path: Path) -> None:
    settings = ChatSettings(memory="window:3")
    settings.save(tmp_path)
    assert ChatSettings.load(tmp_path) == settings
    assert settings.identity["memory"] == "window:3"
    (tmp_path / "turngym.json").write_text('{"channel": "tool"}')
    assert ChatSettings.load(tmp_path).memory == "all"


def test_sessions_of_other_trainers_refuse_what_they_cannot_show() -> None:
    with pytest.raises(AgentError, match=r"memory is 'react': sessions keep .* valid: all"):
        SessionPool.of("turngym/Search-v0", None, ChatSettings(memory="react"))


def test_a_student_learns_from_windows(tmp_path: Path) -> None:
    world = load_world("alfworld")
    result = train(
        "sft",
        student=world.checkpoint("student"),
        out=tmp_path,
        steps=1,
        episodes=2,
        memory="window:1",
        tracker=None,
        threads=1,
        progress=False,
        **{**world.settings(), "max_turns": 3},
    )
    assert result.step == 1
    assert json.loads((Path(result.model) / "turngym.json").read_text())["memory"] == "window:1"


def test_hints_need_the_whole_conversation(tmp_path: Path) -> None:
    world = load_world("alfworld")
    with pytest.raises(TurngymError, match="--memory window:1: hints"):
        train(
            "opd-hints",
            student=world.checkpoint("student"),
            out=tmp_path,
            judge="expert",
            memory="window:1",
            progress=False,
            **world.settings(),
        )


def test_the_driver_hands_what_was_played_to_the_agent(make_doors: Any) -> None:
    seen: list[Conversation] = []

    class Watcher(ExpertAgent):
        def respond(self, waiting: Any) -> Any:
            seen.extend(replace(row, past=list(row.past)) for row in waiting)
            return [replace(reply, text=f"<think>Next.</think>{reply.text}") for reply in super().respond(waiting)]

    rollout([Job(task_id="doors/2")], make_doors(show_admissible=True), Watcher())
    assert [len(row.past) for row in seen] == [0, 1]
    (past,) = seen[1].past
    assert past.action == "open door 1"
    assert past.response == "<think>Next.</think><action>open door 1</action>"
    assert past.thought == "Next."
    assert past.bare == "You see 2 doors."
    assert seen[1].listing == "\nAdmissible actions:\n- open door 2\n- wait"
