"""How a proxy that learns is put together: what answers, what trains beside it, and how both share the weights.

`build` is read first: it loads the models and connects a `ProxyService`, which answers clients and records turns, with
a `Training`, whose thread takes the sessions that have ended and been judged. `trainers.live.serving` says what answers
while the student learns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from turngym.agents.models import find_model
from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.sessions import Feedback, FeedbackStatus, Place
from turngym.agents.proxy.turn_records import votes_record
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.open_renderer import end_ids
from turngym.agents.saved_model import companion_writer
from turngym.core.background_threads import say
from turngym.core.disk_space import RoomToWrite
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.redaction import redacted_traceback
from turngym.core.spec import changed, to_table
from turngym.core.trace import TraceWriter, iter_trace
from turngym.trainers import content_hashes
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import BuildContext, find_algorithm
from turngym.trainers.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.live.judging import SessionJudge, TurnJudging, make_session_judge
from turngym.trainers.live.proxy_options import AnyProxy, LearningProxy, named
from turngym.trainers.live.serving import Serving, open_engine
from turngym.trainers.live.sessions import SessionBuffer
from turngym.trainers.progress import Progress
from turngym.trainers.rollout_order import truncated
from turngym.trainers.scorer import load_student
from turngym.trainers.teacher import check_teacher, no_longer_than, open_frozen, scoring_of, teachers_length
from turngym.trainers.token_losses import bounded
from turngym.trainers.train_loop import Trainer

SESSIONS = "sessions.jsonl"
"""Judged sessions, as a trace."""


class Training:
    """One trainer on one proxy's sessions. What an earlier process left unused is taken in when it is made.

    Args:
        judge: None for an algorithm that asks none.
        step: last step that an earlier process finished; 0 for a new run.
        resume: whether training continues from a checkpoint in the run's folder.
    """

    trainer: Trainer
    """Set by `build`, before `start`."""

    def __init__(
        self,
        service: ProxyService,
        serving: Serving,
        judge: SessionJudge | None,
        algorithm: Algorithm,
        config: LearningProxy,
        *,
        step: int,
        resume: bool,
    ) -> None:
        self.algorithm, self.resume, self.step = algorithm, resume, step
        self.error = ""
        """Why training ended early."""
        self.finished = False
        """Whether all steps are done."""
        self._serving, self._judge = serving, judge
        self._thread: threading.Thread | None = None
        self.room = RoomToWrite()

        def record(values: Mapping[str, Any]) -> None:
            self.room(lambda: service.recorder.write(values))

        path, unused = config.out / SESSIONS, {episode.task.task_id for episode in service.unused}
        trace = iter_trace(path) if unused and path.exists() else ()
        episodes = (entry for entry in trace if isinstance(entry, Episode))
        judged_before = {episode.task.task_id: episode for episode in episodes if episode.task.task_id in unused}
        self._trace = TraceWriter(path)
        self.source = SessionBuffer(
            engine=service.engine,
            publish=lambda version: serving.publish(version, service.engine),
            select=algorithm.select,
            record=record,
            batch_turns=config.batch_turns,
            live=serving.live,
            staleness=None if config.staleness is None else config.staleness.staleness,
            newest_first=config.order == "newest",
        )
        self._judging: TurnJudging | None = None
        if judge is not None:
            self._judging = TurnJudging(
                judge,
                on_votes=lambda key, turn, judgment: record(votes_record(key, turn, judgment)),
                on_judged=self._judged,
                votes=service.votes,
                feedback=service.feedback_before,
            )
        for episode in service.unused:
            if (judged := judged_before.get(episode.task.task_id)) is None:
                self.put(episode)
                continue
            for (key, turn), feedback in service.feedback_before.items():
                # a user may have said so after the session was judged
                if judge is not None and key == judged.task.task_id:
                    judged = judge.amended(judged, turn, feedback)
            self.source.put_judged([judged])
        for episode in service.open_episodes():
            self.put(episode)
        service.unused = []
        service.on_session, service.heard.tell = self.put, self.feedback

    def put(self, episode: Episode) -> None:
        """Take in a session that has another turn, or has ended."""
        if self.finished:
            return
        if self._judging is not None:
            self._judging.put(episode)
        elif episode.meta["ended"] != "open":
            self._judged(episode)

    def feedback(self, place: Place, feedback: Feedback | None, is_open: bool) -> FeedbackStatus:
        """Take in a user's feedback on a turn; None takes it back, because the turn was answered anew."""
        judge = self._judge
        if self._judging is None or judge is None:
            return "recorded"
        if self._judging.hear(place, feedback, is_open):
            return "counted"
        key, turn = place
        ready = feedback is not None and self.source.amend(key, lambda episode: judge.amended(episode, turn, feedback))
        return "counted" if ready else "late"

    def updated(self, step: int) -> None:
        """Called by the trainer when it has changed the weights."""
        self.source.updated(step)
        # after it: whoever reads the step finds its weights being served
        self.step = step

    def start(self, on_failure: Callable[[], None]) -> None:
        """Train in a thread; `on_failure` is called if that fails."""
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name="proxy-trainer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way, save and end."""
        self.room.close()
        if self._judging is not None:
            self._judging.close()
        self.source.close()
        if self._thread is not None:
            # ends: a step computes; what it waits for (engine, servers, judge, disk) has limits or was closed above
            self._thread.join()
        self._trace.close()

    def health(self) -> Mapping[str, Any]:
        running = "waits for room on the disk" if self.room.waiting else "running"
        state = "failed" if self.error else "finished" if self.finished else running
        judging = {} if self._judging is None else self._judging.as_json()
        training = {"state": state, "algorithm": self.algorithm.name, "step": self.step}
        training |= judging | self.source.as_json()
        return {"training": training, "serving": self._serving.as_json(), "left_out": self.source.left_out_counts()}

    def _run(self, on_failure: Callable[[], None]) -> None:
        try:
            self.trainer.train(resume=self.resume)
            self.finished = True
            say("all training steps are done; serving goes on", sys.stdout)
        except KeyboardInterrupt:
            pass  # `stop` was called; everything is saved
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not isinstance(error, TurngymError):
                say(redacted_traceback(error))
            on_failure()
        finally:
            # whatever ended training, serving goes on: the engine must not stay paused for a step that never comes
            self.source.resume()

    def _judged(self, episode: Episode) -> None:
        self.room(lambda: self._trace.write(episode))
        self.source.put_judged([episode])


