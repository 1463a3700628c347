"""`tidemill weights diff`: what two versions or checkpoints differ by, and what the difference costs on the wire."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, given, with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption, print_rows

if TYPE_CHECKING:
    from tidemill.kernels.comparison import DeltaReport
    from tidemill.kernels.delta import TensorChange
    from tidemill.kernels.weights.bits import Weight


def diff(
    settings_of: SettingsOf,
    base: Annotated[str, typer.Argument(help="v40, BRANCH@40, a .safetensors file, or a checkpoint directory.")],
    target: Annotated[str, typer.Argument(help="The target, in the same form as BASE.")],
    against: Annotated[
        bool, typer.Option("--against", help="Measure other formats in the same run: XOR, raw, gaps with zstandard.")
    ] = False,
    coder: Annotated[
        Literal["auto", "rans", "pcodec", "zstd"], typer.Option(help="Entropy coder of sparse blocks.")
    ] = "auto",
    branch: Annotated[str | None, typer.Option("--branch", help="Branch of versions that name none.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds that a chunk may take to come from the log.")
    ] = 30.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure the delta between two versions of the log or two checkpoints on disk.

    Prints elements, changed elements and their density, bytes on the wire and for each changed element, beside two
    bounds: of positions that are independent of the weights (iid), and of positions that depend on the old weight's
    exponent as a step of the optimizer makes them. Then encode and apply speed of one core, and whether the delta made
    TARGET of BASE bit for bit; status 1 when it did not. Checkpoints are mapped, not loaded, and need no log.

    Examples: `tidemill weights diff v39 v40` · `tidemill weights diff models/a models/b --against --json`
    """
    from tidemill.kernels.comparison import compare
    from tidemill.kernels.delta import CodecSettings
    from tidemill.kernels.weights.checkpoint import tensor_changes

    operands = operand(base), operand(target)
    settings = functools.cache(lambda: with_reachable_log(settings_of(given(run__branch=branch))))
    old, new = _load(operands, settings, timeout_s)
    changes = tensor_changes(old.tensors, new.tensors)
    with working("comparing", len(new.tensors)) as progress:

        def shown() -> Iterator[TensorChange]:
            for done, change in enumerate(changes):
                progress(done, change.name)
                yield change

        report = compare(shown(), CodecSettings(coder=coder), against=against)
    named = {"base": base, "target": target, "learning_rate": new.learning_rate}
    if as_json:
        typer.echo(json.dumps({**named, **asdict(report)}, indent=2))
    else:
        typer.echo("\n".join(report_lines(base, target, new.learning_rate, report)), err=True)
        print_formats(report, as_csv)
    raise typer.Exit(0 if report.round_trip_equal else 1)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of an operand, and the learning rate of the step that made them, where that is known."""

    tensors: Mapping[str, Weight]
    learning_rate: float | None


def _load(
    operands: Sequence[VersionOperand | Path], settings: Callable[[], TidemillSettings], timeout_s: float
) -> list[_Weights]:
    """What the operands name; the log is opened only where one of them is a version."""
    from tidemill.kernels.weights.checkpoint import map_checkpoint

    versions = [chosen for chosen in operands if isinstance(chosen, VersionOperand)]
    made = dict(zip(versions, _build(versions, settings(), timeout_s), strict=True)) if versions else {}
    return [
        made[chosen] if isinstance(chosen, VersionOperand) else _Weights(map_checkpoint(chosen), None)
        for chosen in operands
    ]


def _build(versions: Sequence[VersionOperand], settings: TidemillSettings, timeout_s: float) -> list[_Weights]:
    from tidemill.consumers.weights.builder import open_builder, version_tensors
    from tidemill.consumers.weights.chain import read_chain

    branches = {chosen.branch or settings.run.branch for chosen in versions}
    chains = {
        branch: read_chain(settings.kafka, settings.run.model_copy(update={"branch": branch})) for branch in branches
    }
    found = []
    with working("building") as progress, open_builder(settings.kafka, timeout_s, progress.say) as builder:
        for chosen in versions:
            chain = chains[chosen.branch or settings.run.branch]
            rate = chain.manifest(chosen.version).learning_rate
            found.append(_Weights(version_tensors(chain, builder, chosen.version), rate))
    return found


VERSION = re.compile(r"v?([0-9]{1,12})")
BRANCH_VERSION = re.compile(r"([A-Za-z0-9._-]+)@v?([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class VersionOperand:
    """A version in the log; `branch` None is the run's own."""

    version: int
    branch: str | None = None


def version_number(text: str) -> int:
    """`40` and `v40` are 40. Raises ValueError."""
    match = VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no version: write 40 or v40")
    return int(match[1])


def operand(text: str) -> VersionOperand | Path:
    """A path that exists is a checkpoint, `v40` or `40` a version, `BRANCH@40` one of another branch.

    Raises ValueError.
    """
    path = Path(text)
    if path.exists():
        return path
    if (match := VERSION.fullmatch(text)) is not None:
        return VersionOperand(int(match[1]))
    if (match := BRANCH_VERSION.fullmatch(text)) is not None:
        return VersionOperand(int(match[2]), match[1])
    raise ValueError(
        f"{text!r} is neither a version (v40, main@v40) nor a safetensors file or checkpoint directory that exists"
    )


def report_lines(base: str, target: str, learning_rate: float | None, report: DeltaReport) -> list[str]:
    """What a comparison measured, but for what `print_formats` prints."""
    total = report.total
    rate = "" if learning_rate is None else f" at lr {learning_rate:.3g}"
    dtypes = ", ".join(f"{size.elements:,} {dtype}" for dtype, size in report.by_dtype.items())
    return [
        f"{base} to {target}: {report.tensors} tensors, {total.elements:,} elements ({dtypes})",
        f"changed    {total.changed:,} elements, density {100 * total.density:.4g} %{rate}",
        f"bounds     iid {total.iid_bound_bytes:,.0f} bytes (wire is {_number(total.ratio_to_iid_bound)} of it), "
        f"exponent classes {total.exponent_class_bound_bytes:,.0f} ({_number(total.ratio_to_exponent_class_bound)})",
        f"round trip {'bit-equal' if report.round_trip_equal else 'NOT bit-equal'}",
    ]


def print_formats(report: DeltaReport, as_csv: bool) -> None:
    """Print what our format takes, and the others beside it where they were measured."""
    total = report.total
    ours = ("tidemill", total.wire_bytes, total.bytes_per_changed, None if total.changed == 0 else 1.0,
            report.encode_gb_per_second, report.apply_gb_per_second, report.round_trip_equal)  # fmt: skip
    others = (
        (other.name, other.wire_bytes, other.bytes_per_changed, other.times_ours, other.encode_gb_per_second,
         other.decode_gb_per_second, other.round_trip_equal)
        for other in report.against
    )  # fmt: skip
    print_rows(
        ("format", "bytes", "bytes/changed", "times_ours", "encode_gb/s", "decode_gb/s", "bit_equal"),
        (ours, *others),
        as_csv=as_csv,
        formats={
            "bytes": ",", "bytes/changed": ".4g", "times_ours": ".4g", "encode_gb/s": ".2f", "decode_gb/s": ".2f"
        },
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
