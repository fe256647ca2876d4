"""A whole training run in miniature: random observations, a student that really samples, a peaked teacher.

Run as a script it trains into a folder (used to kill a process in the middle): `toy_run.py OUT STEPS [resume] [slow]`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turngym.core.episode import Episode, Origin, Status, Turn
from turngym.core.protocols import EvalPoint
from turngym.core.rollout_request import RolloutRequest
from turngym.core.task import Task, Verdict
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import sft, turnopd
from turngym.trainers.algorithms.turnopd import DepthConfig
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.models import tiny_qwen3
from turngym.trainers.optimizer_step import Forward, accumulate
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

VOCAB, PROMPT, RESPONSE = 60, 3, 2
LENGTHS = (2, 3, 4, 6)


def tiny(seed: int, sharpness: float = 1.0) -> Any:
    """2 layers, width 32; larger embeddings give more decided predictions."""
    model = tiny_qwen3(VOCAB, width=32, layers=2, heads=4, seed=seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(sharpness)
    return model


def episode(ids: np.ndarray, logp: np.ndarray, number: int, status: Status, origin: Origin = "policy") -> Episode:
    """`ids` [turns * (PROMPT + RESPONSE)], `logp` [turns, RESPONSE]; successful when its number is even."""
    turns = []
    for index in range(len(logp)):
        start = index * (PROMPT + RESPONSE)
        spans = {"prompt_span": (start, start + PROMPT), "response_span": (start + PROMPT, start + PROMPT + RESPONSE)}
        turn = Turn(
            index=index,
            observation="",
            admissible=None,
            response="",
            action="",
            verdict=Verdict.OK,
            reward=0.0,
            logprobs=logp[index].astype(np.float32) if origin == "policy" else None,
            origin=origin,
            **spans,
        )
        turns.append(turn)
    success = status is Status.COMPLETED and number % 2 == 0
    return Episode(
        task=Task(env_id="toy", task_id=f"toy/{number}", sha256="0" * 64, split="toy", category="toy"),
        seed=0,
        sample=0,
        group=number,
        segments=(ids.astype(np.int32),),
        turns=tuple(turns),
        status=status,
        success=success,
        episode_return=float(success),
    )


def demonstrations(count: int, seed: int = 0) -> list[Episode]:
    """Episodes whose responses repeat the last two ids of the prompt: learnable."""
    rng = np.random.default_rng(seed)
    episodes = []
    for number in range(count):
        turns = LENGTHS[number % len(LENGTHS)]
        ids = rng.integers(0, VOCAB, size=(turns, PROMPT + RESPONSE))
        ids[:, PROMPT:] = ids[:, PROMPT - RESPONSE : PROMPT]
        episodes.append(
            episode(ids.reshape(-1), np.zeros((turns, RESPONSE)), number, Status.COMPLETED, "demonstration")
        )
    return episodes


@dataclass(frozen=True, slots=True)
class Sampled:
    """A `RolloutSource`: observations are random ids, responses are sampled from the student."""

    model: Any
    pause: float = 0.0

    @torch.no_grad()
    def __call__(self, request: RolloutRequest) -> list[Episode]:
        time.sleep(self.pause)
        rng = np.random.default_rng((11, request.step))
        depth = min(max(LENGTHS), request.max_turns)
        ids = np.zeros((request.episodes, 0), np.int64)
        logps = np.zeros((request.episodes, depth, RESPONSE))
        for turn in range(depth):
            ids = np.concatenate([ids, rng.integers(0, VOCAB, size=(request.episodes, PROMPT))], axis=1)
            for place in range(RESPONSE):
                logp = (self.model(torch.from_numpy(ids)).logits[:, -1] / request.temperature).log_softmax(-1).double()
                share = logp.exp().cumsum(-1).numpy()
                drawn = np.minimum((rng.random((request.episodes, 1)) > share).sum(1), VOCAB - 1)
                logps[:, turn, place] = logp.numpy()[np.arange(request.episodes), drawn]
                ids = np.concatenate([ids, drawn[:, None]], axis=1)
        played = [self._cut(ids[n], logps[n], n, request.max_turns) for n in range(request.episodes)]
        return [replace(episode, group=n // request.group) for n, episode in enumerate(played)]

    def _cut(self, ids: np.ndarray, logp: np.ndarray, number: int, cap: int) -> Episode:
        length = LENGTHS[number % len(LENGTHS)]
        status = Status.COMPLETED if length <= cap else Status.TRUNCATED_DEPTH
        turns = min(length, cap)
        return episode(ids[: turns * (PROMPT + RESPONSE)], logp[:turns], number, status)


def trainer(out: Path, *, steps: int = 8, pause: float = 0.0, **changes: Any) -> Trainer:
    """TurnOPD on the toy; `changes` replace fields of the Trainer."""
    student = tiny(1)
    run = RunConfig(steps=steps, episodes=12, max_turns=6, eval_every=4, checkpoint_every=3, tracker=None)
    config = turnopd.TurnOpdConfig(depth=DepthConfig(warmup=1, probe_interval=3, min_successes=3))
    toy_trainer = Trainer(
        model=student,
        algorithm=turnopd.build(config, BuildContext(run=run, distill=DistillConfig(top_k=8))),
        source=Sampled(student, pause),
        out=out,
        run=run,
        optimizer=OptimizerConfig(lr=3e-3, lr_warmup=2, ppo_epochs=2, minibatches=2),
        teacher=LocalScorer(model=tiny(2, sharpness=12.0)),
        evaluate=lambda step: EvalPoint(avg=float(weight_sum(student) % 1.0), low=0.0, high=1.0),
    )
    return replace(toy_trainer, **changes)


def gradient(model: Any, batch: RolloutBatch, forward: Forward) -> tuple[dict[str, Any], torch.Tensor]:
    """Columns of the negative log-likelihood's mean over a batch, and its gradient, all parameters in one."""
    model.zero_grad()
    weight_N = np.full(batch.tokens, 1 / batch.tokens)
    loss = sft.build(sft.SftConfig(), BuildContext()).token_loss
    _, columns = accumulate(model, batch, targets=Targets(), weight_N=weight_N, token_loss=loss, forward=forward)
    return columns, torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


def weight_sum(model: Any) -> float:
    return float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    pause = 0.15 if "slow" in sys.argv else 0.0
    trainer(Path(sys.argv[1]), steps=int(sys.argv[2]), pause=pause).train(resume="resume" in sys.argv)
