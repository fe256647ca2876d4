"""On-policy distillation in one loop: the student plays, the teacher scores each of its tokens, one update follows.

    python -m turngym.scripts.examples.opd --steps 100

The student and the teacher of the generated household come along. The student wins 31 % of the panel's attempts, the
teacher 74 %, and 100 steps take about four minutes on two cores.

It computes what `turngym train opd` computes, in the simplest form. It leaves out: workers, microbatches, resuming,
checkpoints, the weight for tokens that an older policy sampled, and large vocabularies. `turngym train` compares the 50
likeliest tokens of the teacher, so that [tokens, vocabulary] never exists. Here the vocabulary is small, and the whole
distributions are compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from turngym.agents import (
    ChatRenderer,
    ChatSettings,
    Job,
    LocalEngine,
    ModelAgent,
    env_maker,
    evaluate,
    load_policy,
    load_world,
    save_model,
)
from turngym.agents.playing.env_maker import probe
from turngym.agents.playing.rollout import Rollout
from turngym.core import Sampling
from turngym.envs import make_channel
from turngym.trainers import RolloutBatch, pack
from turngym.trainers.token_weights import trajectory_weights

parser = argparse.ArgumentParser(description="On-policy distillation in one loop")
parser.add_argument("--steps", type=int, default=100, help="updates of the student")
parser.add_argument("--episodes", type=int, default=64, help="episodes of each step")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW; models of billions need 1e-6")
parser.add_argument("--limit", type=int, default=None, help="evaluate on so many tasks of the panel")
parser.add_argument("--out", default="runs/example-opd", help="folder of the trained model")


def logp_of(model: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at each sampled token: [N, V], nats.

    Rows have different lengths: they are padded at the end to [R, L]. Causal attention never looks ahead, so the
    padding changes nothing and needs no mask.
    """
    lengths = np.diff(batch.row_offsets)
    ids = torch.zeros(batch.rows, int(lengths.max()), dtype=torch.long)
    ids[torch.from_numpy(batch.row_M), torch.from_numpy(batch.position_M)] = torch.from_numpy(batch.input_ids_M)
    # the token before a label predicts it: `predictor_N` is its place among all tokens of the batch
    row, position = batch.row_M[batch.predictor_N], batch.position_M[batch.predictor_N]
    return model(input_ids=ids).logits[torch.from_numpy(row), torch.from_numpy(position)].log_softmax(-1)


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)

    # Who plays, who teaches, and where.
    world = load_world("alfworld")
    student, tokenizer = load_policy(world.checkpoint("student"), "cpu")
    teacher, _ = load_policy(world.checkpoint("teacher"), "cpu")
    chat = ChatSettings.load(world.checkpoint("student"))
    make = env_maker(world.env_id, **world.make, split=world.split, channel=chat.channel)
    env = probe(world.env_id, {**world.make, "split": world.split})
    task_ids, channel = env.task_ids(), make_channel(chat.channel, env.tool)

    # The engine samples from the student's weights as they are: it shares them with the optimizer.
    engine = LocalEngine(student, tokenizer=tokenizer)
    sampling = Sampling(temperature=1.0, max_new_tokens=chat.max_new_tokens)
    agent = ModelAgent(engine, ChatRenderer(tokenizer), channel, sampling)
    rollout = Rollout(make, agent, max_turns=world.max_turns, system=chat.system)
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.lr, weight_decay=0.01)

    def success(folder: str | Path) -> str:
        result = evaluate(world.panel, f"model:{folder}", samples=4, limit=options.limit, progress=False)
        return f"{result.scores.overall.avg} % of the panel"

    print(f"before: {success(world.checkpoint('student'))}", flush=True)
    for step in range(1, options.steps + 1):
        # 1. The student plays. Every episode has a random stream of its own, made of task, sample and seed.
        drawn = np.random.default_rng(step).choice(len(task_ids), options.episodes, replace=False)
        episodes = rollout.run([Job(task_id=task_ids[number], sample=0, seed=step) for number in drawn])

        # 2. Its tokens become one batch: ids as sampled, observations as inputs only.
        batch = pack(episodes)

        # 3. The teacher reads the same tokens and says what it would have said in each place.
        with torch.no_grad():
            teacher_logp_NV = logp_of(teacher, batch)

        # 4. Reverse KL per token, sum_v p (log p - log q): the student gives up what the teacher would not say. The
        #    gradient flows through p alone; which states were visited is data.
        student_logp_NV = logp_of(student, batch)
        kl_N = (student_logp_NV.exp() * (student_logp_NV - teacher_logp_NV)).sum(-1)

        # 5. Every episode counts the same, however long it is: w_i = 1 / (E * tokens of its episode).
        loss = (torch.from_numpy(trajectory_weights(batch)).float() * kl_N).sum()

        # 6. One update. The engine keeps caches of the old weights, and is told.
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, step / 11)  # a warm-up: Adam's first steps are large and blind
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        engine.weights_changed(step)

        turns = np.mean(batch.depth_E)
        print(f"step {step:3}  KL {kl_N.mean():.3f}  success {100 * batch.success_E.mean():3.0f} %  turns {turns:.1f}")

    # The folder holds all that is needed to play: weights, tokenizer, and turngym.json with channel and system message.
    save_model(student, options.out)
    tokenizer.save_pretrained(options.out)
    chat.save(options.out)
    print(f"after: {success(options.out)}")


if __name__ == "__main__":
    main()
