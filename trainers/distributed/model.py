"""FSDP2 models: shard them, gather their full parameters for a while, and read their full state dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from turngym.trainers.models.model import final_states


def shard(model: Any, mesh: Any) -> None:
    """Divide the parameters among the processes of `mesh`, in place: a group per transformer block, one for the rest.

    The rest (embeddings, last norm, head; in one group, because heads are often tied to embeddings) stays gathered
    between the hidden states and the head's gradient, so that the head may be called on its own, chunk by chunk.
    """
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    # blocks before the whole: a group takes in the parameters that no group inside of it has
    fully_shard(model, mesh=mesh)
    if hasattr(model, "get_output_embeddings"):
        model.final_states = partial(final_states, model)
        register_fsdp_forward_method(model, "final_states")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: what transformers says may not be split, or else the entries of the longest module list."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if found := [part for part in model.modules() if type(part).__name__ in names]:
        return found
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Inside, every process holds all parameters and may run the model as often as it likes, without gradient.

    Nothing is communicated inside. `named_parameters` and `state_dict` (FSDP's own would shard again) give all weights.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        # else the first forward pass frees them, and processes gather out of step: they run different numbers of passes
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    model.state_dict = lambda: plain_weights(model)  # type: ignore[method-assign, assignment, misc]
    try:
        yield
    finally:
        del model.state_dict
        for number, part in enumerate(parts):
            part.reshard()
            # as FSDP2 has it by default: the root, which comes first, stays gathered until the backward pass
            part.set_reshard_after_forward(number > 0, recurse=False)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `state_dict` gives for an unsharded model: every name of a tied weight, no non-persistent buffers."""
    weights = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    for place, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                weights[f"{place}.{name}".lstrip(".")] = value
    return weights


def full_state(model: nn.Module) -> dict[str, Any]:
    """The full state dict on the CPU, tied weights as one tensor; on other ranks than 0, which must call too, empty."""
    # late: slow to import, and only sharded models need it
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # save_pretrained finds tied weights by their memory, and gathering has copied every name apart
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if name in state:
            state[name] = state[owner]
    return dict(state)
