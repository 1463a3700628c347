"""Figures of the delta codec, JSON lines: `bench_delta.py sizes | speed`.
And of a trainer that publishes its deltas: `bench_delta.py beside [--model DIR]`.

Sizes are wire bytes for each changed element, with all headers and digests, next to the bounds of `kernels.bounds`, the
formats of `kernels.comparison` in the same run and the learning rate that gave the density. Speeds are GB of dense
weights per second of processor time of one core, next to numpy's memcpy of the same bytes in the same process. Weights
come from `synthetic`; `bench_precision.py` and `make test-gpu` have the bytes of real steps.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from bench_prefix import groups_of, model_of, sizes
from measuring import cpu_seconds, log_at, peak_bytes, say
from synthetic import synthetic_change

from tests.kernels.encoding import encode_delta
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.comparison import DeltaReport, compare
from tidemill.kernels.delta import apply_change, decode_delta, resolve_all
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.fingerprint import TensorKey, fingerprint
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.trained_weights import TrainedWeights, make_learner

LEARNING_RATES = {
    "bfloat16": (3e-7, 1e-6, 3e-6, 6e-6),
    "float16": (3e-8, 1e-7, 3e-7, 7e-7),
    "float8_e4m3fn": (5e-6, 1.6e-5, 5e-5, 1e-4),
}
"""Learning rates of synthetic steps; they change 0.3 to 6 % of the elements of each type."""
MEGA = 1e6
GIGA = 1e9


def report_size(result: DeltaReport, **told: object) -> None:
    """Print one line for each element type of a comparison."""
    speeds = {"encode_gb_s": result.encode_gb_per_second, "apply_gb_s": result.apply_gb_per_second}
    for dtype, size in result.by_dtype.items():
        per_changed = max(1, size.changed)
        say(
            "size",
            dtype=dtype,
            **told,
            density=size.density,
            elements=size.elements,
            changed=size.changed,
            bytes_per_changed=size.bytes_per_changed,
            exponent_bound=size.exponent_class_bound_bytes / per_changed,
            exponent_bound_by_tensor=size.exponent_class_bound_by_tensor_bytes / per_changed,
            iid_bound=size.iid_bound_bytes / per_changed,
            ratio=size.ratio_to_exponent_class_bound,
            round_trip_equal=result.round_trip_equal,
            **speeds,
        )


def report_against(result: DeltaReport, **told: object) -> None:
    """Print one line for each other format, for all element types together."""
    total = result.total
    for other in map(asdict, result.against):
        say(
            "against",
            format=other["name"],
            **told,
            density=total.density,
            bytes_per_changed=other["wire_bytes"] / max(1, total.changed),
            times_ours=other["wire_bytes"] / total.wire_bytes,
            encode_gb_s=other["encode_gb_per_second"],
            decode_gb_s=other["decode_gb_per_second"],
            round_trip_equal=other["round_trip_equal"],
        )


def measure_sizes(chosen: argparse.Namespace) -> None:
    """Compare synthetic steps of one matrix with the bounds and, with `--against`, with the other formats."""
    for dtype in chosen.dtypes:
        for learning_rate in LEARNING_RATES[dtype]:
            told = {"data": "synthetic", "lr": learning_rate}
            change = synthetic_change(dtype, learning_rate, chosen.rows, chosen.columns, chosen.seed)
            result = compare([change], CodecSettings(coder=chosen.coder), against=chosen.against)
            report_size(result, **told)
            report_against(result, dtype=dtype, **told)


def measure_speed(chosen: argparse.Namespace) -> None:
    """Time encode, decode, guard and apply of one synthetic matrix, and memcpy and the fingerprint alone."""
    for dtype in chosen.dtypes:
        for learning_rate in LEARNING_RATES[dtype]:
            change = synthetic_change(dtype, learning_rate, chosen.rows, chosen.columns, chosen.seed)
            _speed_of(change, learning_rate, chosen.runs)


def _speed_of(change: TensorChange, learning_rate: float, runs: int) -> None:
    old, held = change.old_bits, change.old_bits.copy()
    chunks = list(encode_delta(1, 0, [change]))

    def apply_all() -> None:
        for block in decode_delta(chunks, 1, 0):
            if not (resolved := resolve_all(block, {change.name: held})):
                raise AssertionError("the block is in already")
            apply_change(resolved[0], held)

    def revert_and_apply() -> None:
        np.copyto(held, old)
        apply_all()

    def speed(work: Callable[[], object]) -> float:
        return old.nbytes / cpu_seconds(work, runs) / GIGA

    copied, applied = speed(lambda: np.copyto(held, old)), speed(revert_and_apply)
    if not np.array_equal(held, change.new_bits):
        raise AssertionError("the round trip is not bit-equal")
    say(
        "speed",
        dtype=change.dtype,
        lr=learning_rate,
        density=float(np.mean(old != change.new_bits)),
        encode_gb_s=speed(lambda: list(encode_delta(1, 0, [change]))),
        apply_gb_s=1 / (1 / applied - 1 / copied),
        fingerprint_gb_s=speed(lambda: fingerprint(old, TensorKey.of(change.name))),
        memcpy_gb_s=copied,
    )


def _reset_peak() -> int:
    """Release the freed memory that the allocator holds, reset the peak to the resident bytes, and return it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return peak_bytes()


