"""One branch as the log tells it: its versions, the decisions about them, and which replicas proved them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.consumers.replica.gate import PoolGate
from tidemill.kernels.weights.graph import UnknownVersion, VersionGraph
from tidemill.schemas.records import AckStatus, GateDecision, Manifest, Record, WeightAck


class Chain(VersionGraph):
    """The versions of one branch of one run, with what was said of them. `observe` takes records in log order."""

    def __init__(self, run_id: str, branch: str, kept_from: Mapping[int, int] | None = None) -> None:
        super().__init__(run_id, branch, kept_from)
        self.gate = PoolGate()
        self.decisions: list[GateDecision] = []
        self.proofs: dict[int, set[str]] = {}
        """Replicas that proved a version from their live tensors."""
        self.refusals: dict[int, dict[str, str]] = {}
        """Reasons by replica, by version."""
        self.replicas: dict[str, WeightAck] = {}
        """The last acknowledgement of each replica."""

    def observe(self, record: Record | None) -> str:
        """Take a record in; records of other runs, branches and kinds are left alone.

        Returns why a manifest or a skip-delta is not taken; else an empty text.
        """
        objection = super().observe(record)
        if not isinstance(record, GateDecision | WeightAck):
            return objection
        if (record.run_id, record.branch) == (self.run_id, self.branch):
            if isinstance(record, GateDecision):
                self.gate.observe(record)
                self.decisions.append(record)
            else:
                self.replicas[record.replica_id] = record
                if record.status is AckStatus.REFUSED:
                    self.refusals.setdefault(record.version, {})[record.replica_id] = record.reason
                else:
                    self.proofs.setdefault(record.version, set()).add(record.replica_id)
        return objection

    @property
    def head(self) -> Manifest:
        """The newest version. Raises UnknownVersion for a branch without one."""
        if self.newest is None:
            raise UnknownVersion(
                f"run {self.run_id} has no version on branch {self.branch}: name another with --run-id or --branch"
            )
        return self.newest

    @property
    def limit(self) -> GateDecision | None:
        """The decision that limits what is served now; None while the head may be."""
        return self.gate.limit
