"""What stands in for a CUDA graph on a CPU: torch's operations, repeated on the memory that they were recorded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

FORBIDDEN = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::scalar_tensor", "aten::lift_fresh", "aten::where.Scalar"),
    *("aten::where.ScalarSelf", "aten::where.ScalarOther"),
}
"""Operations that wait for the device, or copy a number from the host to it: no capture allows them."""


class RecordedGraph(TorchDispatchMode):
    """Records operations while it is entered; `replay` repeats them without the Python between them.

    Like a CUDA graph it knows addresses and shapes alone: what was put elsewhere, or is decided in Python, it misses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in FORBIDDEN:
            raise RuntimeError(f"{func.name()} is not permitted when a stream is captured")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tensors(result)))
        return result

    def replay(self) -> None:
        self.replays += 1
        # a replay is one launch, not operations that another mode would see
        with _disable_current_modes():
            for func, args, kwargs, results in self.operations:
                for new, kept in zip(tensors(func(*args, **kwargs)), results, strict=True):
                    # a view, or an operation in place, has written there already
                    if new.data_ptr() != kept.data_ptr():
                        kept.copy_(new)

    def pool(self) -> None: ...


def tensors(result: Any) -> list[Tensor]:
    """The tensors that an operation returns."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def record(step: Callable[[], Tensor], stream: Any, pool: Any) -> tuple[RecordedGraph, Tensor]:
    """`graphs.capture` without a GPU."""
    step()
    with RecordedGraph() as graph:
        result = step()
    return graph, result
