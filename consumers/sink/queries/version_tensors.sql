-- Which tensors does a weight version hold, and what are their fingerprints?
-- title: Tensors
WITH
    -- insert: version_record
SELECT
    run_id,
    branch,
    tensors.name AS tensor,
    tensors.dtype AS dtype,
    tensors.shape AS shape,
    tensors.fingerprint AS fingerprint
FROM version_record
ARRAY JOIN tensors
ORDER BY tensor
