"""The answers of `tidemill weights` for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tidemill.consumers.weights.checkout import Checkout
    from tidemill.consumers.weights.listing import VersionRow
    from tidemill.consumers.weights.verify import Verification
    from tidemill.kernels.comparison import DeltaReport


def chain_table(rows: Sequence[VersionRow], head: int) -> Table:
    """The versions of a chain."""
    table = Table()
    for title in ("version", "parent", "step", "lr", "density", "bytes", "bytes/changed"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("anchor", "skips from", "proved by", "remarks"):
        table.add_column(title)
    for row in rows:
        table.add_row(
            f"{row.version}{' (head)' if row.version == head else ''}",
            "-" if row.parent is None else str(row.parent),
            str(row.step),
            f"{row.learning_rate:.3g}",
            f"{100 * row.density:.3g} %",
            f"{row.delta_bytes:,}",
            "-" if row.bytes_per_changed is None else f"{row.bytes_per_changed:.3f}",
            "yes" if row.anchor else "",
            ", ".join(map(str, row.skips)),
            ", ".join(row.proved_by),
            "; ".join(_remarks(row)),
        )
    return table


def _remarks(row: VersionRow) -> list[str]:
    refused = [f"refused by {replica}: {reason}" for replica, reason in row.refused_by.items()]
    expired = ["delta expired"] if row.expired else []
    return [*([row.fork] if row.fork else []), *expired, *row.decisions, *refused]


def verification_lines(report: Verification) -> list[str]:
    """What was verified, and the first thing that is wrong."""
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
    return lines


def checkout_lines(made: Checkout) -> list[str]:
    """What was written."""
    return [
        f"version {made.version} in {made.directory}: {made.n_bytes:,} bytes, built from {made.way}",
        f"fingerprint {made.fingerprint}, read back from the files",
    ]


def report_lines(base: str, target: str, learning_rate: float | None, report: DeltaReport) -> list[str]:
    """What a comparison measured."""
    total = report.total
    rate = "" if learning_rate is None else f" at lr {learning_rate:.3g}"
    dtypes = ", ".join(f"{size.elements:,} {dtype}" for dtype, size in report.by_dtype.items())
    return [
        f"{base} to {target}: {report.tensors} tensors, {total.elements:,} elements ({dtypes})",
        f"changed    {total.changed:,} elements, density {100 * total.density:.4g} %{rate}",
        f"wire       {total.wire_bytes:,} bytes, {_number(total.bytes_per_changed)} for each changed element",
        f"bounds     iid {total.iid_bound_bytes:,.0f} bytes (wire is {_number(total.ratio_to_iid_bound)} of it), "
        f"exponent classes {total.exponent_class_bound_bytes:,.0f} ({_number(total.ratio_to_exponent_class_bound)})",
        f"speed      encode {report.encode_gb_per_second:.2f}, apply {report.apply_gb_per_second:.2f} GB/s of one core",
        f"round trip {'bit-equal' if report.round_trip_equal else 'NOT bit-equal'}",
    ]


def against_table(report: DeltaReport) -> Table:
    """The other formats beside ours."""
    table = Table()
    table.add_column("format")
    for title in ("bytes", "bytes/changed", "times ours", "encode GB/s", "decode GB/s", "bit-equal"):
        table.add_column(title, justify="right")
    for other in report.against:
        table.add_row(
            other.name, f"{other.wire_bytes:,}", _number(other.bytes_per_changed), _number(other.times_ours),
            f"{other.encode_gb_per_second:.2f}", f"{other.decode_gb_per_second:.2f}",
            "yes" if other.round_trip_equal else "NO",
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
