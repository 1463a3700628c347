"""Print each script's `--help` from one process, which imports the common modules once.

    python forked_help.py OUT SCRIPT...

A script runs in a fork of this process, as `python SCRIPT --help` would: its own folder first on the path, and the
working directory of the caller. OUT/NAME.json holds its exit status, standard output and standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401

import tidemill.compose.cli
import tidemill.kernels.weights.publish
import tidemill.streams.runner.faust_worker
import tidemill.trainer.batch_builder
import tidemill.trainer.step  # noqa: F401


def run(script: Path) -> dict[str, int | str]:
    """Run `script --help` in this process."""
    sys.argv, sys.path[0] = [str(script), "--help"], str(script.parent)
    status, out, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - the caller reads how the script failed
            status = 1
            traceback.print_exc()
    return {"status": status, "out": out.getvalue(), "errors": errors.getvalue()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for script in map(Path, sys.argv[2:]):
        if (child := os.fork()) == 0:
            (folder / f"{script.name}.json").write_text(json.dumps(run(script)), "utf-8")
            os._exit(0)
        os.waitpid(child, 0)
