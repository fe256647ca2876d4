"""GRPO in one loop: eight attempts at each task; what did better than their mean becomes likelier.

    python -m turngym.scripts.examples.grpo --steps 24

The student of the generated household comes along. It wins 31 % of the panel's attempts; 24 steps add about ten points
and take two to three minutes on two cores.

It computes what `turngym train grpo` computes, in the simplest form. It leaves out: workers, microbatches, resuming,
checkpoints, the KL to the initial policy, entropy, other objectives, and filling up steps whose groups have nothing to
compare. `turngym train` computes the log-probabilities of sampled tokens in chunks, so that [tokens, vocabulary] never
exists.
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
from turngym.trainers.group_advantage import grpo_advantage
from turngym.trainers.losses import clipped_surrogate
from turngym.trainers.token_weights import trajectory_weights

parser = argparse.ArgumentParser(description="GRPO in one loop")
parser.add_argument("--steps", type=int, default=24, help="batches of episodes")
parser.add_argument("--tasks", type=int, default=8, help="tasks of each step")
parser.add_argument("--attempts", type=int, default=8, help="episodes of each task: one group")
parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW; models of billions need 1e-6")
parser.add_argument("--limit", type=int, default=None, help="evaluate on so many tasks of the panel")
parser.add_argument("--out", default="runs/example-grpo", help="folder of the trained model")


def logp_of(model: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """Log-probability of each sampled token: [N], nats.

    Rows have different lengths: they are padded at the end to [R, L]. Causal attention never looks ahead, so the
    padding changes nothing and needs no mask.
    """
    lengths = np.diff(batch.row_offsets)
    ids = torch.zeros(batch.rows, int(lengths.max()), dtype=torch.long)
    ids[torch.from_numpy(batch.row_M), torch.from_numpy(batch.position_M)] = torch.from_numpy(batch.input_ids_M)
    # the token before a label predicts it: `predictor_N` is its place among all tokens of the batch
    row, position = batch.row_M[batch.predictor_N], batch.position_M[batch.predictor_N]
    logp_NV = model(input_ids=ids).logits[torch.from_numpy(row), torch.from_numpy(position)].log_softmax(-1)
    return logp_NV.gather(-1, torch.from_numpy(batch.label_N)[:, None])[:, 0]


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)

    # Who plays, and where.
    world = load_world("alfworld")
    student, tokenizer = load_policy(world.checkpoint("student"), "cpu")
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
        # 1. The student plays every task several times. Attempts at one task are a group.
        drawn = np.random.default_rng(step).choice(len(task_ids), options.tasks, replace=False)
        jobs = [
            Job(task_id=task_ids[number], sample=sample, group=group, seed=step)
            for group, number in enumerate(drawn)
            for sample in range(options.attempts)
        ]
        episodes = rollout.run(jobs)

        # 2. A group whose attempts are all worth the same says nothing about what to do, and is left out.
        played = {
            job.group: [episode.episode_return for episode in episodes if episode.group == job.group] for job in jobs
        }
        compared = [episode for episode in episodes if max(played[episode.group]) > min(played[episode.group])]
        won = np.mean([episode.success for episode in episodes])
        told_apart = sum(max(returns) > min(returns) for returns in played.values())
        print(f"step {step:3}  success {100 * won:3.0f} %  of {options.tasks} groups ", end="")
        print(f"{told_apart} have something to compare", flush=True)
        if not compared:
            continue

        # 3. One batch: ids as sampled, observations as inputs only, and the log-probabilities as they were drawn.
        batch = pack(compared)
        behavior_logp_N = torch.from_numpy(batch.behavior_logp_N)

        # 4. An attempt's advantage, (return - mean of its group) / deviation, goes to each of its tokens.
        advantage_E = grpo_advantage(batch.reward_E, batch.group_E)
        advantage_N = torch.from_numpy(advantage_E[batch.episode_N]).float()
        weight_N = torch.from_numpy(trajectory_weights(batch)).float()  # every episode counts the same

        # 5. Four updates from one batch, since playing costs more than learning. From the second on the student is not
        #    the policy that played: the clip ends the gradient of a token whose probability has moved too far. The
        #    learning rate rises over three steps and falls to the end: at once and throughout, it undoes what was won.
        optimizer.param_groups[0]["lr"] = options.lr * min(1, step / 3) * (1 - (step - 1) / options.steps)
        for _ in range(4):
            surrogate = clipped_surrogate(logp_of(student, batch), behavior_logp_N, advantage_N)
            loss = (weight_N * surrogate.loss_N).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()

        # 6. The engine keeps caches of the old weights, and is told.
        engine.weights_changed(step)

    # The folder holds all that is needed to play: weights, tokenizer, and turngym.json with channel and system message.
    save_model(student, options.out)
    tokenizer.save_pretrained(options.out)
    chat.save(options.out)
    print(f"after: {success(options.out)}")


if __name__ == "__main__":
    main()
