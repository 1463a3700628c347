"""`tidemill weights diff`: what two versions or checkpoints differ by, and what the difference costs on the wire."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.options import given
from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption
from tidemill.compose.weights.operands import Operand, VersionOperand, operand
from tidemill.compose.weights.tables import print_formats, report_lines

if TYPE_CHECKING:
    from tidemill.kernels.delta import TensorChange
    from tidemill.kernels.weights.bits import Weight

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]


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
        report = compare(_shown(changes, progress), CodecSettings(coder=coder), against=against)
    named = {"base": base, "target": target, "learning_rate": new.learning_rate}
    if as_json:
        typer.echo(json.dumps({**named, **asdict(report)}, indent=2))
    else:
        typer.echo("\n".join(report_lines(base, target, new.learning_rate, report)), err=True)
        print_formats(report, as_csv)
    raise typer.Exit(0 if report.round_trip_equal else 1)


def _shown(changes: Iterator[TensorChange], progress: Callable[[int, str], None]) -> Iterator[TensorChange]:
    for done, change in enumerate(changes):
        progress(done, change.name)
        yield change


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of an operand, and the learning rate of the step that made them, where that is known."""

    tensors: Mapping[str, Weight]
    learning_rate: float | None


def _load(operands: Sequence[Operand], settings: Callable[[], TidemillSettings], timeout_s: float) -> list[_Weights]:
    """What the operands name; the log is opened only where one of them is a version."""
    from tidemill.kernels.weights.checkpoint import map_checkpoint

    versions = [chosen for chosen in operands if isinstance(chosen, VersionOperand)]
    made = dict(zip(versions, _build(versions, settings(), timeout_s), strict=True)) if versions else {}
    return [
        made[chosen] if isinstance(chosen, VersionOperand) else _Weights(map_checkpoint(chosen.path), None)
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
