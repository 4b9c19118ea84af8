# SPDX-License-Identifier: Apache-2.0
"""What Megatron Core needs to run on a machine without CUDA: it asks for CUDA by name in many places.

For tests and for trying things out; a job on GPUs never comes here. Nothing of this touches arithmetic or detcomm:
places that say "cuda" get the CPU, and streams, which order work on a GPU, become nothing, since a CPU does its work in
program order.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


def apply() -> None:
    """Patch torch and Megatron Core in this process, once; nothing is patched where there is CUDA."""
    if torch.cuda.is_available() or getattr(apply, "done", False):
        return
    apply.done = True  # type: ignore[attr-defined]
    _current_device()
    _factories()
    _tensor_cuda()
    _streams()
    _tensor_type()
    _random_state()
    _router_without_transformer_engine()
    _token_counts()
    _pinned_memory()


def _current_device() -> None:
    """1. ``device=torch.cuda.current_device()`` is the commonest way to say where a buffer lies."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None


def _factories() -> None:
    """2. ``torch.zeros(…, device="cuda")``."""
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))


def _redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _tensor_cuda() -> None:
    """3. ``tensor.cuda()`` and ``module.cuda()``: they are where they should be."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


def _streams() -> None:
    """4. Streams and events."""
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: _Stream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *args: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


class _Stream:
    """A stream or an event on a device that does its work in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = record = synchronize = wait = _nothing

    def record_event(self, event: Any = None) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def _tensor_type() -> None:
    """5. The optimizers sort parameters by the text of their type: ``"torch.cuda.FloatTensor"``."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def on_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return str(original(self)).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = on_cuda  # type: ignore[method-assign,assignment]


def _random_state() -> None:
    """6. The states of the GPU's random generator, which Megatron keeps per kind of parallelism."""
    from megatron.core.tensor_parallel import random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(seed: int) -> None:
        torch.manual_seed(seed)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = seed


def _router_without_transformer_engine() -> None:
    """7. megatron-core 0.16 reads a name in the router that it defines only where TransformerEngine is installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _token_counts() -> None:
    """8. The all-to-all dispatcher turns the counts of its splits into NumPy only when they come from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def as_on_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_on_gpu


def _pinned_memory() -> None:
    """9. Checkpoints are staged in pinned memory, which only CUDA has."""
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
