"""The keeper of an environment's process: it starts the process within bounds, and ends it with all that it started.

The keeper is the parent of the environment's process and the reaper of everything that this process leaves behind. It
ends the tree when the worker closes the keeper's standard input, when the worker dies, or when the environment's
process ends. Then it writes its last words to standard output: how the process ended, and the end of its stderr.

What holds: when the keeper has ended by itself, no process of the tree lives and their working directory is gone. The
bounds are against code that fails, hangs or leaks, and against text of a model that is executed; they are no wall
against an attacker, who can read what the same user can read. The number of processes, and of files, is not bounded.
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
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

TAIL_BYTES = 4096
"""How much of the end of stderr is kept."""
OUT_OF_MEMORY = 77
"""Exit code of an environment's process that ran into its memory limit."""
ADDRESS_SPACE = 4
"""Times the memory limit: libraries reserve more than they use, and shared memory counts here alone."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_LIBC = ctypes.CDLL(None, use_errno=True)


def keep(run: Callable[[], None], worker: int, *descriptors: int) -> None:
    """Run `run` in a process that has these descriptors and none else, until it or the process `worker` ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # the keeper wakes up, and looks at who its parent is
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_END_SIGNALS):
        signal.signal(number, lambda *_: None)
    errors, write_errors = os.pipe()
    folder = tempfile.mkdtemp(prefix="tidemill-environment-")
    child = os.fork()
    if not child:
        _begin(folder, write_errors, descriptors)
        run()
        os._exit(0)
    for descriptor in (write_errors, *descriptors):
        os.close(descriptor)
    statuses: dict[int, int] = {}
    tail, watched = b"", [0, woken, errors]
    while child not in statuses and os.getppid() == worker:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready or (woken in ready and {*os.read(woken, 512)} & {*_END_SIGNALS}):
            break
        if errors in ready:
            written = os.read(errors, 1 << 16)
            tail = (tail + written)[-TAIL_BYTES:]
            if not written:
                watched.remove(errors)
        _reap(statuses, os.WNOHANG)
    _kill_tree(statuses)
    os.set_blocking(errors, False)
    with suppress(BlockingIOError):
        while written := os.read(errors, 1 << 16):
            tail = (tail + written)[-TAIL_BYTES:]
    shutil.rmtree(folder, ignore_errors=True)
    words = {"code": os.waitstatus_to_exitcode(statuses[child]), "stderr": tail.decode(errors="replace")}
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(words))
        sys.stdout.flush()


def limit_resources(memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Bound this process, and each one that it starts."""
    bounds = {
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_AS: ADDRESS_SPACE * memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        most = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (most, most))


def deny_network() -> None:
    """Refuse to this process, and to each one that it starts, every socket but socket pairs, with EACCES.

    A seccomp filter; it needs no privilege. Raises OSError where the kernel or the machine offers none.
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


def _begin(folder: str, write_errors: int, descriptors: tuple[int, ...]) -> None:
    """Turn the forked copy of the keeper into a process of its own."""
    keeper = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_END_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    for standard, source in ((0, null), (1, null), (2, write_errors)):
        os.dup2(source, standard)
    lowest = 3
    for descriptor in sorted(descriptors):
        os.closerange(lowest, descriptor)
        os.set_inheritable(descriptor, False)
        lowest = descriptor + 1
    os.closerange(lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(folder)
    tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if os.getppid() != keeper:
        os._exit(0)


def _reap(statuses: dict[int, int], options: int) -> bool:
    """Take the statuses of processes that have ended; false when none is left."""
    try:
        while (ended := os.waitpid(-1, options))[0]:
            statuses[ended[0]] = ended[1]
            options = os.WNOHANG
    except ChildProcessError:
        return False
    return True


def _kill_tree(statuses: dict[int, int]) -> None:
    """Kill until none is left: what has lost its parent becomes the keeper's child, and is found the next time."""
    while True:
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if not _reap(statuses, 0):
            return
