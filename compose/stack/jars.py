"""Kafka's jars: resolved once by Maven from the pinned `pom.xml`, then kept in a cache directory; Java and Maven.

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

from tidemill.compose.stack.config import StackError
from tidemill.compose.stack.process import exclusive

POM = Path(__file__).with_name("pom.xml")
REPORT_EVERY_S = 1.0
RESOLVE_TIMEOUT_S = 1800.0
_DOWNLOADED = re.compile(r"Downloaded from \S+: \S*/(?P<file>[^/\s]+) \(")

Progress = Callable[[str], None]


def jars_dir(cache_dir: Path) -> Path:
    """Return the directory for the jars of this pom, which may not exist yet."""
    return cache_dir / f"kafka-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"


def resolve_jars(cache_dir: Path, progress: Progress) -> Path:
    """Return the directory of Kafka's jars; Maven fetches them if needed.

    Raises StackError if Maven is missing, or, with its last lines, if it fails.
    """
    target = jars_dir(cache_dir)
    if target.is_dir():
        return target
    maven = find_maven()
    with exclusive(cache_dir / "jars.lock", RESOLVE_TIMEOUT_S, progress):
        if target.is_dir():
            return target
        # The jars are copied next to `target`, then renamed: an interrupted fetch never looks complete.
        staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        try:
            progress("fetching Apache Kafka with Maven (about 45 MB, once)")
            command = [
                str(maven),
                "--batch-mode",
                "-Dstyle.color=never",
                f"--file={POM}",
                "dependency:copy-dependencies",
                "-DincludeScope=runtime",
                f"-DoutputDirectory={staging}",
            ]
            # Maven writes no file next to the pom: the packaged file may be read-only.
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                assert process.stdout is not None
                last = report_downloads(process.stdout, progress, time.monotonic)
            if process.returncode != 0:
                raise StackError("Maven could not fetch Apache Kafka's jars. Its last lines:\n  " + "\n  ".join(last))
            staging.chmod(0o755)
            os.rename(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def report_downloads(lines: Iterable[str], progress: Progress, clock: Callable[[], float]) -> list[str]:
    """Read Maven's output to its end and report downloads to `progress`, at most one a second; return its end."""
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


OLDEST_JAVA = 17
"""Apache Kafka 4 brokers need Java 17."""

CHOICES = """Three ways to get a Kafka:
  1. use one that runs already: give --bootstrap HOST:PORT, or set TIDEMILL_KAFKA__BOOTSTRAP;
  2. run the compose file: docker compose -f compose/docker-compose.yml up;
  3. install Java 17 or later and Maven, and run this command again."""


def find_java() -> Path:
    """Return the `java` of JAVA_HOME, or of PATH. Raises StackError if there is none or it is older than 17."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else None
    if java is None or not os.access(java, os.X_OK):
        java = shutil.which("java")
    if java is None:
        raise missing("Java is not installed (no `java` in JAVA_HOME or on PATH).")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise missing(f"{java} does not run: {error}.") from error
    release = parse_java_release(done.stderr + done.stdout)
    if release is None:
        raise missing(f"{java} -version does not name a version.")
    if release < OLDEST_JAVA:
        raise missing(f"{java} is Java {release}; Apache Kafka 4 needs Java {OLDEST_JAVA} or later.")
    return Path(java)


def find_maven() -> Path:
    """Return the `mvn` of PATH. Raises StackError if there is none."""
    maven = shutil.which("mvn")
    if maven is None:
        raise missing("Maven is not installed (no `mvn` on PATH); it fetches Apache Kafka's jars.")
    return Path(maven)


def missing(what: str) -> StackError:
    """Return the error for a missing tool, with the choices that the user has."""
    return StackError(f"{what}\n{CHOICES}")


def parse_java_release(banner: str) -> int | None:
    """Return the feature release in the output of `java -version`: 17 for "17.0.15", 8 for "1.8.0_392", or None."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', banner)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2] or 0)
    return minor if major == 1 else major
