"""Children end with their parent, are stopped in groups, and are reported when they end early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from tidemill.compose.processes import Supervisor


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_role_that_fails_is_reported_with_its_log(tmp_path: Path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("bad", ["no such thing"], program=("-c", "import sys; sys.exit(sys.argv[1])"))
        with pytest.raises(RuntimeError, match=r"(?s)bad ended with status 1.*no such thing"):
            until(supervisor.check)


def test_only_some_roles_may_end_with_success(tmp_path: Path):
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("help", [], program=("-c", ""))
        until(lambda: role.process.poll() is not None)
        supervisor.check(may_end=["help"])
        assert supervisor.ended("help")
        with pytest.raises(RuntimeError, match="ended early"):
            supervisor.check()


RECORDED = "import sys, time; print('life', flush=True); {body}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_role_is_started_again_and_reported(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tidemill.compose.processes.FIRST_PAUSE_S", 0.05)
    told: list[str] = []
    pids: list[int] = []
    with Supervisor(tmp_path, restarted=told.append, started=pids.append) as supervisor:
        role = supervisor.start("role", [], program=("-c", RECORDED.format(body="time.sleep(600)")))
        for life in (1, 2):
            until(lambda life=life: role.log.read_text().count("life") == life)
            os.kill(pids[-1], number)
            until(lambda life=life: supervisor.check() or len(pids) > life)
        until(lambda: role.log.read_text().count("life") == 3)
        assert not supervisor.ended("role")
    assert told == [
        f"role was killed by {number.name}: it is started again in {pause} s; its log is {role.log}"
        for pause in ("0.05", "0.1")
    ]
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("code", [0, 1])
def test_a_role_that_ends_after_each_start_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    monkeypatch.setattr("tidemill.compose.processes.FIRST_PAUSE_S", 0.01)
    told: list[str] = []
    body = f"print('no such thing'); sys.exit({code})"
    with Supervisor(tmp_path, restarted=told.append) as supervisor:
        role = supervisor.start("bad", [], program=("-c", RECORDED.format(body=body)))
        with pytest.raises(RuntimeError, match=rf"(?s)after 4 starts in a row.* status {code};.*no such thing"):
            until(supervisor.check)
    assert len(told) == 3 and role.log.read_text().count("life") == 4


def test_a_role_whose_work_is_done_is_not_started_again(tmp_path: Path):
    told: list[str] = []
    with Supervisor(tmp_path, restarted=told.append) as supervisor:
        role = supervisor.start("done", [], program=("-c", ""))
        until(lambda: role.process.poll() is not None)
        supervisor.check(may_end=["done"])
        assert supervisor.ended("done") and not told


GUARDED = """
import sys, time
from pathlib import Path
from tidemill.compose import processes
from tidemill.compose.processes import ChildGuard
processes.GRACE_S = 0.1  # no role here ends by itself
with ChildGuard(Path(sys.argv[1]) / "stack", processes.GRACE_S) as guard:
    print(guard._process.pid, flush=True)
    with processes.Supervisor(Path(sys.argv[1]), started=guard.watch) as supervisor:
        # It heeds no signal of the kernel's on the death of its parent.
        program = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, lambda *_: None);" \
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(child.pid);" \
            "sys.stdout.flush(); time.sleep(600)"
        role = supervisor.start("role", [], program=("-c", program))
        while not role.log.read_text().strip():
            time.sleep(0.01)
        print(role.process.pid, int(role.log.read_text()), flush=True)
        if sys.argv[2] == "killed":
            time.sleep(600)
        if sys.argv[2] == "interrupted":
            supervisor.stop = lambda *_names, **_options: sys.exit(3)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("killed", -signal.SIGKILL), ("interrupted", 3), ("ended", 0)], ids=lambda value: str(value)
)
def test_a_guard_ends_the_processes_of_a_command_that_cannot(tmp_path: Path, end: str, status: int):
    """A command can be killed, or interrupted a second time while it waits for the end of its roles."""
    parent = subprocess.Popen([sys.executable, "-c", GUARDED, str(tmp_path), end], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    role, child = map(int, parent.stdout.readline().split())
    if end == "killed":
        parent.kill()
    assert parent.wait(180) == status
    until(lambda: not any(map(alive, (role, child, guard))), "nobody outlives the command")


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_stopping_kills_stubborn_roles_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN, "utf-8")
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n", "utf-8")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    with Supervisor(tmp_path / "logs") as supervisor:
        role = supervisor.start("stubborn", [])
        until(lambda: role.log.read_text().strip() != "")
        grandchild = int(role.log.read_text())
        supervisor.stop("stubborn", grace_s=0.2)
    until(lambda: not alive(role.process.pid) and not alive(grandchild))


TOGETHER = """
import signal, sys, time
from pathlib import Path
directory, name = Path(sys.argv[1]), sys.argv[2]
def asked(*_):
    (directory / f"{name}.asked").touch()
    while len(list(directory.glob("*.asked"))) < 2:
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
(directory / f"{name}.ready").touch()
while True:
    time.sleep(600)
"""


def test_all_roles_are_asked_to_end_before_any_is_waited_for(tmp_path: Path):
    """Each role ends only when both have been asked: if they were stopped one by one, the first would be killed."""
    with Supervisor(tmp_path / "logs") as supervisor:
        roles = [supervisor.start(name, [str(tmp_path), name], program=["-c", TOGETHER]) for name in ("one", "two")]
        until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    assert [role.process.returncode for role in roles] == [0, 0]


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from tidemill.compose.processes import Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)
with Supervisor(Path(sys.argv[1])) as supervisor:
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        supervisor.start("role", ["--help"])
    except KeyboardInterrupt:
        supervisor.check(may_end=["role"])
        print("interrupted", flush=True)
"""


def test_an_interrupt_while_a_role_is_being_started_is_not_lost(tmp_path: Path):
    """Python swallows what a handler raises while it forks."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "interrupted\n", done.stderr


PARENT = """
import sys, time
from pathlib import Path
from tidemill.compose import processes
supervisor = processes.Supervisor(Path(sys.argv[1]))
sys.executable = sys.argv[2]
print(supervisor.start("child", []).process.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_no_child(tmp_path: Path):
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nexec sleep 600\n", "utf-8")
    launcher.chmod(0o755)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "logs"), str(launcher)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child))


KILLED_WHILE_IT_FORKS = """
import os, signal, sys, time
from pathlib import Path
from tidemill.compose import processes

def child():
    parent = os.getppid()
    Path(sys.argv[1], "child").write_text(str(os.getpid()), "utf-8")
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)

os.register_at_fork(after_in_child=child)
processes.Supervisor(Path(sys.argv[1])).start("child", ["import time; time.sleep(600)"], program=["-c"])
"""


def test_a_parent_that_is_killed_while_it_starts_a_child_leaves_none(tmp_path: Path):
    """The kernel does not report a death that happened before the child registered for it."""
    parent = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_FORKS, str(tmp_path)], timeout=300, check=False)
    assert parent.returncode == -signal.SIGKILL
    until(lambda: not alive(int((tmp_path / "child").read_text("utf-8"))))


@pytest.mark.parametrize("module", ["typer", "pydantic_settings"])
def test_an_interrupt_during_the_imports_ends_a_command_without_a_traceback(tmp_path: Path, module: str):
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tidemill", "topics"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
