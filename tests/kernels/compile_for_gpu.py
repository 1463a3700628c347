"""Compile every kernel for an H100, with its launcher's arguments and without a GPU; print the kernels' names.

`JITFunction.run` is replaced: it compiles for the target and does not launch. Counts are then filled with ones, so that
the launchers continue with the kernels that depend on the counts.
"""

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tidemill.kernels import triton_quantise, triton_rows, triton_split
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.fingerprint import TensorKey
from tidemill.kernels.quantise import BLOCK_FORMATS

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}


def compile_only(self, *arguments, grid, warmup, **options):
    """Replace `kernel[grid](...)`: compile for `TARGET`."""
    given = dict(zip(self.arg_names, arguments, strict=False)) | options
    signature, constants = {}, {}
    for parameter in self.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = parameter.annotation_type
    made = triton.compile(ASTSource(self, signature, constexprs=constants), target=TARGET)
    assert made.asm["cubin"]
    print(self.fn.__name__, flush=True)
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32:
            value.fill_(1)


def launch_all(name: str) -> None:
    """Launch every kernel on tensors of an element type."""
    kind, key, places = BY_NAME[name], TensorKey.of("w"), torch.arange(100)
    bits = torch.zeros(10_000, dtype={8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[kind.width])
    at = triton_rows.take(bits, places)
    triton_rows.compare_and_compact(bits, bits)
    triton_rows.fingerprint(bits, key)
    triton_rows.fingerprint_at(at, key, places)
    triton_rows.fingerprint_change(key, places, at, at)
    table = np.minimum(np.arange(kind.exponents), 4).astype(np.uint8)
    triton_split.split_classes(kind, bits, at, at, places, table, np.ones(40, np.uint8))
    triton_split.count_exponents(kind, bits)
    for form in BLOCK_FORMATS.values():
        outer = torch.ones(1, 130, 1) if form.has_outer else None
        codes, scales = triton_quantise.quantise(torch.ones(1, 130, 140), form, outer)
        triton_quantise.dequantise(codes, scales, outer, form)


if __name__ == "__main__":
    JITFunction.run = compile_only
    launch_all("bfloat16")
