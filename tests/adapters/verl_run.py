"""Run by the interpreter that has verl: its own agent loop worker plays recorded episodes again.

    python verl_run.py TRACE STUDENT SEED OUT

The configuration is the one of docs/adapters.md. The server is a recording: it answers a prompt with what was sampled
after exactly these ids.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.episode import Episode
from turngym.core.trace import read_trace

DOCS = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
PROMPT, RESPONSE = 64, 512


class Server:
    """Stands where verl's server client stands. Attempts at one task are told apart by what they said before."""

    def __init__(self, episodes: list[Episode]) -> None:
        self.said: dict[tuple[int, ...], list[Any]] = {}
        self.asked = 0
        for episode in episodes:
            for turn in episode.turns:
                answer = (episode.response_ids(turn).tolist(), turn.logprobs.tolist())  # type: ignore[union-attr]
                self.said.setdefault(tuple(episode.prompt_ids(turn).tolist()), []).append(answer)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        assert sampling_params["logprobs"] is True
        assert sampling_params["stop"] == ["</action>"]
        self.asked += 1
        answers = self.said[tuple(prompt_ids)]
        ids, logprobs = answers.pop(0) if len(answers) > 1 else answers[0]
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": 5})


def worker(student: str, loops: Path, server: Server) -> Any:
    from hydra import compose, initialize_config_module
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={student}",
                f"{rollout}.name=sglang",
                f"{rollout}.prompt_length={PROMPT}",
                f"{rollout}.response_length={RESPONSE}",
                f"{rollout}.calculate_log_probs=true",
                f"{rollout}.agent.agent_loop_config_path={loops}",
            ],
        )
    return AgentLoopWorker(config, llm_client=server)


def batch(episodes: list[Episode], seed: int) -> Any:
    """One row per episode, as verl's data set and repetition make them."""
    from verl.protocol import DataProto

    columns: dict[str, list[Any]] = {
        "raw_prompt": [[{"role": "user", "content": episode.task.task_id}] for episode in episodes],
        "task_id": [episode.task.task_id for episode in episodes],
        "seed": [seed for _ in episodes],
        "sample": [episode.sample for episode in episodes],
        "agent_name": ["turngym" for _ in episodes],
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto(batch=None, non_tensor_batch=arrays, meta_info={"global_steps": 1, "validate": False})


def row(output: Any, number: int) -> dict[str, Any]:
    """What verl will train on, without its padding: 64 ids on the left, 512 on the right."""
    tensors = {name: values[number] for name, values in output.batch.items()}
    there = tensors["attention_mask"].bool()
    left, right = there[:PROMPT], there[PROMPT:]
    return {
        "prompt_ids": tensors["prompts"][left].tolist(),
        "response_ids": tensors["responses"][right].tolist(),
        "response_mask": tensors["response_mask"][right].tolist(),
        "logprobs": tensors["rollout_log_probs"][right].tolist(),
        "reward": float(tensors["rm_scores"].sum()),
        "reward_at": int(tensors["rm_scores"].nonzero()[0, 0]) if tensors["rm_scores"].any() else None,
        "turns": int(output.non_tensor_batch["__num_turns__"][number]),
        "status": str(output.non_tensor_batch["turngym_status"][number]),
    }


def main(trace: str, student: str, seed: str, out: str) -> None:
    episodes = list(read_trace(trace)[0])
    with tempfile.TemporaryDirectory() as folder:
        loops = Path(folder) / "loops.yaml"
        loops.write_text(DOCS.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0])
        server = Server(episodes)
        output = asyncio.run(worker(student, loops, server).generate_sequences(batch(episodes, int(seed))))
    assert server.asked == sum(episode.depth for episode in episodes)
    Path(out).write_text(json.dumps([row(output, number) for number in range(len(episodes))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
