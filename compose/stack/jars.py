"""Kafka's jars: resolved once by Maven from the pinned `pom.xml`, then kept in a cache directory.

A directory named by the digest of the pom is complete or absent, so a second start needs neither Maven nor a network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from tidemill.compose.stack.errors import StackError
from tidemill.compose.stack.lock import exclusive
from tidemill.compose.stack.tools import find_maven

POM = Path(__file__).with_name("pom.xml")
REPORT_EVERY_S = 1.0
RESOLVE_TIMEOUT_S = 1800.0
_DOWNLOADED = re.compile(r"Downloaded from \S+: \S*/(?P<file>[^/\s]+) \(")

Progress = Callable[[str], None]


def jars_dir(cache_dir: Path) -> Path:
    """Where the jars of this pom lie, whether they are there yet or not."""
    return cache_dir / f"kafka-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"


def jars_present(cache_dir: Path) -> bool:
    """Whether a start needs no Maven."""
    return jars_dir(cache_dir).is_dir()


def resolve_jars(cache_dir: Path, progress: Progress) -> Path:
    """The directory of Kafka's jars, fetched by Maven if need be.

    Raises MissingTool without Maven, StackError with Maven's last lines when it fails.
    """
    target = jars_dir(cache_dir)
    if target.is_dir():
        return target
    maven = find_maven()
    with exclusive(cache_dir / "jars.lock", RESOLVE_TIMEOUT_S, progress):
        if not target.is_dir():
            _fetch(maven, target, progress)
    return target


def _fetch(maven: Path, target: Path, progress: Progress) -> None:
    """Copy the jars beside `target`, then rename: a killed fetch leaves nothing that looks complete."""
    staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        progress("fetching Apache Kafka with Maven (about 45 MB, once)")
        _copy_dependencies(maven, staging, progress)
        staging.chmod(0o755)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_dependencies(maven: Path, into: Path, progress: Progress) -> None:
    command = [
        str(maven),
        "--batch-mode",
        "-Dstyle.color=never",
        f"--file={POM}",
        "dependency:copy-dependencies",
        "-DincludeScope=runtime",
        f"-DoutputDirectory={into}",
    ]
    # Maven writes nothing of ours beside the pom: the packaged file may be read-only.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        last = report_downloads(process.stdout, progress, time.monotonic)
    if process.returncode != 0:
        raise StackError("Maven could not fetch Apache Kafka's jars. Its last lines:\n  " + "\n  ".join(last))


def report_downloads(lines: Iterable[str], progress: Progress, clock: Callable[[], float]) -> list[str]:
    """Read Maven's output to its end, telling `progress` about downloads at most once a second; its last lines."""
    last: deque[str] = deque(maxlen=15)
    count, reported = 0, clock()
    for line in lines:
        last.append(line.rstrip())
        found = _DOWNLOADED.search(line)
        count += found is not None
        if found and clock() - reported >= REPORT_EVERY_S:
            reported = clock()
            progress(f"Maven: {count} files fetched, now {found['file']}")
    return list(last)
