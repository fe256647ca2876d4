"""Agents without a model: experts, mixes of good and bad players, random actions, replays, a person at the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter
from turngym.agents.playing.timed_calls import attempt
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.skills import HINT_HEAD
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import AgentError, did_you_mean, nearest
from turngym.core.plugin_values import checked_text
from turngym.core.plugins import find, installed, is_path
from turngym.envs.base import Player, ReadingPlayer
from turngym.envs.guard import ActionGuard
from turngym.envs.spaces import printable

MakeExpert = Callable[[ActionGuard], Player]
"""Makes one expert for an episode; called after the reset."""
PLAYERS = "turngym.players"
"""Entry point group of players in other packages."""
PERIODS = {"repeat": (1,), "cycle": (2, 3)}
"""Players that fall into a loop, and its possible lengths in turns."""
WANDER = "wander"
"""The player of an environment that goes round in a loop of its own (`TextEnv.make_player`); the shop has one."""
LOOPING = (*PERIODS, WANDER)
KNOWN_PLAYERS = ("expert", "noisy", *LOOPING)
# Each purpose has a random stream of its own, so that switching one on changes no other draw.
EXPERT_STREAM = 1
NOISE_STREAM = 2
PLAYER_STREAM = 3
HELP = "Type an action. ? lists what is possible, ?WORD only what contains WORD, ! asks the expert, q quits."


class PrivilegedExpert:
    """The environment's own expert, which sees the hidden state."""

    def __init__(self, env: ActionGuard) -> None:
        self._env = env

    def observe(self, action: str) -> None:
        """Does nothing: the expert reads the state."""

    def act(self) -> str | None:
        return self._env.expert_action()


def named_player(name: str) -> MakeExpert:
    """What makes the player `name`: `expert` is the environment's privileged one, other names its scripted players.

    Players of other packages are named as `package.module:name`, or by an entry point of `turngym.players`: a function
    that gets the episode's `ActionGuard` (its `base` is the environment) after the reset and returns a `Player`.

    Raises PluginError for a player of another package that cannot be imported.
    """
    if name == "expert":
        return PrivilegedExpert
    if is_path(name):
        # found here, for the main program of a worker is another one
        make: MakeExpert = find(PLAYERS, name, {})
        return make
    return _NamedPlayer(name)


@dataclass(frozen=True, slots=True)
class _NamedPlayer:
    """A `MakeExpert` that can be pickled for other processes."""

    name: str

    def __call__(self, env: ActionGuard) -> Player:
        players = env.base.players
        if self.name not in players and self.name in installed(PLAYERS):
            player: Player = find(PLAYERS, self.name, {}, known=players)(env)
            return player
        return env.base.make_player(self.name)


class ScriptedAgent:
    """Answers the waiting conversations one by one."""

    def __init__(self, name: str, renderer: ChatRenderer | None = None, max_context: int | None = None) -> None:
        self.name = name
        self.writer = ResponseWriter(renderer, max_context)

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        return [self._answer(conversation) for conversation in waiting]

    def _answer(self, conversation: Conversation) -> Reply:
        # experts and players are other people's code, as environments are
        answer = attempt(lambda: self._one(conversation))
        if answer.failure:
            return Reply(ends=Status.ERROR_ENV, error=answer.failure)
        return answer.value  # type: ignore[no-any-return]

    def release(self, conversation: Conversation) -> None:
        """Does nothing: most scripted agents keep nothing."""

    def _one(self, conversation: Conversation) -> Reply:
        raise NotImplementedError


def drawn_action(conversation: Conversation, rng: np.random.Generator) -> str | None:
    """A random action; None where none is possible now. Raises AgentError for an environment that lists none."""
    env = conversation.env.base
    action: str | None = env.sample_action(rng)
    if action is None and env.admissible() is None:
        raise AgentError(
            f"{env.env_id} has no admissible actions to draw a random one from; valid: an agent without noise (expert, "
            "model:FOLDER), or an environment with `admissible` or `sample_action`"
        )
    return action


