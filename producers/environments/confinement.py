"""The keeper of a process: it starts the process with resource limits, and ends it with all that it started.

    python -m tidemill.producers.environments.confinement WORKER environment SOCKET MEMORY
    python -m tidemill.producers.environments.confinement WORKER program STDIN COMMAND…

WORKER is the process id of the worker, the others are descriptors that it made: an environment's connection to the
worker and its marks (`serving`), or an agent program's standard input. The working directory of an environment is a
temporary directory; a program keeps the current directory, and has the temporary directory as its home.

The keeper is the parent of the process and the reaper of all orphaned processes that it started. It kills the process
tree when the worker closes the keeper's standard input, when the worker dies, or when the process ends. Then it writes
a report to standard output: the exit code of the process, and the end of its stderr.

Invariant: when the keeper has exited by itself, no process of the tree is alive and the temporary directory is deleted.
The limits protect against code that fails, hangs or leaks, and against text of a model that is executed. They do not
stop an attacker, who can read what the same user can read. The number of processes, and of files, is not limited.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]

TAIL_BYTES = 4096
"""Bytes from the end of stderr that are kept."""
OUT_OF_MEMORY = 77
"""Exit code of an environment's process that reached its memory limit."""
OPEN_FILES = 4096
"""Most open descriptors of a process."""
ADDRESS_SPACE = 4
"""Factor for the memory limit: libraries reserve more than they use, and shared memory counts only here."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the keeper of the process that the command line names."""
    worker, (kind, *given) = int(sys.argv[1]), sys.argv[2:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # the keeper wakes up, and checks its parent
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_END_SIGNALS):
        signal.signal(number, lambda *_: None)
    folder = tempfile.mkdtemp(prefix="tidemill-environment-")
    try:
        code, tail = _kept(_start(kind, given, folder), worker, woken)
    except OSError as error:
        code, tail = 127, f"{error.filename}: {error.strerror}".encode()
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps({"code": code, "stderr": tail.decode(errors="replace")}))
        sys.stdout.flush()


def _start(kind: str, given: list[str], folder: str) -> subprocess.Popen[bytes]:
    """Start the process with only the worker's descriptors. Raises OSError."""
    keeper = os.getpid()

    def end_with_keeper() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(0)

    how: dict[str, Any]
    if kind == "program":
        descriptors, command = [int(given[0])], given[1:]
        home = {"HOME": folder, "TMPDIR": folder}
        how = {"stdin": descriptors[0], "start_new_session": True, "env": {**os.environ, **home}}
    else:
        descriptors = [*map(int, given)]
        command = [sys.executable, "-P", "-m", "tidemill.producers.environments.serving", *given]
        how = {"stdin": subprocess.DEVNULL, "pass_fds": descriptors, "cwd": folder}
    try:
        # The keeper has only one thread, so code may run between fork and exec.
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=end_with_keeper, **how
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _kept(process: subprocess.Popen[bytes], worker: int, woken: int) -> tuple[int, bytes]:
    """Wait for the end of a process or of its worker, kill the tree, and return exit code and end of stderr."""
    assert process.stderr is not None
    errors, statuses, tail = process.stderr.fileno(), dict[int, int](), b""
    watched = [0, woken, errors]
    while process.pid not in statuses and os.getppid() == worker:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready or (woken in ready and {*os.read(woken, 512)} & {*_END_SIGNALS}):
            break
        if errors in ready:
            written = os.read(errors, 1 << 16)
            tail = (tail + written)[-TAIL_BYTES:]
            if not written:
                watched.remove(errors)
        _reap(statuses, os.WNOHANG)
    living = True
    while living:  # an orphaned process becomes the keeper's child, and the next pass finds it
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        living = _reap(statuses, 0)
    os.set_blocking(errors, False)
    with suppress(BlockingIOError):
        while written := os.read(errors, 1 << 16):
            tail = (tail + written)[-TAIL_BYTES:]
    process.returncode = os.waitstatus_to_exitcode(statuses[process.pid])
    return process.returncode, tail


def _reap(statuses: dict[int, int], options: int) -> bool:
    """Collect the statuses of ended processes; return False if no child is left."""
    try:
        while (ended := os.waitpid(-1, options))[0]:
            statuses[ended[0]] = ended[1]
            options = os.WNOHANG
    except ChildProcessError:
        return False
    return True


def limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """Set resource limits for this process and all processes that it starts."""
    bounds = {
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_AS: ADDRESS_SPACE * memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        most = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (most, most))


def deny_network() -> None:
    """Refuse every socket except socket pairs, with EACCES, to this process and all processes that it starts.

    A seccomp filter; it needs no privilege. Raises OSError if the kernel or the machine does not support it.
    """
    known = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
    if platform.machine() not in known:
        raise OSError(errno.ENOTSUP, f"no filter is known for {platform.machine()}")
    architecture, call_socket = known[platform.machine()]
    call_io_uring_setup, first_x32_call = 425, 0x40000000
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | errno.EACCES
    program = (
        (load, 0, 0, 4),  # the architecture of the call
        (equal, 1, 0, architecture),
        (end, 0, 0, deny),
        (load, 0, 0, 0),  # its number
        (at_least, 3, 0, first_x32_call),
        (equal, 2, 0, call_socket),
        (equal, 1, 0, call_io_uring_setup),
        (end, 0, 0, allow),
        (end, 0, 0, deny),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _prctl(option: int, *arguments: int) -> None:
    given = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    if _LIBC.prctl(option, *given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
