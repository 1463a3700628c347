"""`tidemill weights`: the weight chain on the command line, and the difference of two versions or checkpoints."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidemill.compose.cli.gate_command import deciding
from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import (
    VERSION,
    BranchOption,
    SettingsOf,
    given,
    version_number,
    with_reachable_log,
    with_settings,
)
from tidemill.compose.output import CsvOption, JsonOption, print_document, print_json, print_rows, working
from tidemill.consumers.weights.chain import default_start, describe, read_chain, rows
from tidemill.schemas.records import GateVerdict

if TYPE_CHECKING:
    from tidemill.kernels.elements import TensorChange
    from tidemill.kernels.weights.bits import Weight


TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that a chunk may take to come from the log.")
]

weights_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""The weight log: every version of a branch, its deltas and anchors, and which version is served.

Examples, all for the run and branch of the configuration:

    tidemill weights log --last 20           # the versions, and the replicas that proved them
    tidemill weights verify                  # check every delta and every tensor
    tidemill weights checkout 40 models/v40  # a version as a Hugging Face checkpoint
    tidemill weights diff v39 v40            # what a step changed, and the bytes to send it
    tidemill weights pin 40                  # go no further than version 40
    tidemill weights rollback 37 --wait 60   # back to 37; wait until every replica follows
    tidemill weights release                 # follow the newest version again

These commands need no running trainer or replica.""",
)


deciding(
    weights_app,
    "pin",
    GateVerdict.HOLD,
    """Let replicas go no further than a version, while the trainer continues. It is the same decision as `gate hold`.

    A replica that is behind goes up to it; a replica that is beyond it stays there (use `rollback` to take it back).

    Example: `tidemill weights pin 40 --reason "evaluation of 40 runs"`
    """,
)
deciding(
    weights_app,
    "rollback",
    GateVerdict.ROLL_BACK,
    """Take replicas back to an older version, and keep them there until a release.

    Example: `tidemill weights rollback 37 --reason "38 repeats itself" --wait 60`
    """,
)
deciding(
    weights_app,
    "release",
    GateVerdict.RELEASE,
    """End a pin or a roll-back: replicas follow the newest version again.

    Example: `tidemill weights release --wait 60`
    """,
)


