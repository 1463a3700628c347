"""A ClickHouse server for tests: its own HTTP server, with users and passwords, as `clickhouse local` starts it.

    python -m tests.clickhouse_server LIBRARY DIRECTORY PORT

chDB's wheel contains this server, but no way to start it; the library of chDB's npm package has one. The package is
downloaded once, with `npm pack`, into the cache of the local stack.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.waiting import until
from tidemill.compose.stack.config import default_cache_dir
from tidemill.compose.stack.process import pick_ports
from tidemill.consumers.sink.config import SinkSettings

PACKAGE, VERSION = "@chdb/lib-linux-x64-gnu", "26.7.3-stable.1"
SHA512 = "XP97mMqnc5tZpKQywR8N7cLTsHNiTmHr30pC5mzo3jWmukjKn2IBa60c2B/gWUNcuFjOMjWoorQICCqBVj5wpw=="
"""The base64 digest of the package's file, as in an npm lock file."""
REQUIRED = "TIDEMILL_CLICKHOUSE"
"""If this is `required`, tests fail when the package cannot be downloaded. Otherwise they are skipped."""
USER, PASSWORD = "sink", "a secret"
USERS = """<clickhouse>
<profiles><default/></profiles><quotas><default/></quotas>
<users>{}</users>
</clickhouse>"""
ONE_USER = "<{0}><password>{1}</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile></{0}>"
FETCH_S, START_S = 240.0, 120.0


def library() -> Path:
    """Return the library, downloaded at the first call. Skip or fail the test if it cannot be downloaded."""
    found = default_cache_dir() / f"clickhouse-{VERSION}" / "libchdb.so"
    if not found.is_file():
        try:
            _fetch(found)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            missing = f"no ClickHouse server: the npm package {PACKAGE}@{VERSION} could not be fetched: {error}"
            pytest.fail(missing) if os.environ.get(REQUIRED) == "required" else pytest.skip(missing)
    return found


def _fetch(library: Path) -> None:
    """Raise ValueError for another machine or another package; OSError or SubprocessError if npm fails."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ValueError("it is for Linux on x86_64")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
        subprocess.run(command, cwd=folder, check=True, timeout=FETCH_S, stdout=subprocess.DEVNULL)
        (packed,) = Path(folder).glob("*.tgz")
        with packed.open("rb") as file:
            digest = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
        if digest != SHA512:
            raise ValueError(f"the package has the digest {digest}")
        with tarfile.open(packed) as archive:
            archive.extract("package/libchdb.so", folder, filter="data")
        Path(folder, "package/libchdb.so").replace(library)


@contextmanager
def clickhouse_server(directory: Path) -> Iterator[SinkSettings]:
    """Run a server that stores its data in `directory`; yield the settings of a sink that writes to it."""
    (port,) = pick_ports(1, 0)
    directory.mkdir(parents=True, exist_ok=True)
    users = "".join(ONE_USER.format(*one) for one in (("default", ""), (USER, PASSWORD)))  # the server's own user first
    (directory / "users.xml").write_text(USERS.format(users))
    (directory / "config.xml").write_text(
        f"<clickhouse><user_directories><users_xml><path>{directory}/users.xml</path></users_xml></user_directories>"
        "</clickhouse>"
    )
    command = [sys.executable, "-m", "tests.clickhouse_server", str(library()), str(directory), str(port)]
    log = directory / "server.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=said, stderr=said)

    def answers() -> bool:
        assert process.poll() is None, log.read_text("utf-8", "replace")
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ping").text == "Ok.\n"
        except httpx.TransportError:
            return False

    try:
        until(answers, lambda: log.read_text("utf-8", "replace"), START_S)
        yield SinkSettings(host="127.0.0.1", port=port, user=USER, password=PASSWORD, path=str(directory / "sink"))
    finally:
        process.kill()
        process.wait(START_S)
        shutil.rmtree(directory / "data", ignore_errors=True)


def main(library: str, directory: str, port: str) -> None:
    """Serve until killed: a query that sleeps keeps the server up."""
    arguments = [
        "clickhouse",
        f"--config-file={directory}/config.xml",
        f"--path={directory}/data",
        "--listen_host=127.0.0.1",
        f"--http_port={port}",
        "--query=SYSTEM START LISTEN HTTP; SELECT sleepEachRow(3) FROM numbers(100000) "
        "SETTINGS max_block_size = 1, max_execution_time = 0 FORMAT Null",
    ]
    engine = ctypes.CDLL(library)
    run, error = engine.chdb_query_cmdline, engine.chdb_result_error
    run.restype, error.restype, error.argtypes = ctypes.c_void_p, ctypes.c_char_p, [ctypes.c_void_p]
    result = run(len(arguments), (ctypes.c_char_p * len(arguments))(*(each.encode() for each in arguments)))
    sys.exit(f"the server ended: {(error(result) or b'').decode()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
