"""Records that the log no longer keeps: who wanted to read them is told so, and is never led past them in silence."""

from __future__ import annotations


class RetentionGap(LookupError):
    """The next record to read is no longer kept: retention, or a deletion, was faster than the reader."""

    def __init__(self, topic: str, partition: int, wanted: int, first: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the log no longer keeps offset {wanted}, the log begins at {first}: up to "
            f"{first - wanted} records were deleted before they were read. Let the topic's retention.ms outlast the "
            "longest time that its readers are down. To go on without these records, set `stream.accept_gaps` or "
            "`sink.accept_gaps` where one of these reads, or move the consumer group's committed offset"
        )
        self.topic = topic
        """Full name."""
        self.partition = partition
        self.wanted = wanted
        """Next offset to read."""
        self.first = first
        """First offset that the log keeps."""


class TopicMadeAnew(LookupError):
    """The next offset to read lies behind the end of the log."""

    def __init__(self, topic: str, partition: int, wanted: int, end: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the reader stands at offset {wanted} and the log ends at {end}: the topic was made "
            "anew, or the log lost records. What the reader remembers does not belong to this log"
        )
