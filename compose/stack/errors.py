"""What can go wrong with the local stack. Every message says what is wrong and what to do about it."""

from __future__ import annotations


class StackError(RuntimeError):
    """The local stack could not do what was asked."""


class MissingTool(StackError):
    """Java or Maven is not on this machine, so the local stack cannot start; the message names the three choices."""


class BrokerPortTaken(StackError):
    """Another program listens on a port that a broker needs."""


class BrokerFailed(StackError):
    """A broker did not come up; the message ends with the last lines of its log."""


class StackBusy(StackError):
    """Another command is at work on the same directory and did not finish in time."""
