"""The tensors of a version of the log in the form of a checkpoint's, so that any two can be compared."""

from __future__ import annotations

from tidemill.consumers.weights.builder import Builder
from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.weights.bits import Weight


def version_tensors(chain: Chain, builder: Builder, version: int) -> dict[str, Weight]:
    """The tensors of a version, in memory, by name. Raises UnknownVersion, Unreachable."""
    mirror = builder.build(chain, version).mirror
    listed = builder.with_tensors(chain.manifest(version)).tensors
    return {info.name: Weight(info.dtype, mirror.bits(info.name).reshape(info.shape)) for info in listed}
