"""How a proxy that learns is put together: what answers, what trains beside it, and how both share the weights.

`build` is read first: it loads the models and connects a `ProxyService`, which answers clients and records turns, with
a `Training`, whose thread takes the sessions that have ended and been judged. `Serving` says what answers while the
student learns: the student itself, a copy of it in this or another process, or servers.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from turngym.agents.executor.engine_process import EngineProcess
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.proxy.conversation import ChatListRenderer
from turngym.agents.proxy.engine_queue import ServingCopy
from turngym.agents.proxy.judging import SessionBuffer, TurnJudging
from turngym.agents.proxy.restore import usage_record, votes_record
from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.sessions import Feedback, Outcome
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.sglang.open_servers import eval_policy, train_policy
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import weights_hash
from turngym.envs.core.trace import TraceWriter, iter_trace
from turngym.trainers.algorithm import Algorithm, BuildContext, find_algorithm
from turngym.trainers.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.live.config import ServeProxy, named
from turngym.trainers.live.turns import SelectionCounts, SessionJudge, make_session_judge, select_turns
from turngym.trainers.lora import adapter_identity, add_adapters
from turngym.trainers.losses import bounded
from turngym.trainers.progress import NoProgress
from turngym.trainers.schedule import truncated
from turngym.trainers.scorer import ModelWeights, load_student
from turngym.trainers.teacher import check_teacher, open_scorer, open_teacher
from turngym.trainers.train_loop import Trainer

# What answers the proxy's clients, and how it gets new weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The engine that answers, and how it gets new weights."""

    engine: Any
    kind: str
    """`process`, `copy`, `student` or `servers`."""
    live: bool
    """Whether it answers while the student learns."""
    set_version: Callable[[int], None]
    """Called with the version of the student's weights when there are new ones."""
    copied: ServingCopy | None = None
    close: Callable[[], None] = lambda: None

    def as_json(self) -> dict[str, Any]:
        more = {} if self.copied is None else self.copied.as_json()
        return {"from": self.kind, "version": self.engine.policy_version, **more}


def open_engine(config: ServeProxy, model: Any, tokenizer: Any, max_length: int | None, batch: int) -> Serving:
    """Open what answers: the model in this process, a copy of it, or servers that get its weights as it learns.

    If adapters are trained, `model` gets them here, after it has been copied: the copy keeps the ordinary weights.
    Raises TurngymError if the model cannot be served or adapted as the options say.
    """
    if not config.swap_wait >= 0:
        raise TurngymError(f"--swap-wait is {config.swap_wait}; valid: 0 seconds or more")
    kind = _kind(config, model)
    served = copy.deepcopy(model).requires_grad_(False) if kind in ("process", "copy") else None
    if config.train and config.lora.rank:
        add_adapters(model, config.lora, base=str(Path(config.student).expanduser().resolve()), seed=config.run.seed)
    if kind == "servers":
        return _servers(config, model, tokenizer, max_length)
    settings = {"tokenizer": tokenizer, "max_length": max_length, "max_batch": batch}
    if served is None:
        engine = LocalEngine(model, **settings)
        return Serving(engine=engine, kind=kind, live=False, set_version=engine.weights_changed)
    copied_engine: Any
    if kind == "process":
        copied_engine = EngineProcess(served, threads=config.threads or torch.get_num_threads(), **settings)
        close = copied_engine.close
    else:
        copied_engine = LocalEngine(served, **settings)
        close = lambda: None  # noqa: E731
    copied = ServingCopy(engine=copied_engine, copy=served, weights=ModelWeights(model), patience=config.swap_wait)
    return Serving(engine=copied_engine, kind=kind, live=True, set_version=copied.publish, copied=copied, close=close)


def _kind(config: ServeProxy, model: Any) -> str:
    if config.servers.policy_server:
        return "servers"
    if not config.train:
        return "student"
    if config.serve_from != "auto":
        return config.serve_from
    return "process" if next(model.parameters()).device.type == "cpu" else "copy"


def _servers(config: ServeProxy, model: Any, tokenizer: Any, max_length: int | None) -> Serving:
    if not config.train:
        fixed = eval_policy(config.servers, config.student, tokenizer, max_length)
        return Serving(engine=fixed, kind="servers", live=False, set_version=lambda _: None)
    live = config.serve_from != "student"
    engine = train_policy(
        config.servers, model, tokenizer, max_length, config.out, weights=ModelWeights(model), live=live
    )
    return Serving(engine=engine, kind="servers", live=live, set_version=engine.weights_changed, close=engine.close)


# Training beside a proxy.

SESSIONS = "sessions.jsonl"
"""Judged sessions, as a trace."""


