"""Choice of the kernel backend. A fallback is logged, refused in strict mode, and gives the same bytes."""

import logging

import numpy as np
import pytest
import torch

from tests.kernels.reference import assert_same_results
from tidemill.kernels import backend, fingerprint
from tidemill.kernels.backend import CPU_BACKEND, backend_for, choose
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.encoder import DeltaEncoder
from tidemill.kernels.fingerprint import TensorKey

KEY = TensorKey.of("w")
OLD = np.arange(1000, dtype=np.uint16)
NEW = np.where(OLD % 7 == 0, OLD + 3, OLD).astype(np.uint16)


class OnGpu(torch.Tensor):
    """A tensor in the CPU's memory that reports a GPU as its device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cuda", 0)


def on_gpu(bits):
    return torch.from_numpy(bits.copy()).as_subclass(OnGpu)


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """Remove a mode of the environment, and cached warnings and probes."""
    monkeypatch.delenv(backend.ENVIRONMENT, raising=False)
    remembered = backend._warn_of_fallback, backend.triton_obstacle
    for cached in remembered:
        cached.cache_clear()
    yield
    for cached in remembered:
        cached.cache_clear()


def broken():
    return "no driver"


def works():
    return None


@pytest.mark.parametrize(
    ("mode", "gpu", "obstacle", "expected"),
    [
        ("auto", False, broken, "cpu"),
        ("auto", True, works, "triton"),
        ("auto", True, broken, "fallback"),
        ("strict", False, broken, "cpu"),
        ("strict", True, works, "triton"),
        ("cpu", True, works, "cpu"),
        ("triton", False, works, "triton"),
    ],
)
def test_choice(mode, gpu, obstacle, expected):
    assert choose(mode, gpu, obstacle) == expected


@pytest.mark.parametrize(("mode", "gpu"), [("strict", True), ("triton", True), ("triton", False)])
def test_a_required_backend_that_cannot_run_is_an_error(mode, gpu):
    with pytest.raises(RuntimeError, match=f"{mode}.*no driver"):
        choose(mode, gpu, broken)


def test_triton_is_not_probed_if_it_is_not_needed():
    def probed():
        raise AssertionError("probed")

    assert choose("auto", False, probed) == "cpu"
    assert choose("cpu", True, probed) == "cpu"


def test_numpy_arrays_use_the_compiled_loops_in_every_known_mode(monkeypatch):
    for mode in ("", "auto", "strict", "cpu"):
        monkeypatch.setenv(backend.ENVIRONMENT, mode)
        assert backend_for(OLD) is CPU_BACKEND
    monkeypatch.setenv(backend.ENVIRONMENT, "gpu")
    with pytest.raises(ValueError, match="'gpu'; it may be auto, strict, cpu, triton"):
        backend_for(OLD)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_strict_refuses_a_gpu_tensor_without_a_gpu(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT, "strict")
    with pytest.raises(RuntimeError, match="finds no GPU"):
        backend_for(on_gpu(OLD))
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        backend_for(on_gpu(OLD)).fingerprint(on_gpu(OLD), KEY)
    monkeypatch.setenv(backend.ENVIRONMENT, "triton")
    with pytest.raises(RuntimeError, match="cannot run"):
        backend_for(OLD)


def test_a_kernel_that_fails_is_an_obstacle_with_its_reason(monkeypatch):
    triton_rows = pytest.importorskip("tidemill.kernels.triton_rows")

    def failing(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_rows, "INTERPRETED", True)
    monkeypatch.setattr(triton_rows, "fingerprint", failing)
    assert "RuntimeError: no compiler" in backend.triton_obstacle()


def test_a_kernel_that_is_wrong_is_an_obstacle(monkeypatch):
    triton_rows = pytest.importorskip("tidemill.kernels.triton_rows")

    monkeypatch.setattr(triton_rows, "INTERPRETED", True)
    monkeypatch.setattr(triton_rows, "fingerprint", lambda *_: fingerprint.ZERO)
    assert "wrong result" in backend.triton_obstacle()


def test_the_fallback_is_logged_once_and_gives_the_same_bytes(monkeypatch, caplog):
    monkeypatch.setattr(backend, "triton_obstacle", broken)
    held = on_gpu(OLD)
    with caplog.at_level(logging.WARNING):
        assert backend_for(held).fingerprint(held, KEY) == fingerprint.fingerprint(OLD, KEY)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cuda:0" in record.message
    assert "no driver" in record.message


def test_tensors_on_a_gpu_do_not_share_a_block_on_the_cpu(monkeypatch):
    """In a shared block they would be copied whole to the CPU."""
    monkeypatch.setenv(backend.ENVIRONMENT, "cpu")
    for place, waits in ((on_gpu, False), (torch.from_numpy, True), (np.asarray, True)):
        encoder = DeltaEncoder(CodecSettings(block_elements=16 * OLD.size))
        list(encoder.add("w", "bfloat16", place(OLD), place(NEW)))
        assert (encoder.waiting == {"w"}) is waits


def test_the_cpu_may_be_chosen_for_a_gpu_tensor_without_a_warning(monkeypatch, caplog):
    monkeypatch.setenv(backend.ENVIRONMENT, "cpu")
    with caplog.at_level(logging.WARNING):
        assert backend_for(on_gpu(OLD)).fingerprint(on_gpu(OLD), KEY) == fingerprint.fingerprint(OLD, KEY)
    assert not caplog.records


def test_cpu_tensors_have_the_same_results():
    assert_same_results(CPU_BACKEND, torch.from_numpy)


def test_a_tensor_of_any_type_is_read_as_bit_patterns():
    values = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert backend_for(values).fingerprint(values, KEY) == fingerprint.fingerprint(
        values.view(torch.uint16).numpy(), KEY
    )


def test_arguments_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        backend_for(torch.zeros(4, 4)[:, 1]).fingerprint(torch.zeros(4, 4)[:, 1], KEY)
    with pytest.raises(TypeError, match="complex128"):
        backend_for(torch.zeros(4, dtype=torch.complex128)).fingerprint(torch.zeros(4, dtype=torch.complex128), KEY)
