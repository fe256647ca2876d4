"""What is measured beside success: held-out text under a model, and how much of the returns a critic explains."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from turngym.agents.evaluation.statistics import t_quantile
from turngym.scripts.bench.learn.jobs import Job, metric_rows
from turngym.scripts.bench.learn.rise import crossed_error, differences

NATS = "heldout.json"
"""In a run's folder: nats per token of each held-out document under its last model."""
Nats = Mapping[str, float]
"""Document -> nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval, which no scale bounds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def crossed(runs: Sequence[Nats]) -> Estimate:
    """Mean over seeds and documents, both crossed random effects (`rise.crossed_error`); of one seed over documents."""
    values = [[run[name] for name in sorted(runs[0])] for run in runs]
    mean = fmean(fmean(row) for row in values)
    if len(values) > 1:
        half = crossed_error(values)
    else:
        half = t_quantile(0.975, len(values[0]) - 1) * stdev(values[0]) / math.sqrt(len(values[0]))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def forgotten(before: Nats, after: Sequence[Nats]) -> Estimate:
    """How many nats per token more the runs' models need than the one that they began with."""
    return crossed(differences([before] * len(after), after))


def more_forgotten(control: Sequence[Nats], method: Sequence[Nats]) -> Estimate:
    """The method's nats minus the control's, paired by seed and document."""
    return crossed(differences(control, method))


def heldout_nats(job: Job, documents: Sequence[str]) -> Nats:
    """Nats per token of `documents` under the job's last model; kept in the job's folder for the next report."""
    path = job.folder / NATS
    if not path.exists():
        path.write_text(json.dumps(text_nats(job.model, documents), indent=1) + "\n", encoding="utf-8")
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found


def text_nats(model: Path, documents: Sequence[str]) -> dict[str, float]:
    """Number of each document -> mean negative log-likelihood of its tokens after the first, at temperature 1."""
    from turngym.trainers.scorer import load_scorer, load_student

    _, tokenizer = load_student(model, "float32", "cpu")
    rows = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in documents]
    scorer = load_scorer(model, dtype="float32", device="cpu", temperature=1.0, max_tokens=2048)
    scored = scorer.logprobs(rows, [np.arange(1, len(row)) for row in rows])
    return {str(place): -float(np.mean(part, dtype=np.float64)) for place, part in enumerate(scored)}


def critic_explained(job: Job) -> float | None:
    """Mean of the metric over the second half of the run's steps; None where no step has it."""
    rows = [row for row in metric_rows(job.folder) if row.get("critic_explained") is not None]
    late = [float(str(row["critic_explained"])) for row in rows if int(str(row["step"])) > job.steps / 2]
    return fmean(late) if late else None
