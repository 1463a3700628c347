"""What the operands of `tidemill weights` mean: a version, a version of another branch, or a checkpoint on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

VERSION = re.compile(r"v?([0-9]{1,12})")
BRANCH_VERSION = re.compile(r"([A-Za-z0-9._-]+)@v?([0-9]{1,12})")


class OperandError(ValueError):
    """An operand names neither a version nor a checkpoint."""


@dataclass(frozen=True, slots=True)
class VersionOperand:
    """A version in the log; `branch` None is the run's own."""

    version: int
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointOperand:
    """A safetensors file, or a directory of a Hugging Face checkpoint."""

    path: Path


Operand = VersionOperand | CheckpointOperand


def version_number(text: str) -> int:
    """`40` and `v40` are 40. Raises OperandError."""
    match = VERSION.fullmatch(text)
    if match is None:
        raise OperandError(f"{text!r} is no version: write 40 or v40")
    return int(match[1])


def operand(text: str) -> Operand:
    """A path that exists is a checkpoint, `v40` or `40` a version, `BRANCH@40` one of another branch.

    Raises OperandError.
    """
    path = Path(text)
    if path.exists():
        return CheckpointOperand(path)
    if (match := VERSION.fullmatch(text)) is not None:
        return VersionOperand(int(match[1]))
    if (match := BRANCH_VERSION.fullmatch(text)) is not None:
        return VersionOperand(int(match[2]), match[1])
    raise OperandError(
        f"{text!r} is neither a version (v40, main@v40) nor a safetensors file or checkpoint directory that exists"
    )
