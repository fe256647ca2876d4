"""PPO's critic: a value for every supervised token, learned beside the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turngym.core.numbers import torch_seed
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.microbatch import micro_batches
from turngym.trainers.models import autocast, clipped_norm, hidden_states, load_full, recomputing
from turngym.trainers.ranks import SINGLE, Ranks
from turngym.trainers.run_config import CriticConfig


def value_loss(value_N: Tensor, return_N: Tensor, old_value_N: Tensor, clip: float | None = 0.2) -> Tensor:
    """l_i = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 per token: [N], with gradient.

    `clip` None: (V - R)^2 / 2. Source: [ppo] eq. 9; docs/algorithms.md#value-loss.
    Differs from the paper: it has no clip.
    V, R and V_old are the critic's values, what it should have predicted, and what it predicted before the update.
    """
    plain_N = (value_N - return_N).square()
    if clip is None:
        return 0.5 * plain_N
    # the greater of both errors: a clipped value may slow learning down, never hide an error
    clipped_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain_N, (clipped_N - return_N).square())


def explained_variance(value_N: NDArray[np.float32], return_N: NDArray[np.float32]) -> float | None:
    """1 - var(R - V) / var(R): 1 if the values are the returns, 0 if a constant would do; None if all R are equal.

    A negative value is a critic that adds noise to the advantages.
    """
    spread = float(np.var(return_N, dtype=np.float64))
    return 1.0 - float(np.var(return_N - value_N, dtype=np.float64)) / spread if spread else None


class _Values(nn.Module):
    """Trunk and head of a critic as one module, so that they can be sharded as one."""

    def __init__(self, trunk: Any, head: nn.Module) -> None:
        super().__init__()
        self.trunk: nn.Module = trunk
        self.head = head

    def forward(self, ids_BL: NDArray[np.int64], predictor_n: NDArray[np.int64]) -> Tensor:
        states = hidden_states(self.trunk, ids_BL)
        # the head's weights are float32 whatever the trunk's are, and whatever autocast makes of it
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states[torch.from_numpy(predictor_n).to(states.device)].float())[:, 0]


class ValueCritic:
    """Values of the states in which tokens were chosen. Its weights and optimizer belong to a run's checkpoints.

    `policy` must not be sharded yet. Of several `ranks` each computes its share of every batch.

    Args:
        policy: the student. Kind `model` copies it as the critic's trunk, the other kind reads its hidden states.
        micro_tokens: tokens of a pass at most, padding included; a longer row has a pass of its own.
        gradient_checkpointing: whether layers are recomputed in the backward pass, for kind `model` alone.
    """

    def __init__(
        self,
        policy: Any,
        config: CriticConfig,
        *,
        micro_tokens: int = 8192,
        autocast: bool = False,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.config = config
        self._micro_tokens, self._autocast, self._recompute = micro_tokens, autocast, gradient_checkpointing
        self._ranks = ranks
        self._policy = policy
        has_trunk = config.kind == "model"
        head = _head(policy, deep=not has_trunk, seed=seed)
        self.module = _Values(copy.deepcopy(policy), head) if has_trunk else head
        """What is learned: the trunk with its head, or the head alone."""
        ranks.shard(self.module)
        self._parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # after sharding, which replaces the parameters: an optimizer made before it would hold the old ones
        self.optimizer = torch.optim.AdamW(self._parameters, lr=config.lr, weight_decay=0.0)

    @torch.no_grad()
    def values(self, batch: RolloutBatch) -> NDArray[np.float32]:
        """V before each supervised token was chosen: float32 [N], in units of reward."""
        with self._ranks.full_params(self.module):
            parts = [(tokens, value_n.cpu().numpy()) for tokens, value_n in self._forward(batch)]
        value_N = np.zeros(batch.tokens, np.float32)
        for tokens, value_n in chain.from_iterable(self._ranks.all_gather(parts)):
            value_N[tokens] = value_n
        return value_N

    def update(self, batch: RolloutBatch, return_N: NDArray[np.float32], old_value_N: NDArray[np.float32]) -> float:
        """One optimizer update on all tokens of `batch`, which count the same; returns the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        trunk = getattr(self.module, "trunk", self.module)
        with recomputing(trunk, self._recompute and trunk is not self.module):
            for tokens, value_n in self._forward(batch):
                target_n, old_n = (torch.from_numpy(column[tokens]).to(value_n) for column in (return_N, old_value_N))
                # by the tokens of the whole batch: the division into micro-batches changes nothing
                loss = value_loss(value_n, target_n, old_n, self.config.clip).sum() / batch.tokens
                # a sharded module averages gradients over the processes; the batch's is their sum
                (loss * self._ranks.size).backward()
                total += float(loss.detach())
        if bool(torch.isfinite(clipped_norm(self._parameters, self.config.max_grad_norm))):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(self._ranks.all_gather(total))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and optimizer state; a critic that is only a head leaves the policy's trunk out."""
        if isinstance(self.module, _Values):
            modules = {"trunk": self.module.trunk.state_dict(), "head": self.module.head.state_dict()}
        else:
            modules = {"trunk": {}, "head": self.module.state_dict()}
        return {**modules, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, of any number of processes."""
        weights = state["head"]
        if self.config.kind == "model":
            weights = {f"{part}.{name}": value for part in ("trunk", "head") for name, value in state[part].items()}
        load_full(self.module, weights, self.optimizer, state["optimizer"])

    def _forward(self, batch: RolloutBatch) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Micro-batches: indices in N, and the values there."""
        micros = micro_batches(batch, self._micro_tokens, self._ranks)
        if self.config.kind == "model":
            for micro in micros:
                with autocast(self.module, self._autocast):
                    value_n = self.module(micro.passed.ids_RL, micro.predictor_n)
                yield micro.tokens, value_n.float()
            return
        with self._ranks.full_params(self._policy):
            for micro in micros:
                # the value's gradient stays in the head: the policy belongs to another optimizer
                with torch.no_grad(), autocast(self._policy, self._autocast):
                    states = micro.states(self._policy)
                yield micro.tokens, self.module(states.float())[:, 0]


def _head(trunk: Any, *, deep: bool, seed: int) -> nn.Module:
    """Maps hidden states to one value, zero at first, so that early advantages are the plain returns."""
    width, device = int(trunk.config.get_text_config().hidden_size), next(trunk.parameters()).device
    # as the policy's: a critic must not shift the run's random stream
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed))
        layers = [nn.Linear(width, width), nn.Tanh()] if deep else []
        last = nn.Linear(width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last).to(device)