def measure_beside(chosen: argparse.Namespace) -> None:
    """Measure time and memory of a trainer's round that publishes the parent first, during the step, or not.

    The kinds alternate in one run of `--model`, or of random weights in the shape of SmolLM2, with a broker of its own.
    `waited_s` is the part of `publish_s` that the loop waited. `cost_s` is how much longer a round took than one
    without a publication; it is less reliable on a busy machine. All figures are medians.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bootstrap = stack.enter_context(log_at(None, Path(directory, "stack")))
        kafka, run, store = KafkaSettings(bootstrap=bootstrap), RunSettings(), StoreSettings(root=directory)
        create_topics(kafka)
        model = chosen.model or Path(directory, "model")
        if chosen.model is None:
            model_of(None).bfloat16().save_pretrained(model)
        settings = TrainerSettings(
            model=str(model),
            kl=KlSettings(coefficient=0.0),
            optimizer=OptimizerSettings(learning_rate=chosen.learning_rate),
            publish=PublishSettings(anchor_every=1000, anchor_bytes_ratio=1e6, skips=()),
        )
        publisher = stack.enter_context(WeightPublisher.open(kafka, run, store, settings.publish, base_model=model))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        checkpoints = CheckpointStore(directory, run.run_id, run.branch, 1)
        weights = TrainedWeights(settings, make_learner(settings), checkpoints, publisher.publish, beside=threads)
        weights.snapshot()
        groups = groups_of(chosen.groups, *sizes(chosen.shape), vocab=weights.vocab_size)
        rounds: dict[str, list[tuple[float, ...]]] = {"none": [], "first": [], "beside": []}
        for step in range(1, 3 * (chosen.runs + 1) + 1):
            kind = list(rounds)[step % 3]
            if kind == "none":
                weights.publish(step - 1)
                weights.published()
            before, begun = _reset_peak(), time.monotonic()
            if kind != "none":
                weights.publish(step - 1)
            if kind == "first":
                weights.published()
            weights.train(groups, step, step - 1, step, None)
            weights.published()
            weights.snapshot()
            seconds = time.monotonic() - begun
            rounds[kind].append((seconds, (peak_bytes() - before) / MEGA, *weights.publish_costs.values()))
            say("round", publication=kind, seconds=seconds)
        medians = {kind: [*map(statistics.median, zip(*found[1:], strict=True))] for kind, found in rounds.items()}
        for kind, (seconds, peak, published, waited) in medians.items():
            say(
                "beside",
                publication=kind,
                rounds=chosen.runs,
                seconds=seconds,
                cost_s=seconds - medians["none"][0],
                publish_s=published,
                waited_s=waited,
                peak_mb=peak,
            )


def main() -> None:
    """Measure the figures that the command line selects and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, measure in COMMANDS.items():
        command = commands.add_parser(name, help=(measure.__doc__ or "").strip(), description=measure.__doc__)
        command.set_defaults(measure=measure)
        command.add_argument("--rows", type=int, default=4096, help="rows of the synthetic matrix")
        command.add_argument("--columns", type=int, default=4096, help="columns of the synthetic matrix")
        command.add_argument("--seed", type=int, default=0, help="seed of the synthetic matrix")
        command.add_argument("--dtypes", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES))
        command.add_argument("--coder", default="auto", help="entropy coder of `sizes`")
        command.add_argument("--against", action="store_true", help="measure other formats too")
        command.add_argument("--runs", type=int, default=5, help="timed runs of each speed")
        command.add_argument("--model", type=Path, help="model that `beside` trains")
        command.add_argument("--groups", type=int, default=1, help="groups of a step of `beside`")
        command.add_argument("--shape", default="8x54+20", help="rollouts x prompt + answer of a group of `beside`")
        command.add_argument("--learning-rate", type=float, default=1e-6, help="of the steps of `beside`")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.measure(chosen)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "sizes": measure_sizes,
    "speed": measure_speed,
    "beside": measure_beside,
}


if __name__ == "__main__":
    main()
