"""One way to compile a loop: machine code without the interpreter lock, cached beside the module that holds it.

Loops compiled here run in plain threads side by side, and a second process of the same machine starts without
compiling. Integer arithmetic only: the results do not depend on the processor or on the order of vector lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """The loop as machine code: `nogil`, cached on disk, with numpy's wrap-around integer semantics."""
    return cast(Loop, numba.njit(cache=True, nogil=True)(loop))
