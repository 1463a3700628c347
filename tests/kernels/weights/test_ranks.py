"""Ranks in one process, with and without a process group. For several processes, see `test_publish_ranks`."""

import json

import numpy as np
import pytest

from tidemill.kernels.weights.graph import Unreachable, VersionError
from tidemill.kernels.weights.ranks import Ranks, RanksLostError, open_ranks
from tidemill.schemas.log.fenced_producer import FencedError
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.stored_object import StoreUnavailableError

CALLS = ["from_first", "on_first", "gather"]
KEPT = [VersionError, Unreachable, DeliveryError, FencedError, StoreUnavailableError, OSError]


@pytest.fixture(params=["process group", "no process group"])
def one(request):
    if request.param == "process group":
        return request.getfixturevalue("ranks")
    found = open_ranks(timeout_s=120)
    assert isinstance(found, Ranks)
    return found


def raising(error):
    def make():
        raise error

    return make


def test_a_group_of_one(one):
    assert (one.rank, one.size, one.is_first) == (0, 1, True)
    assert one.from_first(lambda: "made") == one.on_first(lambda: "made") == "made"
    assert one.gather(lambda: None) == [None]


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_contains_its_rank_and_its_cause(ranks, call):
    with pytest.raises(RuntimeError, match="rank 0: KeyError: 'here'") as raised:
        getattr(ranks, call)(raising(KeyError("here")))
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KEPT)
def test_an_error_that_can_be_built_from_a_message_keeps_its_class(ranks, call, kind):
    with pytest.raises(kind) as raised:
        getattr(ranks, call)(raising(kind("gone")))
    assert type(raised.value) is kind and str(raised.value) == f"rank 0: {kind.__name__}: gone"
    assert type(raised.value.__cause__) is kind


class TwoWords(ValueError):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Local(ValueError):
    """An error class that its module does not contain under this name."""


Local.__qualname__ = "elsewhere.Local"


@pytest.mark.parametrize("error", [TwoWords("a", "b"), json.JSONDecodeError("a", "b", 0), Local("a")], ids=repr)
def test_an_error_that_cannot_be_built_from_a_message_is_named(ranks, error):
    with pytest.raises(RuntimeError, match=f"rank 0: {type(error).__name__}: a"):
        ranks.gather(raising(error))


@pytest.mark.parametrize("call", CALLS)
def test_without_a_process_group_errors_are_raised_unchanged(call):
    error = KeyError("here")
    with pytest.raises(KeyError) as raised:
        getattr(Ranks(), call)(raising(error))
    assert raised.value is error


def test_one_process_cannot_send():
    for call in (Ranks().send, Ranks().receive):
        with pytest.raises(RanksLostError, match="one process has no rank 1"):
            call(np.zeros(1, np.uint16), 1)