class LineProgress(Progress):
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
        texts = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in numbers.items()
            if value is not None
        )
        say(f"step {row['step']}: {', '.join(texts)}", sys.stdout)


def build(config: AnyProxy, share: Callable[[int], int] = lambda limit: limit) -> tuple[ProxyService, Training | None]:
    """Load the models and put the run together; a folder that holds a run goes on. `share` is as in `ProxyService`.

    Raises TurngymError for a judge, a teacher or a folder that does not fit.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    student = config.student
    # the whole run goes by the folders of models that are named as on the hub; what clients ask for keeps the name
    config = changed(config, student=find_model(config.student))
    if isinstance(config, LearningProxy) and config.teacher is not None:
        named_teacher = changed(config.part("teacher"), teacher=find_model(config.teacher))
        config = changed(config, method=changed(config.method, teacher=named_teacher))
    chat = ChatSettings.load(config.student)
    model, tokenizer = load_student(config.student, config.dtype, config.device)
    settings = named(config.proxy, student, chat)
    # who scores comes first: no id is drawn and no session grows that they could not score
    algorithm = teacher = reference = vocab_size = longest = None
    if isinstance(config, LearningProxy):
        algorithm = _algorithm(config, tokenizer)
        scoring = scoring_of(config.loop, dtype=config.part("frozen").teacher_dtype, device=config.device)
        student_parts = (model, tokenizer)
        teacher, reference, vocab_size = open_frozen(
            config, config.student, config.dtype, algorithm, student_parts, False, **scoring
        )
        longest = teachers_length(algorithm, teacher, config.teacher)
    room = no_longer_than(longest, chat, model).max_context
    serving = open_engine(config, model, tokenizer, room, settings.max_batch, vocab_size)
    engine = serving.engine
    renderer = ChatListRenderer(tokenizer, thinking=chat.thinking, stop_ids=end_ids(model))
    seed, max_context = config.seed, engine.max_length
    make_service = partial(
        ProxyService,
        engine,
        renderer,
        config.out,
        settings,
        max_context=max_context,
        seed=seed,
        on_close=serving.close,
        share=share,
    )
    if not isinstance(config, LearningProxy) or algorithm is None:
        return make_service(), None
    judge = make_session_judge(config, algorithm, renderer, max_context)
    checkpoint = latest_checkpoint(config.out) if list_checkpoints(config.out) else None
    step = 0 if checkpoint is None else read_state(checkpoint)["step"]
    service = make_service(temperature=config.run.temperature, learns=True, resumed_from=step)
    training = Training(service, serving, judge, algorithm, config, step=step, resume=checkpoint is not None)

    spec = {name: value for name, value in to_table(config).items() if name in SHARED} | {"chat": chat.identity}
    training.trainer = Trainer(
        model=model,
        algorithm=algorithm,
        source=training.source,
        out=config.out,
        run=config.loop,
        optimizer=config.optimizer,
        teacher=teacher,
        reference=reference,
        on_update=training.updated,
        save_extra=companion_writer(config.student, chat),
        vocab_size=vocab_size,
        spec=spec,
        contents=content_hashes.of_run(spec, teacher),
        progress=LineProgress(),
        writing=training.room,
    )
    return service, training


SHARED = ("algorithm", "method", "student", "dtype", "batch_turns", "staleness", "run", "optimizer", "lora")
"""Settings that a proxy must share with the run that it goes on with."""


def _algorithm(config: LearningProxy, tokenizer: Any) -> Algorithm:
    if config.distill.vocabulary != "same":
        raise TurngymError(
            f"distill vocabulary is {config.distill.vocabulary} with a proxy, whose clients write the prompts; valid: "
            "same"
        )
    spec = find_algorithm(config.algorithm)
    teaches = config.has_teacher
    context = BuildContext(run=config.loop, distill=config.distill, has_teacher=teaches, tokenizer=tokenizer)
    # sessions end long after their first turn, and wait for the judge: the student has learned in between
    algorithm = bounded(spec.build(config.own, context), config.part("dual_clip"), stale=True)
    # what was drawn is stale here even if no update is allowed for: the engine is never quite the trainer
    algorithm = truncated(algorithm, config.staleness)
    check_teacher(config.algorithm, algorithm, has_teacher=teaches)
    return algorithm