@dataclass(slots=True, kw_only=True)
class Training:
    """One trainer on one proxy's sessions."""

    out: Path
    algorithm: Algorithm
    resume: bool
    trainer: Trainer | None = None
    error: str = ""
    """Why training ended early."""
    finished: bool = False
    """Whether all steps are done."""
    step: int = 0
    """Training steps behind the weights that answer."""
    _service: ProxyService | None = field(default=None, init=False)
    _serving: Serving | None = field(default=None, init=False)
    _source: SessionBuffer | None = field(default=None, init=False)
    _judge: SessionJudge | None = field(default=None, init=False)
    _selection_counts: SelectionCounts = field(default_factory=SelectionCounts, init=False)
    _judging: TurnJudging | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _trace: TraceWriter | None = field(default=None, init=False)

    def connect(
        self, service: ProxyService, judge: SessionJudge | None, serving: Serving, config: ServeProxy
    ) -> SessionBuffer:
        """Make the source that the trainer collects from; what an earlier process left unused goes into it first."""
        self._service, self._serving = service, serving
        judged = self._judged_before({episode.task.task_id for episode in service.unused})
        self._trace = TraceWriter(self.out / SESSIONS)
        self._source = SessionBuffer(
            count_trainable=self._usable,
            pause_engine=service.engine.pause,
            resume_engine=service.engine.resume,
            set_version=serving.set_version,
            live=serving.live,
            on_sessions=self._written,
            batch_turns=config.batch_turns,
            staleness=config.staleness,
            newest_first=config.order == "newest",
        )
        if judge is not None:
            self._judge = judge
            self._judging = TurnJudging(
                judge,
                on_votes=lambda *said: service.recorder.write(votes_record(*said)),
                on_judged=self._judged,
                votes=service.votes,
                feedback=service.feedback_before,
            )
        for episode in service.unused:
            if episode.task.task_id in judged:
                self._source.put_judged([self._amended(judged[episode.task.task_id], service.feedback_before)])
            else:
                self.put(episode)
        for episode in service.open_episodes():
            self.turn(episode)
        service.unused = []
        return self._source

    def turn(self, episode: Episode) -> None:
        """Take in a session that has another turn."""
        if self._judging is not None and not self.finished:
            self._judging.update(episode)

    def put(self, episode: Episode) -> None:
        """Take in a session that has ended."""
        if self._source is None or self.finished:
            return
        if self._judging is None:
            self._judged(episode)
        else:
            self._judging.put(episode)

    def feedback(self, key: str, turn: int, feedback: Feedback | None, is_open: bool) -> Outcome:
        """Take in a user's feedback on a turn; None takes it back, because the turn was answered anew."""
        if self._source is None or self._judging is None or self._judge is None or self._judge.use == "record":
            return "recorded"
        if self._judging.hear(key, turn, feedback, is_open):
            return "counted"
        judge = self._judge
        ready = feedback is not None and self._source.amend(key, lambda one: judge.amended(one, turn, feedback))
        return "counted" if ready else "late"

    def updated(self, step: int) -> None:
        """Called by the trainer when it has changed the weights."""
        assert self._source is not None
        self._source.updated(step)
        # after it: whoever reads the step finds its weights being served
        self.step = step

    def start(self, on_failure: Callable[[], None]) -> None:
        """Train in a thread; `on_failure` is called if that fails."""
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name="proxy-trainer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way, save and end."""
        if self._judging is not None:
            self._judging.close()
        if self._source is not None:
            self._source.close()
        if self._thread is not None:
            self._thread.join()
        if self._trace is not None:
            self._trace.close()

    def health(self) -> Mapping[str, Any]:
        state = "failed" if self.error else "finished" if self.finished else "running"
        parts = [part.as_json() for part in (self._judging, self._source) if part is not None]
        sessions = {name: value for part in parts for name, value in part.items()}
        serving = {} if self._serving is None else self._serving.as_json()
        told = {
            "state": state,
            "algorithm": self.algorithm.name,
            "step": self.step,
            **sessions,
            **self._selection_counts.ages,
        }
        return {"training": told, "serving": serving, "left_out": self._selection_counts.reasons}

    def _run(self, on_failure: Callable[[], None]) -> None:
        assert self.trainer is not None
        assert self._source is not None
        try:
            self.trainer.train(resume=self.resume)
            self.finished = True
            print("all training steps are done; serving goes on", flush=True)
        except KeyboardInterrupt:
            pass  # `stop` was called; everything is saved
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not isinstance(error, TurngymError):
                traceback.print_exc()
            on_failure()
        finally:
            # whatever ended training, serving goes on: the engine must not stay paused for a step that never comes
            self._source.resume()

    def _amended(self, episode: Episode, feedback: Mapping[tuple[str, int], Feedback]) -> Episode:
        """A session that an earlier process has judged, with users' feedback on it, which may be newer."""
        for (key, turn), said in feedback.items():
            if key == episode.task.task_id and self._judge is not None:
                episode = self._judge.amended(episode, turn, said)
        return episode

    def _usable(self, episode: Episode) -> int:
        return len(select_turns(episode, self.algorithm.select).trained)

    def _written(self, what: str, step: int, episodes: Sequence[Episode]) -> None:
        assert self._service is not None
        found = [select_turns(episode, self.algorithm.select) for episode in episodes]
        ages = (
            self._selection_counts.take(step, episodes, found)
            if what == "trained"
            else self._selection_counts.leave_out(found)
        )
        turns = {episode.task.task_id: one.as_json() for episode, one in zip(episodes, found, strict=True)}
        self._service.recorder.write({**usage_record(what, step, episodes), "turns": turns, **ages})

    def _judged(self, episode: Episode) -> None:
        assert self._trace is not None
        assert self._source is not None
        self._trace.write(episode)
        self._source.put_judged([episode])

    def _judged_before(self, wanted: set[str]) -> dict[str, Episode]:
        path = self.out / SESSIONS
        found = iter_trace(path) if wanted and path.exists() else ()
        return {item.task.task_id: item for item in found if isinstance(item, Episode) and item.task.task_id in wanted}


