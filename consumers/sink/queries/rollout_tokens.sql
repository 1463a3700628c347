-- Which tokens does one rollout hold, who sampled them and how probable were they?
-- title: Conversation
-- `run`, `partition` and `offset` may be empty. Logprobs are those of 2,000 tokens from the token `from`, counted from 0.
SELECT
    segments.n_tokens AS lengths,
    token_ids,
    loss_mask,
    arraySlice(logprobs, toUInt64OrZero({from:String}) + 1, 2000) AS logprobs,
    spans.segment AS span_segments,
    spans.version AS span_versions,
    spans.start AS span_starts,
    spans.end AS span_ends,
    failure,
    claim_uri,
    claim_n_bytes AS claim_bytes
FROM rollouts
WHERE rollout_id = {rollout_id:String}
    AND ({run:String} = '' OR run_id = {run:String})
    AND ({partition:String} = '' OR _partition = toInt32OrZero({partition:String}))
    AND ({offset:String} = '' OR _offset = toInt64OrZero({offset:String}))
ORDER BY _timestamp, _offset
LIMIT 1
