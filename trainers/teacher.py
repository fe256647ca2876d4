"""Where a run's frozen models come from: its teacher, in this process or on servers, and its reference."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from turngym.agents.local_engine.positions import position_limit
from turngym.agents.models import find_model, load_model, model_config
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.renderer import ChatRenderer, TextEpisodes
from turngym.agents.servers.server_options import AnyTeacher, TeacherServed
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.plugins import PluginError, find
from turngym.core.protocols import Scorer
from turngym.core.spec import changed
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.microbatch import packing_for
from turngym.trainers.models import vocabulary_size
from turngym.trainers.run_config import DistillConfig, RunConfig
from turngym.trainers.scorer import LocalScorer, ModelWeights, load_scorer
from turngym.trainers.several_envs import FurtherEnv
from turngym.trainers.targets import StudentTopK, TeacherTopK
from turngym.trainers.train_config import Learns

if TYPE_CHECKING:
    from turngym.agents.servers.policy import ServerScorer

TRANSLATIONS = "turngym.translations"
"""Entry points under which packages offer a `Translation`."""
BUILT_IN: Mapping[str, str] = {"other": "turngym.trainers.contrib.other_vocabulary:of_other_vocabulary"}
"""Those of this package, and where they are."""


class Translation(Protocol):
    """Makes an algorithm for a teacher that reads other ids than the student."""

    def __call__(
        self,
        algorithm: Algorithm,
        distill: DistillConfig,
        /,
        *,
        student: ChatRenderer,
        reader: TextEpisodes,
        sizes: tuple[int, int],
    ) -> Algorithm:
        """`algorithm`, whose target function asks a teacher of other ids about the student's text.

        Raises SettingsError where such a teacher cannot teach it.

        Args:
            algorithm: made for a teacher of the student's ids.
            distill: how the two are compared.
            student: the student's renderer.
            reader: writes episodes as the teacher's ids.
            sizes: rows of the LM heads (student's, teacher's).
        """


def find_translation(name: str) -> Translation | None:
    """The translation that `distill.vocabulary` names; None for `same`, where the teacher must have the student's ids.

    Raises PluginError for a name that stands for nothing, or not for a function.
    """
    if name == "same":
        return None
    translation = find(TRANSLATIONS, BUILT_IN.get(name, name), {}, known=("same", *BUILT_IN))
    if not callable(translation):
        raise PluginError(f"translation {name!r} is {translation!r}; valid: a Translation (turngym.trainers)")
    return translation


def scoring_of(run: RunConfig, *, dtype: str, device: str) -> dict[str, Any]:
    """Arguments of `load_scorer` that are the same for all frozen models of a run."""
    passes = {"max_tokens": run.pass_tokens, "chunk": run.head_chunk, "packing": run.packing}
    return {"dtype": dtype, "device": device, **passes}


def check_teacher(name: str, algorithm: Algorithm, *, has_teacher: bool) -> None:
    """Raises TurngymError where the algorithm called `name` distills from a teacher and the run has none."""
    if algorithm.needs_teacher and not has_teacher:
        raise TurngymError(f"{name} distills from a teacher: name its folder with --teacher (in Python teacher=...)")


def _open_teacher(
    algorithm: Algorithm,
    teacher: AnyTeacher | None,
    student: tuple[Any, Any],
    *,
    other: bool,
    **scoring: Any,
) -> tuple[Scorer | None, int | None]:
    if not algorithm.needs_teacher or teacher is None:
        return None, None
    if isinstance(teacher, TeacherServed):
        from turngym.agents.servers.open_servers import teacher_scorer

        size = vocabulary_size(student[0])
        # of several processes one compares
        compares, dtype = os.environ.get("RANK", "0") == "0", scoring["dtype"]
        load = (lambda folder: ModelWeights(load_model(folder, dtype=dtype))) if compares else None
        served, shared = teacher_scorer(teacher, teacher.teacher, student[1], size, algorithm.distill_temperature, load)
        # what will be asked for is asked for once now, and not after the first rollout
        row, position, target = np.array([0, 1], np.int32), np.array([1]), algorithm.target_fn
        if isinstance(target, TeacherTopK):
            served.topk([row], [position], target.k)
        if isinstance(target, StudentTopK):
            served.gather([row], [position], [np.arange(target.k)[None]])
        return served, shared
    temperature = algorithm.distill_temperature
    scorer = load_scorer(teacher.teacher, temperature=temperature, student=student, other=other, **scoring)
    return scorer, scorer.vocab_size


def teachers_length(
    algorithm: Algorithm,
    teacher: Scorer | None,
    folder: Path | None,
    further: Sequence[FurtherEnv] = (),
    *,
    other: bool = False,
) -> int | None:
    """Returns the most ids of a row that every teacher of the run can read; None where none says.

    Args:
        algorithm: whether it needs a teacher.
        teacher: the run's, whose servers may be started with less than its positions.
        folder: of the teacher, also of one on servers; None: those alone have limits.
        further: the environments of `--also`, whose teachers count, too.
        other: whether the teacher has other ids than the student; it cuts what it reads by itself.
    """
    folders = (folder, *(env.teacher for env in further)) if algorithm.needs_teacher and not other else ()
    limits = [position_limit(model_config(find_model(path))) for path in folders if path is not None]
    if teacher is not None and not isinstance(teacher, LocalScorer):
        limits.append(cast("ServerScorer", teacher).longest)
    return min((limit for limit in limits if limit is not None), default=None)


def no_longer_than(longest: int | None, settings: ChatSettings, model: Any) -> ChatSettings:
    """Returns `settings` with the limit of ids that the teachers have, and says so where it is less than the student's.

    Raises SettingsError for settings that go beyond the student's positions.
    """
    model_limit, wanted = position_limit(model.config), settings.max_context
    if model_limit is not None and wanted is not None and wanted > model_limit:
        raise SettingsError(
            f"--max-context is {wanted}; valid: 1 to {model_limit}, the positions that {type(model).__name__} knows"
        )
    context = wanted or model_limit
    if longest is None or (context is not None and context <= longest):
        return settings
    print(f"episodes end at {longest:,} ids: no teacher of the run can read more", file=sys.stderr)
    return changed(settings, max_context=longest)


def further_teachers(
    algorithm: Algorithm,
    further: Sequence[FurtherEnv],
    student: tuple[Any, Any],
    vocab_size: int | None,
    **scoring: Any,
) -> dict[str, Scorer]:
    """Returns the teachers of those environments of `--also` that name one, by the environment's name.

    Raises SettingsError for one without a run's teacher beside it, or that shares other ids with the student.
    """
    teachers: dict[str, Scorer] = {}
    for item in further:
        if item.teacher is None:
            continue
        if not algorithm.needs_teacher:
            raise SettingsError(f"--also {item.env}: {algorithm.name} has no teacher; leave teacher={item.teacher} out")
        scorer = load_scorer(item.teacher, temperature=algorithm.distill_temperature, student=student, **scoring)
        if scorer.vocab_size != vocab_size:
            raise SettingsError(
                f"--also {item.env}: {item.teacher} shares {scorer.vocab_size} ids with the student, --teacher "
                f"{vocab_size}; teachers of one run share the same"
            )
        teachers[item.name] = scorer
    return teachers


def is_the_base(config: Learns, dtype: str) -> bool:
    """Whether the initial policy is the student without its adapters, so that no second model is loaded.

    One that is renewed, or in another precision than `dtype`, the student's, has weights of its own.
    """
    return config.lora is not None and config.part("reference") is None and dtype == config.part("frozen").teacher_dtype


def open_frozen(
    config: Learns,
    folder: Path,
    dtype: str,
    algorithm: Algorithm,
    student: tuple[Any, Any],
    other: bool,
    /,
    **scoring: Any,
) -> tuple[Scorer | None, LocalScorer | None, int | None]:
    """Returns the teacher and the initial policy as scorers, and the number of ids that teacher and student share.

    Each of them is None for an algorithm that needs none. The number is None, too, for a teacher that may have `other`
    ids than the student, and has. The student's own weights serve as initial policy where nothing but adapters has
    changed (`is_the_base`). `folder` and `dtype` are those of the `student`, a model with its tokenizer; `scoring` is
    `scoring_of` the run.
    """
    teacher, vocab_size = _open_teacher(algorithm, config.part("teacher"), student, other=other, **scoring)
    if not algorithm.needs_reference:
        return teacher, None, vocab_size
    scoring |= {"temperature": algorithm.distill_temperature, "vocab_size": vocab_size}
    if not is_the_base(config, dtype):
        return teacher, load_scorer(folder, **scoring), vocab_size
    reference_options = {name: value for name, value in scoring.items() if name not in ("dtype", "device")}
    reference_options["packing"] = packing_for(reference_options["packing"], student[0])
    return teacher, LocalScorer(model=student[0], bare=True, **reference_options), vocab_size