class ExpertAgent(ScriptedAgent):
    """Plays an expert's actions, with a share of random ones mixed in.

    Args:
        renderer: with one, episodes carry token ids, ready for supervised training.
        noise: share of turns that play a random action instead, marked `origin="noise"` and never trained on; a pair
            (low, high) draws one share per episode. The expert goes on from wherever the noise leads.
        mistakes: share of the noise that is a typical mistake (`TextEnv.plausible_mistake`). Most of those are
            inadmissible; without them a student never learns what to do after a refusal. The rest is admissible.
    """

    def __init__(
        self,
        renderer: ChatRenderer | None = None,
        *,
        expert: MakeExpert = PrivilegedExpert,
        noise: float | tuple[float, float] = 0.0,
        mistakes: float = 0.0,
        max_context: int | None = None,
        name: str = "expert",
    ) -> None:
        self._mistakes = mistakes
        self._noise = (noise, noise) if isinstance(noise, (int, float)) else noise
        if not 0.0 <= self._noise[0] <= self._noise[1] <= 1.0:
            raise AgentError(f"noise is {noise}; it must be a share between 0 and 1, or an increasing pair of shares")
        super().__init__(name, renderer, max_context)
        self._make_expert = expert

    def release(self, conversation: Conversation) -> None:
        conversation.memory.pop("expert", None)

    def _one(self, conversation: Conversation) -> Reply:
        memory = conversation.memory
        if "expert" not in memory:
            player = memory["expert"] = self._make_expert(conversation.env)
            hint = conversation.observation.partition(HINT_HEAD)[2]
            if hint and isinstance(player, ReadingPlayer):
                player.read(hint)
            low, high = self._noise
            memory["noise"] = low if low == high else conversation.rng(EXPERT_STREAM).uniform(low, high)
        elif conversation.played is not None:
            memory["expert"].observe(conversation.played)
        noise = self.noise(conversation, memory["noise"])
        if noise is not None:
            return self.writer.write(conversation, noise, "noise")
        action = memory["expert"].act()
        if action is None:
            return Reply(ends=Status.ERROR_ENGINE, error=f"the expert knows no action at turn {conversation.turn}")
        return self.writer.write(conversation, checked_text("the expert's action", action), "demonstration")

    def noise(self, conversation: Conversation, share: float) -> str | None:
        """A random action for `share` of the turns, None for the others. Raises AgentError where none can be drawn."""
        rng = conversation.rng(NOISE_STREAM)
        if rng.random() >= share:
            return None
        if self._mistakes and rng.random() < self._mistakes:
            mistake = conversation.env.base.plausible_mistake(rng)
            if mistake is not None:
                return mistake
        # an environment may have mistakes and no list
        return conversation.env.base.sample_action(rng) if self._mistakes else drawn_action(conversation, rng)


class RandomAgent(ScriptedAgent):
    """Plays random admissible actions (`TextEnv.sample_action`)."""

    def __init__(self) -> None:
        super().__init__("random")

    def _one(self, conversation: Conversation) -> Reply:
        action = drawn_action(conversation, conversation.rng())
        if action is None:
            error = f"{conversation.task.env_id}: nothing is admissible at turn {conversation.turn}"
            return Reply(ends=Status.ERROR_ENGINE, error=error)
        return self.writer.write(conversation, action)


