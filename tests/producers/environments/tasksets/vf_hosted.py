"""A taskset of verifiers as `module:object`, for a process that is started without entry points."""

from tidemill.producers.environments.verifiers_bridge import VerifiersTaskset


class HostedSums(VerifiersTaskset):
    """The taskset `vf_sums`."""

    def __init__(self, options):
        super().__init__("vf_sums", options)
