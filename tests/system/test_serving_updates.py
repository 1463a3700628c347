"""Users never notice an update: twenty versions are published and promoted while answers are streamed."""

import asyncio
import json

import numpy as np
import pytest

from tests.system.serving_load import TOKENS, serving

UPDATES = 20


@pytest.mark.timeout(1500)
def test_twenty_updates_under_load_fail_no_request_and_every_answer_is_recorded(kafka, tmp_path):
    load, recorded = asyncio.run(updated_under_load(kafka.fresh(), tmp_path))
    assert load.failures == []
    assert sorted(made.interaction_id for made in recorded) == sorted(load.interactions)
    assert {(made.sampled_tokens, made.finish_reason, made.arm) for made in recorded} == {(TOKENS, "length", "stable")}
    assert all(made.segments[0].spans[-1].end - made.prompt_tokens == TOKENS for made in recorded)
    served = {span.version for made in recorded for span in made.segments[0].spans}
    assert served == set(range(UPDATES + 1))
    assert any(made.version_min < made.version_max for made in recorded), "no version changed within an answer"
    print(json.dumps({phase: percentiles(gaps) for phase, gaps in load.gaps_ms.items()}))


async def updated_under_load(settings, root):
    async with serving(settings, root, clients=4) as served:
        served.load.phase = "quiet"
        await served.load.until(8)
        served.load.phase = "updates"
        for _ in range(UPDATES):
            await served.update()
            await served.load.until(1)
            assert not served.load.failures
    return served.load, served.recorded()


def percentiles(gaps):
    return {"p50_ms": round(float(np.percentile(gaps, 50)), 2), "p99_ms": round(float(np.percentile(gaps, 99)), 2)}
