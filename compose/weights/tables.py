"""The answers of `tidemill weights` for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.compose.rows import print_rows

if TYPE_CHECKING:
    from tidemill.consumers.weights.checkout import Checkout
    from tidemill.consumers.weights.listing import VersionRow
    from tidemill.consumers.weights.verify import Verification
    from tidemill.kernels.comparison import DeltaReport


def print_chain(rows: Sequence[VersionRow], head: int, as_csv: bool) -> None:
    """Print the versions of a chain."""
    print_rows(
        ("version", "parent", "step", "lr", "density", "bytes", "bytes/changed", "anchor", "skips_from", "proved_by",
         "remarks"),
        (
            (row.version, row.parent, row.step, row.learning_rate, row.density, row.delta_bytes, row.bytes_per_changed,
             row.anchor is not None, row.skips, row.proved_by, "; ".join(_remarks(row, head)))
            for row in rows
        ),
        as_csv=as_csv,
        formats={"lr": ".3g", "density": ".3%", "bytes": ",", "bytes/changed": ".3f"},
    )  # fmt: skip


def _remarks(row: VersionRow, head: int) -> list[str]:
    refused = [f"refused by {replica}: {reason}" for replica, reason in row.refused_by.items()]
    told = ["head" if row.version == head else "", row.serving_format, row.fork, "delta expired" if row.expired else ""]
    return [*filter(None, told), *row.decisions, *refused]


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
