"""Start the real SGLang server without a GPU: stand-ins for what only CUDA has, then SGLang's own launcher.

Run as a file or with -m, by the Python that has sglang installed; arguments are SGLang's. It imports nothing of
turngym, so that the server may live in an environment of its own. Protocol and arithmetic (torch's own kernels) are the
server's; grammars, CUDA graphs, data parallelism and speed are not to be had this way.

Two things change besides the stand-ins, so that a request's own seed counts here as it does on a GPU: the attention of
torch may be used with --enable-deterministic-inference, and CUDA's batch-invariant kernels, which that option would
load, are left out (results then depend on the batch by float32 rounding, as everywhere on a CPU).

The stand-ins are put in place when this module is imported, since SGLang's worker processes import it before all else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

STAND_INS = ("sgl_kernel", "torchvision")
"""Packages that are imported everywhere and used on GPUs only. An installed one is hidden: it may not even load."""


class _Nothing(type):
    """A class whose every attribute, call and instance is again nothing in particular."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()


class _Thing(metaclass=_Nothing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a decorator of the missing package must leave what it decorates alone
        bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if bare else _Thing()


class _StandIn(types.ModuleType):
    __version__ = "0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Thing,), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of STAND_INS, with any submodule."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            define_seed_hash()


def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """MurmurHash3 (32 bits) of [n] seeds of 64 bits, [n] positions and [m] columns: int64 [n, m] in 0..2**32 - 1.

    Source: [murmur3]; docs/algorithms.md#hashing. MurmurHash3_x86_32 over the four blocks seed low, seed high,
    position, column, as SGLang's kernel for GPUs has it, so that a seed draws the same numbers there and here.
    """
    import torch

    mask = 0xFFFFFFFF

    def rotate(value: Any, by: int) -> Any:
        return ((value << by) | (value >> (32 - by))) & mask

    def times(value: Any, factor: int) -> Any:
        # by halves: a product of two numbers of 32 bits would leave int64
        return (((value >> 16) * factor & 0xFFFF) << 16) + (value & 0xFFFF) * factor & mask

    def mix(state: Any, block: Any) -> Any:
        block = times(rotate(times(block, 0xCC9E2D51), 15), 0x1B873593)
        return (times(rotate(state ^ block, 13), 5) + 0xE6546B64) & mask

    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = mix(torch.zeros_like(seed), seed & mask)
    state = mix(mix(state, (seed >> 32) & mask), positions.to(torch.int64) & mask)
    state = mix(state[:, None], columns.to(torch.int64)[None, :] & mask) ^ 16
    state = times(state ^ (state >> 16), 0x85EBCA6B)
    state = times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


LIBRARIES: list[Any] = []
"""What torch drops when no reference is left."""


def define_seed_hash() -> None:
    """Give torch the one operation of `sgl_kernel` that sampling with a seed needs on a CPU."""
    import torch

    if not LIBRARIES:
        library = torch.library.Library("sgl_kernel", "FRAGMENT")
        library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
        library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
        LIBRARIES.append(library)


def _seeds_with_torch_attention(module: Any) -> None:
    module.add_deterministic_attention_backend_choices(["torch_native"])
    module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _no_cuda_kernels(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


ADJUST: dict[str, Callable[[Any], None]] = {
    "sglang.srt.arg_groups.choices": _seeds_with_torch_attention,
    "sglang.srt.batch_invariant_ops": _no_cuda_kernels,
}
"""What happens to a module of the server right after its import."""


class _Adjuster(importlib.abc.MetaPathFinder):
    """Lets the usual finders find the modules of ADJUST and changes them once they are loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        adjust = ADJUST.get(name)
        if adjust is None:
            return None
        # not importlib.util.find_spec, which would come back to this finder
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            adjust(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def prepare() -> None:
    """Put stand-ins and adjustments in place, once per process, before anything of SGLang is imported."""
    if not any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        sys.meta_path[:0] = [_StandInFinder(), _Adjuster()]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # no compiler is needed, and none is waited for at the first request with a seed
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


# __mp_main__ is what multiprocessing calls this file in a spawned worker
if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    # SGLang's workers find this file again as their main module: its name must stay what it is. Children are started
    # without the folder of the file that they run on their path
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from guarded_server import launch_sglang

    launch_sglang(sys.argv[1:])
