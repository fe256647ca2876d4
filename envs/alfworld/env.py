"""The ALFWorld environment: household tasks in text, played by the native engine or by TextWorld."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np

from turngym.core.errors import TaskError, checked_choice
from turngym.core.task import Task, Verdict
from turngym.core.tools import ToolSpec
from turngym.envs.alfworld.engine import NativeEngine, check_state
from turngym.envs.alfworld.game import KEYS, Game, game_hash
from turngym.envs.alfworld.games import SPLITS, GameSource, GeneratedGames, RealGames, find_root
from turngym.envs.alfworld.generate import UNSEEN, unseen
from turngym.envs.alfworld.pddl import GameError, GameUnsupported, category, parse_problem
from turngym.envs.alfworld.players import ReadingHouseholdPlayer, SearchingPlayer, next_action, plausible_mistake
from turngym.envs.alfworld.priors import GeneratorConfig, Part, preset
from turngym.envs.alfworld.textworld import Reference, acquire, release
from turngym.envs.base import Outcome, Player, TextEnv

Engine = Literal["native", "textworld"]
Words = Literal["game", "put"]
_MOVE, _OLD_PUT = "- move <object> to <receptacle>", "- put <object> in/on <receptacle>"
INSTRUCTIONS = """You are in a house and have a household task to do, such as putting a clean mug in a cabinet. \
You act by short text commands, one at a time, and read what happens.
Commands:
- go to <receptacle>
- open <receptacle> / close <receptacle>
- take <object> from <receptacle>
- move <object> to <receptacle>
- clean <object> with <sinkbasin> / heat <object> with <microwave> / cool <object> with <fridge>
- use <lamp>
- slice <object> with <knife>
- examine <receptacle or object in hand> / look / inventory / help
Objects and receptacles have numbers: "mug 2", "cabinet 1". You can carry one object at a time. You only see what is \
in a receptacle when you are at it, and inside a closed one only after opening it."""


class ALFWorldEnv(TextEnv):
    """Household tasks: reward 1.0 on the step that reaches the goal, else 0.0; ends when the goal is reached.

    Args:
        split: `generated` or `generated_unseen` (houses that training with `config` never shows), which need no data;
            or `train`, `valid_seen`, `valid_unseen`, `valid_train` of the real games.
        engine: `native`, or `textworld` (the reference, about 2,000 times slower, needs `turngym[alfworld]`).
        data: folder of the real games, with or without `json_2.1.1`; None takes `$ALFWORLD_DATA`, else
            `~/.cache/alfworld`.
        config: which generated games: a preset's name or a GeneratorConfig.
        part: which generated games are listed, `train` or `eval`; ids of the other part are playable too. What is
            unseen is for evaluation alone.
        domain_randomization: shuffle the numbers of objects and receptacles at every reset (training splits only).
        words: `game`, as the game says it; `put`, as alfworld before its release 0.4, with `put O in/on R` for `move O
            to R`, `You arrive at loc 3.` and no `help`: for models that were trained before. Tasks stay the same.
        render_mode: `ansi`: `render()` gives the last action and observation; `human`: both are printed; None: neither.

    `info["goal_rate"]` is the share of goal conditions met (None for games that only TextWorld can play).
    """

    env_id: ClassVar[str] = "turngym/ALFWorld-v0"
    tool: ClassVar[ToolSpec] = ToolSpec(
        name="alfworld_step",
        description="Do one action in the house and read what happens.",
        argument="action",
        argument_description="One command, for example: take mug 2 from cabinet 1",
        examples=("go to cabinet 1", "take mug 2 from cabinet 1", "move mug 2 to shelf 1"),
    )
    instructions: ClassVar[str] = INSTRUCTIONS
    players: ClassVar[tuple[str, ...]] = ("searching", "reading")
    told_by = frozenset({"engine"})
    scored_by = frozenset({"words", "domain_randomization"})

    def __init__(
        self,
        *,
        split: str = "generated",
        engine: Engine = "native",
        data: str | Path | None = None,
        config: str | GeneratorConfig = "small",
        part: Part = "train",
        domain_randomization: bool = False,
        words: Words = "game",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.source = open_split(split, data=data, config=config, part=part)
        checked_choice("engine", engine, get_args(Engine), TaskError)
        if domain_randomization and split not in ("train", "generated"):
            raise TaskError(f"domain_randomization shuffles numbers in training; split {split!r} is for evaluation")
        self.engine_name = engine
        self.domain_randomization = domain_randomization
        self._reworded = checked_choice("words", words, get_args(Words), TaskError) == "put"
        if self._reworded and engine != "native":
            raise TaskError("words='put' is told by engine='native' alone; the reference tells what a game's file says")
        if self._reworded:
            instructions = INSTRUCTIONS.replace(_MOVE, _OLD_PUT).replace(" / help", "")
            self.instructions = instructions  # type: ignore[misc]
            examples = tuple(re.sub(r"move (.+) to (.+)", r"put \1 in/on \2", text) for text in self.tool.examples)
            self.tool = replace(self.tool, examples=examples)  # type: ignore[misc]
        self._tasks: dict[tuple[str, int], Task] = {}
        self._task: Task | None = None
        self._shuffle: int | None = None
        self._native: NativeEngine | None = None
        self._reference: Reference | None = acquire() if engine == "textworld" else None

    def task_ids(self) -> Sequence[str]:
        return self.source.task_ids

    @property
    def task(self) -> Task:
        if self._task is None:
            raise TaskError(f"{self.env_id}: there is no task before reset()")
        return self._task

    @property
    def engine(self) -> NativeEngine | Reference:
        engine = self._reference or self._native
        if engine is None:
            raise TaskError(f"{self.env_id}: there is no game before reset()")
        return engine

    @property
    def success(self) -> bool:
        return self.engine.won

    def admissible(self) -> tuple[str, ...]:
        return self.engine.admissible()

    @property
    def statement(self) -> str | None:
        """The last line of the first observation; None for games that only TextWorld can play."""
        return None if self._native is None else f"Your task is to: {self._native.game.task_text}"

    def canonical(self, action: str) -> str:
        return action.strip()

    def expert_action(self) -> str | None:
        return None if self._native is None else next_action(self._native)

    def make_player(self, name: str) -> Player:
        """`searching` is the expert that only knows what the agent has seen; `reading` follows the hints in what it
        reads. Both need a game of the native engine."""
        if name in self.players and self._native is not None:
            return (SearchingPlayer if name == "searching" else ReadingHouseholdPlayer)(self._native)
        return super().make_player(name)

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        return None if self._native is None else plausible_mistake(self._native, rng)

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        info = super().describe(verdict, action)
        info["goal_rate"] = None if self._native is None else self._native.goal_rate
        return info

    def _begin(self, task_id: str) -> str:
        shuffle = int(self.np_random.integers(2**31)) if self.domain_randomization else None
        return self._load(task_id, shuffle)

    def _load(self, task_id: str, shuffle: int | None) -> str:
        self._shuffle = shuffle
        if self._reference is None:
            game = self.source.game(task_id)
            self._task = self._identify(task_id, game)
            if self._reworded:
                game = Game.reworded(game, shuffle)
            elif shuffle is not None:
                game = Game.renumbered(game, shuffle)
            self._native = NativeEngine(game)
            return self._native.reset()
        data = self.source.data(task_id)
        self._task = self._identify(task_id, data)
        try:
            # plays along with TextWorld, for the goal rate, the experts and the mistakes
            self._native = NativeEngine(Game(data, source=task_id, shuffle=shuffle))
        except GameUnsupported:
            self._native = None
        self._reference.load(data, shuffle=shuffle)
        return self._reference.reset()

    def _identify(self, task_id: str, game: Game | dict[str, Any]) -> Task:
        # by the texts of the game, too: its file may have been edited
        texts = game.data if isinstance(game, Game) else game
        key = task_id, hash(tuple(texts[name] for name in KEYS))
        task = self._tasks.get(key)
        if task is not None:
            return task
        row = self.source.category(task_id)
        if isinstance(game, Game):
            sha, row = game.sha256, row or game.category
        else:
            try:
                sha, row = game_hash(game), row or category(parse_problem(game["pddl_problem"]).goal)
            except (ValueError, RecursionError) as error:
                raise GameError(f"{task_id}: {error}") from error
        # the id of a game of ALFWorld ends in its scene: .../pick_and_place_simple-Mug-None-Desk-308/trial_T2019...
        scene = re.search(r"-(\d+)/trial_[^/]*$", task_id)
        task = Task(
            env_id=self.env_id,
            task_id=task_id,
            sha256=sha,
            split=self.source.split,
            category=row,
            cluster=f"scene {scene[1]}" if scene else "",
        )
        # generated ids have no end
        if len(self._tasks) >= 10_000:
            self._tasks.clear()
        self._tasks[key] = task
        return task

    def _apply(self, action: str) -> Outcome:
        possible = action in self.admissible()
        observation, won = self.engine.step(action)
        if self._reference is not None and self._native is not None:
            self._native.step(action)
        verdict = Verdict.OK if possible else Verdict.INADMISSIBLE
        return Outcome(observation=observation, reward=float(won), terminated=won, verdict=verdict)

    def _get_state(self) -> Any:
        native = None if self._native is None else self._native.get_state()
        return [self._shuffle, native, None if self._reference is None else list(self._reference.get_state())]

    def _set_state(self, state: Any) -> None:
        shuffle, native, history = msgspec.convert(state, tuple[int | None, list[Any] | None, list[str] | None])
        if (history is not None) is not (self._reference is not None):
            engine_name = "native" if history is None else "textworld"
            raise TaskError(
                f"{self.env_id}: the snapshot was taken with engine={engine_name!r}, this environment has "
                f"{self.engine_name!r}"
            )
        # _begin has drawn other numbers than the snapshot's
        if shuffle != self._shuffle:
            self._load(self.task.task_id, shuffle)
        if self._reference is not None:
            self._reference.set_state(tuple(history or ()))
        if self._native is not None:
            self._native.set_state(native or ())
            check_state(self._native.problem, self._native.state)

    def _close(self) -> None:
        if self._reference is not None:
            release(self._reference)
            self._reference = None

    def _reopen(self) -> None:
        self._reference = acquire() if self.engine_name == "textworld" else None


def open_split(
    split: str = "generated",
    *,
    data: str | Path | None = None,
    config: str | GeneratorConfig = "small",
    part: Part = "train",
) -> GameSource:
    """The games of a split. Raises TaskError for an unknown split, and for missing data, saying how to get it."""
    if split in ("generated", UNSEEN):
        chosen = preset(config) if isinstance(config, str) else config
        return GeneratedGames(chosen, part) if split == "generated" else GeneratedGames(unseen(chosen), "eval", split)
    checked_choice("split", split, (*SPLITS, "generated", UNSEEN), TaskError)
    return RealGames(find_root(data), split)
