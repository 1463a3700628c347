"""Damaged blocks with correct digests, of every encoding and coder: refused or exact. A benchmark does the long run."""

import os
import signal

import numpy as np
import pytest

from tests.bench import fuzz_delta
from tests.bench.fuzz_delta import COUNTS, DECODERS, Sample, damaged, judge, run, samples
from tidemill.kernels.block import header_size, read_header
from tidemill.kernels.coder import PCODEC, RANS, ZSTD
from tidemill.kernels.payload import Encoding

INPUTS = 400


@pytest.mark.parametrize("decoder", DECODERS)
def test_damaged_inputs_are_refused_or_exact(decoder):
    valid = samples(decoder)
    verdicts = [judge(decoder, *damaged(decoder, valid, seed)) for seed in range(INPUTS)]
    assert set(verdicts) <= {"refused", "accepted"}
    assert verdicts.count("refused") > INPUTS // 2


@pytest.mark.parametrize("decoder", DECODERS)
def test_samples_can_be_read_by_their_decoder(decoder):
    encodings = {"raw": Encoding.RAW, "constant": Encoding.CONSTANT}
    coders = {"rans": RANS.code, "pcodec": PCODEC.code, "zstd": ZSTD.code}
    for sample in samples(decoder):
        assert judge(decoder, sample.data, sample) == "accepted"
        if decoder != "container":
            header = read_header(memoryview(sample.data))
            assert header.encoding == encodings.get(decoder, Encoding.CLASSES)
            assert decoder not in coders or sample.data[header_size(sample.data) + 1] == coders[decoder]


def test_wrong_weights_are_detected():
    sample = samples("rans")[0]
    assert judge("rans", sample.data, Sample(sample.data, sample.old, np.zeros_like(sample.new))) == "wrong"


def faulty(monkeypatch, at, fault):
    """Return the counts of a run in which input number `at` has a fault."""
    sound = judge

    def judge_until(decoder, data, sample):
        seen.append(data)
        return fault() if len(seen) == at + 1 else sound(decoder, data, sample)

    seen: list[bytes] = []
    monkeypatch.setattr(fuzz_delta, "judge", judge_until)
    return run("zstd", 5, 0, lambda done: None)


def test_a_process_that_dies_is_counted_and_the_run_continues(monkeypatch):
    counts = faulty(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (counts["crashed"], sum(counts.values())) == (1, 5)


def test_a_process_that_hangs_is_counted(monkeypatch):
    monkeypatch.setattr(fuzz_delta, "HANG_SECONDS", 6.0)
    counts = faulty(monkeypatch, 4, signal.pause)
    assert (counts["hung"], sum(counts.values())) == (1, 5)
    assert set(counts) == set(COUNTS)