class ReplayAgent(ScriptedAgent):
    """Plays recorded turns again: those of the same task and sample, or one list of actions for every conversation.

    A recorded response is repeated exactly if the environment reads the recorded action from it; if the channel
    differs, the action is written anew. An episode that outlasts its script ends as `truncated_depth`.
    """

    def __init__(self, script: Iterable[Episode] | Sequence[str], *, name: str = "replay") -> None:
        items = list(script)
        self._actions = tuple(item for item in items if isinstance(item, str))
        episodes = [item for item in items if isinstance(item, Episode)]
        # by the hash, too: the same id with other data is another game
        self._turns: Mapping[tuple[str, int, str], tuple[Turn, ...]] = {
            (episode.task.task_id, episode.sample, episode.task.sha256): episode.turns for episode in episodes
        }
        if bool(self._actions) == bool(episodes):
            raise AgentError("a replay needs either recorded episodes or a list of actions")
        super().__init__(name)

    def _one(self, conversation: Conversation) -> Reply:
        over = Reply(ends=Status.TRUNCATED_DEPTH, error=f"the recording ends after {conversation.turn} turns")
        if self._actions:
            left = self._actions[conversation.turn :]
            return self.writer.write(conversation, left[0]) if left else over
        task, sample = conversation.task, conversation.sample
        turns = self._turns.get((task.task_id, sample, task.sha256))
        if turns is None:
            recorded = ", ".join(f"{name} sample {number} ({sha[:8]})" for name, number, sha in list(self._turns)[:5])
            raise AgentError(
                f"no recording of {task.task_id} sample {sample} ({task.sha256[:8]}); recorded are: {recorded}, ..."
            )
        if conversation.turn >= len(turns):
            return over
        turn = turns[conversation.turn]
        read = conversation.env.read(turn.response).action
        # a response from which no action was read can only be repeated as it was
        if turn.action is None or (read is not None and conversation.env.base.canonical(read) == turn.action):
            return self.writer.write_text(conversation, turn.response, turn.origin)
        return self.writer.write(conversation, turn.action, turn.origin)


