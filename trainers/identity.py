"""What a run shares with the one that it goes on with, beside algorithm, run and optimizer: data, rules and models.

`Trainer` puts both together, and `trainers/run_folder.py` compares them with the checkpoint. Data are known by name,
files of one's own and models by content, since folders move. Who computes (workers, slots, servers) is not in it: no
episode depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turngym.agents.evaluation.training_evaluation import PanelEvaluation
from turngym.core.files import weights_hash
from turngym.core.spec import flat, to_table
from turngym.trainers import contents
from turngym.trainers.algorithm import Algorithm, find_algorithm
from turngym.trainers.lora import LoraConfig
from turngym.trainers.run_config import EVALUATION, fingerprint
from turngym.trainers.scorer import Scorer
from turngym.trainers.several_envs import FurtherEnv
from turngym.trainers.student_player import RunEnv
from turngym.trainers.train_config import TrainConfig


def of_training(
    config: TrainConfig,
    algorithm: Algorithm,
    envs: Mapping[str, RunEnv],
    teacher: Scorer | None,
    demonstrated: Mapping[str, Any],
    further: Sequence[FurtherEnv],
    panels: Mapping[str, PanelEvaluation],
) -> dict[str, Any]:
    """What a run of `turngym train` shares beside algorithm, run and optimizer; what its algorithm does not read is not
    in it.

    Args:
        config: the settings of the run.
        algorithm: which models and settings it needs.
        envs: the run's environments by name; its own is "".
        teacher: known by its folder's weights, or on servers by the name that they give it.
        demonstrated: what demonstrations add (`open_demonstrations`).
        further: the environments of --also, with their shares and teachers.
        panels: the evaluations by the name of their environment.
    """
    models, uses = config.models, find_algorithm(config.algorithm).reads
    identity: dict[str, Any] = {"models.dtype": models.dtype, **of_rollouts(envs[""], uses, demonstrated)}
    if algorithm.needs_teacher:
        # by content: folders may have moved when a run is resumed, or hold other weights under the same name
        named = None if config.teacher is None else weights_hash(config.teacher)
        # a teacher on servers that has no folder is known by the name that its server gives
        identity["teacher"] = named or teacher.fleet.servers[0].model  # type: ignore[union-attr]
    if algorithm.needs_reference:
        identity["models.reference"] = weights_hash(models.student)
    if algorithm.needs_teacher or algorithm.needs_reference:
        identity["frozen.teacher_dtype"] = config.part("frozen").teacher_dtype
    if "text" in uses:
        text = fingerprint(config.part("lm_loss"))
        # by name alone, for folders may have moved
        identity |= {f"lm_loss.{name}": value for name, value in text.items()}
        identity["lm_loss.files"] = [path.name for path in text["files"]]
    for item in further:
        name = item.name
        identity |= {f"{name}.content of {key}": value for key, value in contents.of_files(item.make).items()}
        identity |= {f"{name}.{key}": value for key, value in of_rollouts(envs[name], uses).items()}
        identity[f"{name}.share"] = item.share
        if item.teacher is not None:
            identity[f"{name}.teacher"] = weights_hash(item.teacher)
    for name, panel in panels.items():
        group = f"{EVALUATION}.{name}" if name else EVALUATION
        identity |= {f"{group}.{key}": value for key, value in of_evaluations(panel).items()}
    files = contents.of_files(to_table(config))
    # a panel counts among the evaluations, which a run may get later
    identity |= {f"content of {name}": content for name, content in files.items() if name != "evaluation.panel"}
    return identity | of_adapters(config.lora, models.student)


def of_rollouts(
    env: RunEnv, uses: frozenset[str], demonstrated: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """What is played, and by which rules, for an algorithm that `uses` so much of it."""
    student, play = env.student, env.config.play
    identity: dict[str, Any] = {"env": play.env_id, "split": play.split, "env_kwargs": play.env_kwargs}
    identity |= {"chat": student.settings.identity, **student.scoring}
    if student.examples.identity is not None:
        identity["examples"] = student.examples.identity
    if play.rollout_dtype is not None:
        identity["rollout_dtype"] = play.rollout_dtype
    if env.info.judge is not None:
        judging = to_table(env.config.part("judge"))
        # neither when to give the judge up nor how often its episodes are kept changes what is learned
        del judging["judge_unread"], judging["judge_every"]
        identity["judge"] = {**judging, "expert": env.config.part("expert")}
    # names alone, for folders may have moved
    identity["collect.traces"] = [path.name for path in play.traces]
    if "expert" in uses:
        identity["collect.expert"] = env.config.part("expert")
    if "shown" in uses:
        identity |= demonstrated
    return identity | ({} if student.preset is None else dict(student.preset.identity))


def of_evaluations(panel: PanelEvaluation) -> dict[str, Any]:
    """How the student is evaluated: evaluations that differ in this are no points of one curve."""
    spec = panel.evaluation.spec
    played = {"play": to_table(spec.play), "temperature": getattr(spec.agent, "temperature", None)}
    # as JSON gives it back: a checkpoint is compared after it was read
    found: dict[str, Any] = json.loads(json.dumps(flat(played)))
    return found


def of_adapters(lora: LoraConfig | None, student: Path) -> dict[str, Any]:
    """What is trained in the place of the weights of the model in `student`; empty without adapters."""
    if lora is None:
        return {}
    # adapters are only right on the weights that they were trained on, so the student counts too
    return {"lora": {**asdict(lora), "targets": list(lora.targets)}, "student": weights_hash(student)}
