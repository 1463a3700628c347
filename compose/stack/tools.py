"""Find Java and Maven, at once and before any slow work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tidemill.compose.stack.errors import MissingTool

OLDEST_JAVA = 17
"""Apache Kafka 4 brokers need Java 17."""

CHOICES = """Three ways to get a Kafka:
  1. use one that runs already: give --bootstrap HOST:PORT, or set TIDEMILL_KAFKA__BOOTSTRAP;
  2. run the compose file: docker compose -f compose/docker-compose.yml up;
  3. install Java 17 or later and Maven, and run this command again."""


def find_java() -> Path:
    """The `java` of JAVA_HOME, else of PATH; MissingTool when there is none or it is older than 17."""
    java = _from_home("JAVA_HOME", "bin/java") or _from_path("java")
    if java is None:
        raise missing("Java is not installed (no `java` in JAVA_HOME or on PATH).")
    release = _java_release(java)
    if release < OLDEST_JAVA:
        raise missing(f"{java} is Java {release}; Apache Kafka 4 needs Java {OLDEST_JAVA} or later.")
    return java


def find_maven() -> Path:
    """The `mvn` of PATH; MissingTool when there is none."""
    maven = _from_path("mvn")
    if maven is None:
        raise missing("Maven is not installed (no `mvn` on PATH); it fetches Apache Kafka's jars.")
    return maven


def missing(what: str) -> MissingTool:
    """The error for a missing tool, with the choices that the person has."""
    return MissingTool(f"{what}\n{CHOICES}")


def parse_java_release(banner: str) -> int | None:
    """The feature release in the output of `java -version`: 17 for "17.0.15", 8 for "1.8.0_392", None if unclear."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', banner)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2] or 0)
    return minor if major == 1 else major


def _java_release(java: Path) -> int:
    """Release of a `java` executable; MissingTool when it does not run or does not say."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise missing(f"{java} does not run: {error}.") from error
    release = parse_java_release(done.stderr + done.stdout)
    if release is None:
        raise missing(f"{java} -version does not name a version.")
    return release


def _from_home(variable: str, relative: str) -> Path | None:
    home = os.environ.get(variable)
    candidate = Path(home) / relative if home else None
    return candidate if candidate is not None and os.access(candidate, os.X_OK) else None


def _from_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
