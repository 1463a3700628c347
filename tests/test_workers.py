"""How the tests are shared out to workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.workers import UNIT, WHOLE_LOOP, unit_of

ROOT = Path(__file__).resolve().parent.parent


def test_files_that_look_at_one_demonstration_are_one_unit_and_any_other_file_is_its_own():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "system").glob("test_*.py")]
    sharing = {file for file in files if "finished" in (ROOT / file).read_text("utf-8")}
    assert sharing == WHOLE_LOOP
    assert {unit_of(f"{file}::test_it") for file in sharing} == {UNIT}
    assert all(unit_of(f"{file}::test_it") == file for file in {*files, "tests/test_workers.py"} - sharing)


def ran(folder: Path, workers: int) -> list[tuple[str, str]]:
    """Worker and file of each test of a tree with the names of this one, in their order."""
    test = "import os\ndef test_{0}(): print(os.environ['PYTEST_XDIST_WORKER'], __file__, file=open('ran', 'a'))\n"
    for file in ("tests/compose/test_other.py", *WHOLE_LOOP):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(test.format(number) for number in range(3)))
    options = ["-p", "no:cacheprovider", "--rootdir", str(folder), "--import-mode=importlib", "--no-loadscope-reorder"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.workers", "--numprocesses", str(workers), *options, "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (line.split() for line in (folder / "ran").read_text().splitlines())
    return [(worker, Path(file).relative_to(folder).as_posix()) for worker, file in lines]


def test_the_whole_loop_comes_first(tmp_path: Path):
    files = [file for _, file in ran(tmp_path, 1)]
    assert len(files) == 3 * (len(WHOLE_LOOP) + 1) and set(files[: 3 * len(WHOLE_LOOP)]) == WHOLE_LOOP


def test_the_whole_loop_is_the_work_of_one(tmp_path: Path):
    found = ran(tmp_path, 2)
    (loop,), (other,) = ({worker for worker, file in found if (file in WHOLE_LOOP) is whole} for whole in (True, False))
    assert loop != other
