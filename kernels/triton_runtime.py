"""One way to declare a Triton kernel, and what the kernels' launchers share.

Kernels are compiled for the GPU that holds their tensors, or run by Triton's interpreter on the CPU, where the
environment said TRITON_INTERPRET=1 before triton was first imported. Every kernel keeps true:

- integers only, no atomics, disjoint stores: the bytes do not depend on the schedule, the tile size or the GPU;
- offsets of whole tiles are 64-bit, offsets within a tile 32-bit: tensors of more than 2**31 elements are in bounds;
- whole tiles are read without a mask, so that loads are vectorised for any length; only the last one has a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import triton  # type: ignore[import-untyped]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors, instead of being compiled for a GPU."""


class Kernel(Protocol):
    """A Triton kernel: `kernel[grid](...)` runs one program for each point of the grid."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel bound to a grid."""
        ...

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 - a device function takes and gives Triton values
        """Within another kernel only: a device function."""
        ...


def kernel(function: Callable[..., Any]) -> Kernel:
    """`triton.jit`, typed. Scalars named `start` or `key_*` differ on each call and are not compiled in."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    varying = [name for name in names if name == "start" or name.startswith("key_")]
    return cast(Kernel, triton.jit(function, do_not_specialize=varying))


def tiles(n: int, tile: int) -> int:
    """Number of tiles that cover `n` elements."""
    return -(-n // tile)