class LineProgress(NoProgress):
    """One line per training step, on standard output."""

    def row(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") != "train":
            return
        numbers = {
            "sessions": row.get("episodes"),
            "tokens": row.get("tokens"),
            "score": row.get("judge/score"),
            "loss": row.get("loss"),
            "gap": row.get("gap_max"),
            "versions behind": row.get("staleness_mean"),
            "update s": row.get("time/update_s"),
        }
        known = {name: value for name, value in numbers.items() if value is not None}
        texts = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in known.items()
        )
        print(f"step {row['step']}: {', '.join(texts)}", flush=True)


def build(
    config: ServeProxy, share: Callable[[int], int] = lambda limit: limit
) -> tuple[ProxyService, Training | None]:
    """Load the models and put the run together; a folder that holds a run goes on. `share` is as in `ProxyService`.

    Raises TurngymError for a judge, a teacher or a folder that does not fit.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    chat = ChatSettings.load(config.student)
    model, tokenizer = load_student(config.student, config.dtype, config.device)
    settings = named(config.proxy, config.student, chat)
    serving = open_engine(config, model, tokenizer, chat.max_context, settings.max_batch)
    engine = serving.engine
    # ids that end an answer besides the tokenizer's own
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or ()
    stop_ids = (more,) if isinstance(more, int) else tuple(more)
    renderer = ChatListRenderer(tokenizer, thinking=chat.thinking, stop_ids=stop_ids)
    seed, max_context = config.run.seed, engine.max_length
    if not config.train:
        service = ProxyService(engine, renderer, config.out, settings, max_context=max_context, seed=seed, share=share)
        return service, None
    algorithm = _algorithm(config, tokenizer)
    scoring = {"dtype": config.teacher_dtype, "device": config.device, "max_tokens": config.run.micro_tokens}
    teacher, vocab_size = open_teacher(algorithm, config.teacher, config.servers, (model, tokenizer), **scoring)
    reference = None
    if algorithm.needs_reference:
        reference = open_scorer(algorithm, config.student, vocab_size=vocab_size, **scoring)
    judge = make_session_judge(config, algorithm, renderer, max_context)
    checkpoint = latest_checkpoint(config.out) if list_checkpoints(config.out) else None
    step = 0 if checkpoint is None else read_state(checkpoint)["step"]
    training = Training(out=config.out, algorithm=algorithm, resume=checkpoint is not None, step=step)
    service = ProxyService(
        engine,
        renderer,
        config.out,
        settings,
        max_context=max_context,
        temperature=config.run.temperature,
        seed=seed,
        resumed_from=step,
        on_episode=training.put,
        on_turn=training.turn,
        on_feedback=training.feedback,
        on_close=serving.close,
        share=share,
    )
    if serving.copied is not None:
        serving.copied.queue = service.engine
    source = training.connect(service, judge, serving, config)

    def save_extra(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        chat.save(folder)

    training.trainer = Trainer(
        model=model,
        algorithm=algorithm,
        collect=source,
        out=config.out,
        run=config.run,
        optimizer=config.optimizer,
        teacher=teacher,
        reference=reference,
        on_update=training.updated,
        save_extra=save_extra,
        vocab_size=vocab_size,
        identity=_identity(config, chat),
        progress=LineProgress(),
    )
    return service, training


def _identity(config: ServeProxy, chat: ChatSettings) -> dict[str, Any]:
    """Settings that must not change when a run goes on."""
    identity = {"env": "proxy", "chat": chat.identity, "batch_turns": config.batch_turns}
    if config.teacher is not None:
        identity["teacher"] = weights_hash(config.teacher)
    elif config.servers.teacher_server:
        identity["teacher"] = config.servers.teacher_server
    return identity | adapter_identity(config.lora, config.student)


def _algorithm(config: ServeProxy, tokenizer: Any) -> Algorithm:
    spec = find_algorithm(config.algorithm)
    teaches = config.teacher is not None or bool(config.servers.teacher_server)
    context = BuildContext(run=config.run, distill=config.distill, has_teacher=teaches, tokenizer=tokenizer)
    # sessions end long after their first turn, and wait for the judge: the student has learned in between
    algorithm = bounded(spec.build(getattr(config, spec.table), context), config.run.dual_clip, stale=True)
    if config.staleness is not None:
        # what was drawn is stale here even if no update is allowed for: the engine is never quite the trainer
        algorithm = truncated(algorithm, config.staleness, config.importance_cap)
    check_teacher(config.algorithm, algorithm, has_teacher=teaches)
    return algorithm
