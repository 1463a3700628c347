"""Run a Python program inside the network namespace of another process.

python enter.py PID PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from network.devices import enter_namespace  # noqa: E402 - the helpers are modules beside the tests

if __name__ == "__main__":
    enter_namespace(int(sys.argv[1]))
    del sys.argv[:2]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
