"""Six faults of the weight log on a real Kafka: each is refused with its reason, and healed."""

import pytest

from tests.consumers.replica_faults import STORIES, Site

TOLD = {
    "late joiner": ["anchored 6 6: started from the anchor of version 0 and 6 deltas", "proved 7 7: "],
    "gap": ["refused 2 0: version 2 has parent 1, version 0 is served", "anchored 3 3: re-synced from the anchor"],
    "fork": ["proved 1 1: ", "refused 1 1: fork: version 1 was published", "proved 2 2: "],
    "duplicated chunks": ["proved 1 1: ", "refused 2 1: chunk 1 of version 2", "anchored 3 3: re-synced"],
    "reordered chunks": ["proved 1 1: ", "refused 2 1: chunk 0 of version 2", "anchored 3 3: re-synced"],
    "corrupt chunk": [
        "refused 1 0: chunk 0 of version 1",
        "anchored 2 2: re-synced",
        "refused 3 2: ",
        "anchored 4 4: re-synced",
    ],
    "trainer rollback": [
        "proved 1 1: ",
        "proved 2 2: ",
        "proved 3 3: ",
        "refused 2 3: fork: version 2 was published",
        "anchored 4 4: re-synced from the anchor of version 0 and 2 deltas",
    ],
}
"""The acknowledgements after the replica's start: status, version, version served, and the start of the reason."""


@pytest.mark.parametrize("fault", STORIES)
def test_a_fault_is_refused_and_healed(fault, kafka, tmp_path):
    site = Site(kafka.fresh(1), tmp_path)
    try:
        STORIES[fault](site)
        said = [f"{ack.status.value} {ack.version} {ack.serving_version}: {ack.reason}" for ack in site.acks]
        if fault != "late joiner":
            assert said.pop(0).startswith("anchored 0 0")
        assert len(said) == len(TOLD[fault]), said
        for told, begins in zip(said, TOLD[fault], strict=True):
            assert told.startswith(begins), said
        assert site.healed()
    finally:
        site.close()
