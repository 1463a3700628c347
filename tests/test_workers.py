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


def test_the_whole_loop_comes_first_and_is_the_work_of_one(tmp_path: Path):
    """In a tree with the names of this one, two workers and three units: the loop is not the one that is left over."""
    test = "import os\ndef test_{0}(): print(os.environ['PYTEST_XDIST_WORKER'], __file__, file=open('ran', 'a'))\n"
    for file in ("tests/compose/test_one.py", "tests/compose/test_other.py", *WHOLE_LOOP):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(test.format(number) for number in range(3)))
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.workers", "-n", "2", "--no-loadscope-reorder", *options, "tests"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    by_worker: dict[str, list[str]] = {}
    for line in (tmp_path / "ran").read_text().splitlines():
        worker, file = line.split()
        by_worker.setdefault(worker, []).append(Path(file).relative_to(tmp_path).as_posix())
    (files,) = (files for files in by_worker.values() if WHOLE_LOOP & set(files))
    loop = 3 * len(WHOLE_LOOP)
    assert set(files[:loop]) == WHOLE_LOOP and sum(map(len, by_worker.values())) == loop + 6