@weights_app.command("log")
@with_settings
def log_command(
    settings_of: SettingsOf,
    branch: BranchOption = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Number of newest versions to show; 0 for all.")] = 30,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """List the versions of a branch, oldest first.

    One line for each version: parent, optimizer step, learning rate, density (changed elements of all), bytes of the
    delta, bytes for each changed element, whether it has an anchor, the older versions from which skip-deltas lead to
    it, the replicas that proved it from their live tensors, and the gate's decisions on it.

    Example: `tidemill weights log --branch main --last 10`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    chain = read_chain(settings.kafka, settings.run)
    found, limit = rows(chain, last), chain.gate.limit
    if as_json:
        document = {"run_id": chain.run_id, "branch": chain.branch, "head": chain.head.version}
        print_json({**document, "limit": limit, "versions": found})
        return
    print_chain(found, chain.head.version, as_csv)
    typer.echo("serving: the newest version" if limit is None else f"serving: {describe(limit)}", err=True)


@weights_app.command()
@with_settings
def verify(
    settings_of: SettingsOf,
    start: Annotated[
        int | None,
        typer.Option("--from", help="Version to begin at; it needs an anchor. Default: the oldest usable one."),
    ] = None,
    branch: BranchOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Verify a chain offline: fetch, decode, guard and apply every delta, and compare every tensor with its manifest.

    Begins at an anchor and builds each version in memory, without an engine. Also verifies the anchors on the way and
    skip-deltas. Stops at the first fault, names it and exits with status 1; if retention has removed a chunk, it says
    so.

    Example: `tidemill weights verify --from 32`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.consumers.weights.builder import open_builder, verify_chain

    chain = read_chain(settings.kafka, settings.run)
    first = default_start(chain) if start is None else start
    total = sum(version >= first for version in chain.manifests)
    with working("verifying", total) as progress, open_builder(settings.kafka, timeout_s) as builder:
        report = verify_chain(chain, builder, first, progress)
    lines = [
        f"versions {report.start} to {report.end}: {report.versions} verified, with {report.anchors} anchors and "
        f"{report.skip_deltas} skip-deltas, {report.n_bytes:,} bytes of deltas"
    ]
    if report.expired_before:
        lines.append(
            f"the deltas of {len(report.expired_before)} older versions ({report.expired_before[0]} to "
            f"{report.expired_before[-1]}) are expired: the log's retention has removed them"
        )
    if report.expired_skips:
        lines.append(f"{report.expired_skips} skip-deltas are expired and were passed over")
    lines.append("the chain is sound" if report.offender is None else f"not sound: {report.offender}")
    print_document({"sound": report.offender is None, **asdict(report)}, lines, as_json)
    raise typer.Exit(0 if report.offender is None else 1)


@weights_app.command()
@with_settings
def checkout(
    settings_of: SettingsOf,
    version: Annotated[str, typer.Argument(help="Version to write, for instance 40 or v40.")],
    directory: Annotated[Path, typer.Argument(help="Directory to make; it must not exist or be empty.")],
    branch: BranchOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Write a version as a Hugging Face checkpoint: weights, configuration and tokenizer.

    The version is built from the nearest anchor over deltas or skip-deltas, written to a temporary directory, read
    back and proved by the fingerprints of its manifest, and only then renamed.

    Example: `tidemill weights checkout v40 models/v40`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.consumers.weights.builder import checkout as write_checkout
    from tidemill.consumers.weights.builder import open_builder

    number = version_number(version)
    chain = read_chain(settings.kafka, settings.run)
    with working("building") as progress, open_builder(settings.kafka, timeout_s, progress.say) as builder:
        made = write_checkout(chain, builder, number, directory)
    lines = [
        "version {version} in {directory}: {n_bytes:,} bytes, built from {way}".format(**made),
        f"fingerprint {made['fingerprint']}, read back from the files",
    ]
    print_document(made, lines, as_json)


def print_chain(rows: Sequence[dict[str, Any]], head: int, as_csv: bool) -> None:
    rows_shown = []
    for row in rows:
        inputs = row["serving_activations"]
        notes = ["head" if row["version"] == head else "", row["serving_format"], inputs and f"activations {inputs}"]
        notes.append(row["fork"])
        notes += ["delta expired" if row["expired"] else "", *row["decisions"]]
        notes += (f"refused by {replica}: {reason}" for replica, reason in row["refused_by"].items())
        fields = "version parent step learning_rate density delta_bytes bytes_per_changed"
        shown = [row[name] for name in fields.split()]
        rows_shown.append(
            [*shown, row["anchor"] is not None, row["skips"], row["proved_by"], "; ".join(filter(None, notes))]
        )
    print_rows(
        ("version", "parent", "step", "lr", "density", "bytes", "bytes/changed", "anchor", "skips_from", "proved_by",
         "remarks"),
        rows_shown,
        as_csv=as_csv,
        formats={"lr": ".3g", "density": ".3%", "bytes": ",", "bytes/changed": ".3f"},
    )  # fmt: skip


@weights_app.command()
@with_settings
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
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure the delta between two versions of the log or two checkpoints on disk.

    Prints elements, changed elements and their density, and bytes on the wire in total and for each changed element,
    next to two bounds: for positions that are independent of the weights (iid), and for positions that depend on the
    old weight's exponent as in an optimizer step. Then the encode and apply speed of one core, and whether the delta
    made TARGET from BASE bit for bit; status 1 if not. Checkpoints are mapped, not loaded, and need no log.

    Examples: `tidemill weights diff v39 v40` · `tidemill weights diff models/a models/b --against --json`
    """
    from tidemill.kernels.block import CodecSettings
    from tidemill.kernels.comparison import compare
    from tidemill.kernels.weights.checkpoint import tensor_changes

    operands = operand(base), operand(target)
    settings = functools.cache(lambda: with_reachable_log(settings_of(given(run__branch=branch))))
    (old, _), (new, learning_rate) = _load(operands, settings, timeout_s)
    changes = tensor_changes(old, new)
    with working("comparing", len(new)) as progress:

        def shown() -> Iterator[TensorChange]:
            for done, change in enumerate(changes):
                progress(done, change.name)
                yield change

        report = compare(shown(), CodecSettings(coder=coder), against=against)
    total = report.total
    ours = ("tidemill", total.wire_bytes, total.bytes_per_changed, None if total.changed == 0 else 1.0,
            report.encode_gb_per_second, report.apply_gb_per_second, report.round_trip_equal)  # fmt: skip
    others = (
        (other.name, other.wire_bytes, other.bytes_per_changed, other.times_ours, other.encode_gb_per_second,
         other.decode_gb_per_second, other.round_trip_equal)
        for other in report.against
    )  # fmt: skip
    if not as_json:
        rate = "" if learning_rate is None else f" at lr {learning_rate:.3g}"
        dtypes = ", ".join(f"{size.elements:,} {dtype}" for dtype, size in report.by_dtype.items())
        iid, classes = _number(total.ratio_to_iid_bound), _number(total.ratio_to_exponent_class_bound)
        lines = (
            f"{base} to {target}: {report.tensors} tensors, {total.elements:,} elements ({dtypes})",
            f"changed    {total.changed:,} elements, density {100 * total.density:.4g} %{rate}",
            f"bounds     iid {total.iid_bound_bytes:,.0f} bytes (wire is {iid} of it), "
            f"exponent classes {total.exponent_class_bound_bytes:,.0f} ({classes})",
            f"round trip {'bit-equal' if report.round_trip_equal else 'NOT bit-equal'}",
        )
        typer.echo("\n".join(lines), err=True)
    print_rows(
        ("format", "bytes", "bytes/changed", "times_ours", "encode_gb/s", "decode_gb/s", "bit_equal"),
        (ours, *others),
        as_json=as_json,
        as_csv=as_csv,
        formats={
            "bytes": ",", "bytes/changed": ".4g", "times_ours": ".4g", "encode_gb/s": ".2f", "decode_gb/s": ".2f"
        },
        document={"base": base, "target": target, "learning_rate": learning_rate, **asdict(report)},
    )  # fmt: skip
    raise typer.Exit(0 if report.round_trip_equal else 1)


Loaded = tuple[Mapping[str, "Weight"], float | None]
"""The tensors of an operand by name, and the learning rate of the step that made them, if known."""


def _load(
    operands: Sequence[VersionOperand | Path], settings: Callable[[], TidemillSettings], timeout_s: float
) -> list[Loaded]:
    """Load the operands; the log is opened only if one of them is a version."""
    from tidemill.consumers.weights.builder import open_builder
    from tidemill.kernels.weights.checkpoint import map_checkpoint

    found: dict[VersionOperand | Path, Loaded] = {
        path: (map_checkpoint(path), None) for path in operands if isinstance(path, Path)
    }
    versions = [chosen for chosen in operands if not isinstance(chosen, Path)]
    if versions:
        kafka, run = settings().kafka, settings().run
        branches = {branch or run.branch for _, branch in versions}
        chains = {branch: read_chain(kafka, run.model_copy(update={"branch": branch})) for branch in branches}
        with working("building") as progress, open_builder(kafka, timeout_s, progress.say) as builder:
            for version, branch in versions:
                chain = chains[branch or run.branch]
                rate = chain.manifest(version).learning_rate
                mirror, _, _ = builder.build(chain, version)
                found[version, branch] = (mirror.weights, rate)
    return [found[chosen] for chosen in operands]


BRANCH_VERSION = re.compile(r"([A-Za-z0-9._-]+)@v?([0-9]{1,12})")


VersionOperand = tuple[int, str | None]
"""A version in the log, and its branch; None is the branch of the run."""


def operand(text: str) -> VersionOperand | Path:
    """Parse an operand: an existing path is a checkpoint, `v40` or `40` a version, `BRANCH@40` one of another branch.

    Raises ValueError.
    """
    path = Path(text)
    if path.exists():
        return path
    if (match := VERSION.fullmatch(text)) is not None:
        return int(match[1]), None
    if (match := BRANCH_VERSION.fullmatch(text)) is not None:
        return int(match[2]), match[1]
    raise ValueError(
        f"{text!r} is neither a version (v40, main@v40) nor a safetensors file or checkpoint directory that exists"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
