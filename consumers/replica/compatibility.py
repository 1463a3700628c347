"""One conflict between vLLM 0.32 and numba, kept away from both.

At start vLLM looks for kernels in the namespaces of all imported modules and reads `vars()` of every value; llvmlite's
library handle, which numba imports, answers any attribute with a function, `__dict__` included, and the search fails.
The search is hidden from llvmlite's modules, where no kernel of vLLM can be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import vllm.triton_utils.dispatcher as dispatcher


def hide_llvmlite_from_kernel_search() -> None:
    """Make vLLM's kernel search pass over llvmlite; once a process, before an engine is started."""
    search = dispatcher._rebind_kernels
    if not hasattr(search, "__wrapped__"):
        dispatcher._rebind_kernels = _without_llvmlite(search)


def _without_llvmlite(search: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(search)
    def wrapped(*arguments: Any) -> Any:  # noqa: ANN401 - passed through to vLLM
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "llvmlite"}
        for name in hidden:
            del sys.modules[name]
        try:
            return search(*arguments)
        finally:
            sys.modules.update(hidden)

    return wrapped
