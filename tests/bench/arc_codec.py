"""Size and speed of Fireworks' published codec on two safetensors files, as one JSON line: `arc_codec.py BASE TARGET`.

Runs in its own environment, which has `fireworks-delta-compression` installed and no part of Tidemill.
"""

import json
import sys
import time

import torch
from fireworks_delta_compression import delta_compress, delta_decompress
from safetensors import safe_open

FORMAT = "arc_v3"
GIGA = 1e9


def main() -> None:
    """Compress and decompress every tensor."""
    torch.set_num_threads(1)
    wire = dense = 0
    encode = decode = 0.0
    equal = True
    with safe_open(sys.argv[1], framework="pt") as base, safe_open(sys.argv[2], framework="pt") as target:
        for name in base.keys():  # noqa: SIM118 - not a mapping
            old, new = base.get_tensor(name), target.get_tensor(name)
            begun = time.process_time()
            diff, checksum = delta_compress(src=old, dst=new, compression_format=FORMAT)
            encoded = time.process_time()
            made = delta_decompress(src=old, compressed_diff=diff, checksum=checksum, compression_format=FORMAT)
            decode += time.process_time() - encoded
            encode += encoded - begun
            wire += diff.nbytes
            dense += new.nbytes
            equal &= torch.equal(made.view(torch.uint8), new.view(torch.uint8))
    figures = {"encode_gb_per_second": dense / encode / GIGA, "decode_gb_per_second": dense / decode / GIGA}
    print(json.dumps({"name": f"fireworks {FORMAT}", "wire_bytes": wire, **figures, "round_trip_equal": equal}))


if __name__ == "__main__":
    main()
