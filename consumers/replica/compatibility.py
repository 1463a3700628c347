"""Where vLLM 0.32 is not as a replica needs it.

- Its outputs say which version sampled which token only once they are finished. A client that is cut off must know it
  too, so that unfinished outputs are made to say it.
- At start it looks for kernels in the namespaces of all imported modules and reads `vars()` of every value; llvmlite's
  library handle, which numba imports, answers any attribute with a function, `__dict__` included, and the search fails.
  llvmlite's modules, where no kernel of vLLM can be, are hidden from the search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import vllm.triton_utils.dispatcher as dispatcher
from vllm.outputs import CompletionOutput
from vllm.v1.engine.output_processor import RequestState


def hide_llvmlite_from_kernel_search() -> None:
    """Make vLLM's kernel search pass over llvmlite; once a process, before an engine is started."""
    search = dispatcher._rebind_kernels
    if not hasattr(search, "__wrapped__"):
        dispatcher._rebind_kernels = _without_llvmlite(search)


def tell_spans_before_the_end() -> None:
    """Make unfinished outputs carry the weight versions of their tokens so far; once a process."""
    made = RequestState._new_completion_output
    if not hasattr(made, "__wrapped__"):
        RequestState._new_completion_output = _with_spans(made)


def _with_spans(made: Callable[..., CompletionOutput]) -> Callable[..., CompletionOutput]:
    @wraps(made)
    def wrapped(state: RequestState, *arguments: Any) -> CompletionOutput:  # noqa: ANN401 - passed through to vLLM
        output = made(state, *arguments)
        if output.weight_versions is None:
            output.weight_versions = state._weight_version_spans()
        return output

    return wrapped


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