@dataclass(frozen=True, slots=True)
class DrawnPlayer:
    """The player of one episode."""

    player: str
    loop_from: int = 0
    """Turn at which a looping player begins to repeat the `period` turns before, or to wander; at least `period`."""
    period: int = 0
    """Turns that are repeated; 0 where the player wanders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerMix:
    """Shares of players among episodes, and how soon a loop begins."""

    shares: tuple[tuple[str, float], ...]
    """(player, share) in any unit. Players are `expert`, `noisy`, `repeat` (repeats its last action), `cycle`
    (repeats its last two or three) and `wander` (the environment's player of that name)."""
    loop_after: float = 2.3
    """Mean number of turns before a loop begins; at least 1."""
    loop_slips: float = 0.0
    """Share of turns in a loop that are noise; the loop goes on after them."""

    def __post_init__(self) -> None:
        for player, share in self.shares:
            if player not in KNOWN_PLAYERS:
                hint = did_you_mean(player, [*KNOWN_PLAYERS])
                raise AgentError(f"players: {player!r}; known are {', '.join(KNOWN_PLAYERS)}.{hint}")
            if not (math.isfinite(share) and share >= 0):
                raise AgentError(f"players: the share of {player} is {share}; valid: 0 or more")
        names = [player for player, _ in self.shares]
        if len({*names}) < len(names):
            raise AgentError(f"players: {', '.join(names)}; each may be named once")
        if not sum(share for _, share in self.shares) > 0:
            raise AgentError("players: no player has a share above 0")
        if not (math.isfinite(self.loop_after) and self.loop_after >= 1):
            raise AgentError(f"loop-after is {self.loop_after}; valid: 1 or more turns")
        if not 0 <= self.loop_slips < 1:
            raise AgentError(f"loop-slips is {self.loop_slips}; valid: a share of turns below 1")

    @classmethod
    def parse(cls, text: str, **more: float) -> PlayerMix:
        """Reads `expert:.35,noisy:.2,repeat:.2,cycle:.25`; `more` are further fields. Raises AgentError if invalid."""
        shares = []
        for item in text.split(","):
            player, _, share = item.strip().partition(":")
            try:
                shares.append((player, float(share)))
            except ValueError:
                raise AgentError(
                    f"players: {item.strip()!r} in {text!r}; valid: player:share, for example expert:.7,repeat:.3"
                ) from None
        return cls(shares=tuple(shares), **more)

    def draw(self, rng: np.random.Generator) -> DrawnPlayer:
        """The player of an episode. A loop begins at a geometric turn of mean `loop_after`, never before its length."""
        names, weights = zip(*self.shares, strict=True)
        player = names[int(rng.choice(len(names), p=np.array(weights) / sum(weights)))]
        if player not in LOOPING:
            return DrawnPlayer(player)
        period = int(rng.choice(PERIODS[player])) if player in PERIODS else 0
        return DrawnPlayer(player, max(int(rng.geometric(1 / self.loop_after)), period), period)


class MixedAgent(ScriptedAgent):
    """Plays each episode as a player that is drawn from `mix` by (seed, task, sample) alone.

    `expert` plays without noise, the others with it, as `ExpertAgent` does. Looping players begin like `noisy` and then
    wander, or repeat their responses exactly, noise or not, except for `loop_slips`. A loop is what a poor policy does
    and no demonstration (origin `policy`): a student trained on both learns to continue a loop, even if the
    environment refuses every turn of it. Noise is never imitated.
    """

    def __init__(
        self,
        mix: PlayerMix,
        renderer: ChatRenderer | None = None,
        *,
        expert: MakeExpert = PrivilegedExpert,
        noise: float | tuple[float, float] = 0.0,
        mistakes: float = 0.0,
        max_context: int | None = None,
    ) -> None:
        super().__init__("players", renderer, max_context)
        self._mix = mix
        self._clean = ExpertAgent(renderer, expert=expert, max_context=max_context)
        self._noisy = ExpertAgent(renderer, expert=expert, noise=noise, mistakes=mistakes, max_context=max_context)

    def release(self, conversation: Conversation) -> None:
        for agent in (self._clean, self._noisy):
            agent.release(conversation)

    def _one(self, conversation: Conversation) -> Reply:
        memory = conversation.memory
        if "part" not in memory:
            memory["part"], memory["said"] = self._mix.draw(conversation.rng(PLAYER_STREAM)), []
        part, responses = memory["part"], memory["said"]
        if part.player in LOOPING and conversation.turn >= part.loop_from:
            return self._again(conversation, responses, part)
        reply = (self._clean if part.player == "expert" else self._noisy).respond([conversation])[0]
        responses.append(reply.text)
        return reply

    def _again(self, conversation: Conversation, responses: Sequence[str], part: DrawnPlayer) -> Reply:
        """A turn of a loop, or a slip from it."""
        slip = self._noisy.noise(conversation, self._mix.loop_slips)
        if slip is not None:
            return self.writer.write(conversation, slip, "noise")
        if part.period:
            phase = (conversation.turn - part.loop_from) % part.period
            return self.writer.write_text(conversation, responses[part.loop_from - part.period + phase], "policy")
        action = conversation.env.base.make_player(WANDER).act()
        if action is None:
            return Reply(ends=Status.ERROR_ENGINE, error=f"`{WANDER}` knows no action at turn {conversation.turn}")
        return self.writer.write(conversation, action, "policy")


class HumanAgent(ScriptedAgent):
    """Shows each observation to a person and reads an action.

    Quitting ends the episode as `truncated_depth` and keeps its turns.

    Args:
        ask: reads one line (EOFError and KeyboardInterrupt quit).
        say: shows a text; its second argument is the kind: `observation`, `note` or `list`.
    """

    def __init__(self, ask: Callable[[], str], say: Callable[[str, str], None]) -> None:
        super().__init__("human")
        self._ask = ask
        self._say = say

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        if len(waiting) > 1:
            raise AgentError("a person plays one episode at a time: use slots=1")
        return super().respond(waiting)

    def _one(self, conversation: Conversation) -> Reply:
        admissible = conversation.admissible
        if conversation.turn == 0:
            self._say(HELP, "note")
        self._say(printable(conversation.observation), "observation")
        while True:
            try:
                line = self._ask().strip()
            except (EOFError, KeyboardInterrupt):
                line = "q"
            if line in ("q", "quit", "exit"):
                return Reply(ends=Status.TRUNCATED_DEPTH, error="the player quit")
            if line.startswith("?"):
                part = line[1:].strip()
                listed = [action for action in admissible or () if part in action]
                none = "Any text is possible here." if admissible is None else f"Nothing possible contains {part!r}."
                self._say("\n".join(listed) or none, "list")
            elif line == "!":
                self._say(conversation.env.expert_action() or "The expert knows no way.", "note")
            elif line:
                if admissible and conversation.env.base.canonical(line) not in admissible:
                    near = nearest(line, admissible)
                    if near:
                        self._say(f"(not possible now; nearest: {', '.join(near[:3])})", "note")
                return self.writer.write(conversation, line)
