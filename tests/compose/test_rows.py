"""Rows on a terminal, in a pipe, as JSON and as CSV, and the commands that print them."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from tests.consumers.product_support import product_run
from tests.consumers.sink_support import rows_of, step
from tests.records import build
from tidemill.compose.cli import app, main
from tidemill.compose.cli.gate_command import print_decisions, print_status
from tidemill.compose.cli.replay_copy import carry_out
from tidemill.compose.cli.weights_command import print_chain
from tidemill.compose.output import print_document, print_rows, utc
from tidemill.compose.stack.kafka import NodeState, NodeStatus, StackStatus
from tidemill.consumers.operate.audit.audit import AuditReport
from tidemill.consumers.operate.audit.endings import CheckResult, Finding
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.writer import Writer
from tidemill.producers.environments.base import Score, TaskDraft
from tidemill.producers.environments.check import ScriptedPolicy
from tidemill.producers.environments.ledger import LedgerEnvironment
from tidemill.schemas.log.admin import TopicState
from tidemill.schemas.records import GateDecision, GateVerdict, RewardComponent, Task
from tidemill.streams.gate.controller import Snapshot

COLORS = re.compile(r"\x1b\[[0-9;]*m")
NASTY = 'a tab\there,\na line, a \\ and a "quote"'
ACCOUNT = [
    "arm", "served", "rewards", "excluded", "open", "corrections", "carried_a_reward", "batched", "batched_twice",
    "batched_and_erased", "dropped", "waiting", "trained", "left_out", "outcome_without_interaction",
]  # fmt: skip


def terminal_of_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Make this process's output that of a terminal of a width."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal(monkeypatch, capsys) -> Callable[..., list[str]]:
    """Print rows on a terminal of a width; return the visible lines."""

    def shown(width: int, *arguments: Any, **options: Any) -> list[str]:
        terminal_of_width(monkeypatch, width)
        print_rows(*arguments, **options)
        return COLORS.sub("", capsys.readouterr().out).splitlines()

    return shown


def lines_on_terminal(width: int, *arguments: str) -> list[str]:
    """Return the output of a command on a real terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    said = b""
    with subprocess.Popen(
        [sys.executable, "-m", "tidemill", *arguments],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**environment, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(theirs)
        # On Linux, reading a terminal whose other end is closed is an error, not an end of file.
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:
            pass
        finally:
            os.close(ours)
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    return COLORS.sub("", said.decode()).splitlines()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_of(*arguments: object) -> Any:
    """Return the document that a command prints with `--json`."""
    return json.loads(run(*arguments, "--json").stdout)


def csv_of(*arguments: object) -> list[dict[str, str]]:
    """Return the records that a command prints with `--csv`."""
    return rows_in(run(*arguments, "--csv").stdout_bytes)


def rows_in(csv_text: bytes) -> list[dict[str, str]]:
    """Return the records of a CSV text, which must follow RFC 4180."""
    text = csv_text.decode()
    assert text.endswith("\r\n")
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """A directory with the sink's tables of a run that learns from users."""
    sink = SinkSettings(path=str(tmp_path_factory.mktemp("tables")), http_port=0)
    client = connect(sink)
    Writer(client, sink.database, sink.table_engine).write(rows_of(product_run()), {})
    client.close()
    return Path(sink.path)


# Output formats.


def test_fifteen_columns_at_eighty_are_shown_downwards(terminal):
    values = [[f"value-{row}-{column}" for column in range(15)] for row in range(2)]
    lines = terminal(80, ACCOUNT, values)
    width = max(map(len, ACCOUNT)) + 2
    one, two = ([f"{head:<{width}}{value}" for head, value in zip(ACCOUNT, row, strict=True)] for row in values)
    assert lines == [*one, "", *two]


@pytest.mark.parametrize("width", range(12, 130, 7))
def test_names_and_words_are_never_broken_on_a_terminal(terminal, width):
    heads = ("name", "a_long_name_of_a_column", "reason")
    rows = [("alpha", 1, "it repeats itself, and says so at length, again and again"), ("beta-" * 4, 22, "short")]
    lines = terminal(width, heads, rows)
    words = " ".join(lines).split()
    for value in (*heads, *(str(value) for row in rows for value in row)):
        assert all(word in words for word in value.split())
    if not lines[0].startswith("name  " + " " * 19 + "alpha"):
        assert max(map(cell_len, lines)) <= width


def test_columns_that_fit_are_a_table_and_text_is_folded_no_narrower_than_can_be_read(terminal):
    rows = [("a", 7, "one two three four five six seven"), ("bb", 1234567, "eight")]
    formats = {"number": ","}
    assert terminal(80, ("key", "number", "text"), rows, formats=formats) == [
        "key     number  text                             ",
        "a            7  one two three four five six seven",
        "bb   1,234,567  eight                            ",
    ]
    folded = terminal(36, ("key", "number", "text"), rows, formats=formats)
    assert [line.rstrip() for line in folded] == [
        "key     number  text",
        "a            7  one two three four",
        "                five six seven",
        "bb   1,234,567  eight",
    ]
    assert terminal(35, ("key", "number", "text"), rows, formats=formats)[0] == "key     a"


def test_an_address_within_a_text_may_be_folded_but_a_name_may_not(terminal):
    address = "https://example.com/" + "x" * 60
    rows = [("one", f"see {address} for more"), ("two", "short")]
    lines = terminal(50, ("name", "about"), rows)
    assert lines[0].split() == ["name", "about"] and max(map(cell_len, lines)) <= 50
    assert address in "".join(line[6:].strip() for line in lines)
    assert terminal(50, ("name", "about"), [*rows, ("x" * 40, "short")])[0].startswith("name   one")


def test_one_row_is_a_table_only_where_it_fits_whole(terminal):
    row = [("promote", "better in every way that was measured", 3)]
    whole = terminal(60, ("verdict", "reason", "version"), row)
    assert len(whole) == 2 and whole[0].split() == ["verdict", "reason", "version"]
    assert terminal(50, ("verdict", "reason", "version"), row) == [
        "verdict  promote",
        "reason   better in every way that was measured",
        "version  3",
    ]


def test_a_long_value_is_whole_and_its_lines_are_below_each_other(terminal):
    lines = terminal(40, ("text", "n"), [("x" * 100 + "\nsecond", None)])
    assert lines == ["text  " + "x" * 100, "      second", "n     "]


def test_foreign_text_does_not_control_the_terminal(terminal, capsys):
    lines = terminal(80, ("text", "more"), [("[red]\x1b[2J\x07\r", "\ta")])
    assert lines[1].split() == [r"[red]\x1b[2J\x07\x0d", "a"]
    print_document({}, ["[red]\x1b[2J", "two"], as_json=False)
    assert capsys.readouterr().out == "[red]\\x1b[2J\ntwo\n"


def test_wide_characters_are_counted_as_they_are_drawn(terminal):
    lines = terminal(80, ("text", "n"), [("潮汐", 1), ("ab", 2)])
    assert [cell_len(line) for line in lines] == [7, 7, 7]


def test_a_pipe_gets_whole_rows_that_clickhouse_reads(capsys):
    heads = ("text", "number", "nothing", "yes", "list", "long")
    values = [NASTY, 1e-5, None, True, ["a\tb", 1], "word " * 100]
    print_rows(heads, [values])
    header, row, rest = capsys.readouterr().out.split("\n")
    assert header == "\t".join(heads) and rest == ""
    cells = row.split("\t")
    assert cells[0] == 'a tab\\there,\\na line, a \\\\ and a "quote"'
    assert cells[1:4] == ["1e-05", r"\N", "true"] and cells[5] == "word " * 100
    import chdb

    structure = "text String, number Float64, nothing Nullable(Int64), yes Bool, list String, long String"
    source = row.replace("\\", "\\\\").replace("'", "\\'")
    read = chdb.query(f"SELECT * FROM format(TSV, '{structure}', '{source}')", "JSONCompact")
    (found,) = json.loads(read.data())["data"]
    assert found[:4] == values[:4] and json.loads(found[4]) == values[4] and found[5] == values[5]


def test_json_keeps_the_types(capsys):
    values = [NASTY, 7, 0.5, None, False, ["a", 1], {"b": 2.0}]
    heads = list("abcdefg")
    print_rows(heads, [values, values], as_json=True)
    assert json.loads(capsys.readouterr().out) == [dict(zip(heads, values, strict=True))] * 2


def test_json_has_null_in_place_of_nan_and_infinity(capsys):
    """JSON has no such numbers, and most parsers refuse them."""
    report = AuditReport("run", (), {}, {}, {"rate": math.nan}, {}, 0, {})
    found = {"nan": math.nan, "list": [1.5, -math.inf], "report": report, "bytes": b"\x01", "path": Path("a")}
    print_document(found, [], as_json=True)
    read = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (read["nan"], read["list"], read["report"]["counts"]) == (None, [1.5, None], {"rate": None})
    assert (read["bytes"], read["path"]) == ("01", "a")
    print_rows(("list",), [([math.nan],)])
    assert capsys.readouterr().out == "list\n[null]\n"


def test_csv_follows_the_standard(capsysbinary):
    print_rows(("text", "number", "nothing", "map"), [(NASTY, 12345, None, {"a": 1})], as_csv=True)
    out = capsysbinary.readouterr().out
    assert out.startswith(b"text,number,nothing,map\r\n")
    assert rows_in(out) == [{"text": NASTY, "number": "12345", "nothing": "", "map": '{"a": 1}'}]


def test_without_rows_there_is_a_header(capsysbinary):
    for options, out in (({}, b"a\tb\n"), ({"as_csv": True}, b"a,b\r\n"), ({"as_json": True}, b"[]\n")):
        print_rows(("a", "b"), [], **options)
        assert capsysbinary.readouterr().out == out


def test_without_rows_a_terminal_says_so(terminal):
    assert terminal(80, ACCOUNT, []) == ["no rows"]


# The commands.


def test_a_query_of_fifteen_columns_can_be_read_at_eighty(tables):
    found = json_of("query", "online_accounting", "--data-dir", tables)
    assert len(found) == 1 and len(found[0]) >= 15
    lines = lines_on_terminal(80, "query", "online_accounting", "--data-dir", str(tables))
    assert [line.split() for line in lines] == [[name, str(value)] for name, value in found[0].items()]


def test_a_description_names_every_column_whole(tables, monkeypatch, capsys):
    asked = ("query", "DESCRIBE rollouts", "--data-dir", str(tables))
    found = json_of(*asked)
    terminal_of_width(monkeypatch, 80)
    monkeypatch.setattr("sys.argv", ["tidemill", *asked])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert {row["name"] for row in found} <= set(COLORS.sub("", capsys.readouterr().out).split())


def test_a_query_in_a_pipe_is_whole(tables):
    sql = "SELECT repeat('long ', 100) AS text, toUInt8(7) AS n, [1, 2] AS list, true AS yes"
    piped = run("query", sql, "--data-dir", tables)
    assert piped.stdout == "text\tn\tlist\tyes\n" + "long " * 100 + "\t7\t[1, 2]\ttrue\n"
    assert json_of("query", sql, "--data-dir", tables) == [{"text": "long " * 100, "n": 7, "list": [1, 2], "yes": True}]
    (row,) = csv_of("query", sql, "--data-dir", tables)
    assert row == {"text": "long " * 100, "n": "7", "list": "[1, 2]", "yes": "true"}


def test_a_query_with_a_format_of_its_own_is_printed_as_it_is(tables):
    sql = "SELECT 1 AS a, 'b\tc' AS d FORMAT CSVWithNames"
    assert run("query", sql, "--data-dir", tables).stdout == '"a","d"\n1,"b\tc"\n'


def test_the_names_of_queries_are_listed():
    names = json_of("query", "--list")
    assert csv_of("query", "--list") == [{"query": name, "answers": question} for name, question in names.items()]
    piped = [line.split("\t") for line in run("query", "--list").stdout.splitlines()]
    assert piped[0] == ["query", "answers"] and dict(piped[1:]) == names


def test_environments_are_listed_shown_and_checked():
    listed = json_of("env", "list", "ledger")
    assert [row["name"] for row in listed] == ["ledger"]
    assert [row["name"] for row in csv_of("env", "list", "ledger")] == ["ledger"]
    assert run("env", "list", "ledger").stdout.splitlines()[0] == "name\tabout"
    options = json_of("env", "show", "ledger")["options"]
    assert [row["name"] for row in csv_of("env", "show", "ledger")] == [option["name"] for option in options]
    assert "name\ttype\tvalue\tmeaning\n" in run("env", "show", "ledger").stdout
    clauses = json_of("env", "check", "ledger")
    checked = run("env", "check", "ledger", "--csv")
    assert [(row["name"], row["ok"]) for row in rows_in(checked.stdout_bytes)] == [
        (clause["name"], "true") for clause in clauses
    ]


def test_an_environment_without_a_task_is_reported(monkeypatch):
    monkeypatch.setattr(LedgerEnvironment, "tasks", lambda *_: iter(()))
    assert "environment ledger gives no task" in str(run("env", "show", "ledger").exception)
    monkeypatch.setattr(LedgerEnvironment, "tasks", lambda *_: iter([TaskDraft("three", asks="?")]))
    assert "no JSON document: 'three'" in str(run("env", "show", "ledger").exception)


def test_an_unknown_family_of_environments_is_reported():
    assert "no environment or family 'nobody_has_this'" in str(run("env", "list", "nobody_has_this").exception)


def test_the_rewards_of_tried_episodes_are_rows(monkeypatch):
    class Silent:
        """A model that says nothing."""

        async def __aenter__(self) -> Silent:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        def policy(self, task: Task) -> ScriptedPolicy:
            return ScriptedPolicy([""], task.max_turns)

    monkeypatch.setattr("tidemill.compose.cli.env_policies.EndpointModel", lambda *_: Silent())
    tried = ("env", "try", "ledger", "--endpoint", "http://127.0.0.1:9", "--n", "2")
    documents = json_of(*tried)
    rows = csv_of(*tried)
    assert [float(row["reward"]) for row in rows] == [episode["reward"] for episode in documents]
    assert [json.loads(row["rewards"]) for row in rows] == [episode["rewards"] for episode in documents]
    monkeypatch.setattr(Silent, "policy", lambda _self, _task: ScriptedPolicy([""], 0))
    none = run(*tried)
    assert none.exit_code == 1 and none.stdout.endswith("0 of 2 solved, 2 failed\n")

    async def unasked(*_given: object) -> Score:
        return Score((RewardComponent("solved", 1.0, 1.0),), success=True)

    monkeypatch.setattr(LedgerEnvironment, "play", unasked)
    none = run(*tried)
    assert none.exit_code == 1 and "failed: EnvironmentFailed: the policy was never called" in none.stdout


def test_topics_are_listed(monkeypatch):
    states = [TopicState("t.rollouts", 6, []), TopicState("t.groups", 3, ["3 partitions, not 6", "retention"])]
    monkeypatch.setattr("tidemill.compose.cli.log_commands.with_reachable_log", lambda settings: settings)
    monkeypatch.setattr("tidemill.compose.cli.log_commands.check_topics", lambda _kafka: states)
    listed = run("topics", "--csv")
    assert listed.exit_code == 1
    assert rows_in(listed.stdout_bytes) == [
        {"topic": "t.rollouts", "partitions": "6", "state": "as declared"},
        {"topic": "t.groups", "partitions": "3", "state": "3 partitions, not 6; retention"},
    ]
    assert run("topics").stdout.splitlines()[1] == "t.rollouts\t6\tas declared"
    assert [topic["partitions"] for topic in json_of("topics")["topics"]] == [6, 3]


def test_an_audit_prints_its_checks_as_rows_and_the_rest_separately(monkeypatch):
    found = Finding("endings", "groups[0]@9: rollout\tr0 is still grouped")
    checks = (CheckResult("chain", "it holds", 0, None), CheckResult("endings", "one each", 1200, found))
    report = AuditReport("tuesday", checks, {"trained": 5}, {}, {"rollouts": 6}, {}, 7000, {"tuesday": 7000})
    monkeypatch.setattr("tidemill.compose.cli.log_commands.with_reachable_log", lambda settings: settings)
    monkeypatch.setattr("tidemill.consumers.operate.audit.audit.audit_log", lambda *_: report)
    piped = run("audit")
    assert piped.exit_code == 1
    told = str(found).replace("\t", "\\t")
    assert piped.stdout.splitlines() == [
        "check\tpassed\toffenders\tfirst_offender",
        "chain\ttrue\t0\t\\N",
        f"endings\tfalse\t1200\t{told}",
    ]
    assert "rollouts: 5 trained" in piped.stderr and "repeated: nothing" in piped.stderr
    assert f"NOT SOUND, 1 of 2 checks failed. First offender (endings): {found}" in piped.stderr
    assert [row["first_offender"] for row in csv_of("audit")] == ["", str(found)]
    assert json_of("audit")["checks"][1]["offenders"] == 1200


def test_a_missing_stack_is_reported_next_to_an_empty_table(tmp_path):
    listed = run("stack", "status", "--data-dir", tmp_path, "--csv")
    assert (listed.exit_code, listed.stdout_bytes) == (1, b"broker,state,pid,address,log\r\n")
    assert "`tidemill stack up` makes one" in listed.stderr
    assert run("stack", "status", "--data-dir", tmp_path).stdout == ""


def test_the_brokers_of_a_stack_are_rows(monkeypatch, tmp_path):
    nodes = (NodeStatus(1, NodeState.READY, 42, "127.0.0.1:9092", "a.log"),
             NodeStatus(2, NodeState.DEAD, None, "127.0.0.1:9094", "b.log"))  # fmt: skip
    found = StackStatus(str(tmp_path), "127.0.0.1:9092", nodes)
    monkeypatch.setattr(
        "tidemill.compose.cli.stack_commands.LocalStack", lambda _: SimpleNamespace(status=lambda: found)
    )
    piped = run("stack", "status")
    assert piped.stdout == (
        "broker\tstate\tpid\taddress\tlog\n1\tready\t42\t127.0.0.1:9092\ta.log\n2\tdead\t\\N\t127.0.0.1:9094\tb.log\n"
    )
    assert piped.stderr == f"not ready at 127.0.0.1:9092 ({tmp_path})\n"
    assert [row["pid"] for row in csv_of("stack", "status")] == ["42", ""]


VERSION = dict(
    version=1, parent=0, step=1, learning_rate=1e-5, n_elements=1000, n_changed=12, density=0.012, delta_bytes=12345,
    bytes_per_changed=1028.75, shards=1, anchor=None, skips=[], proved_by=["replica-0", "replica-1"], refused_by={},
    decisions=[], expired=False, fork="", fingerprint="f" * 32, published_at=0, serving_format="",
    serving_activations="",
)  # fmt: skip


def test_the_chain_can_be_read_on_a_wide_and_on_a_narrow_terminal(monkeypatch, capsys):
    first = VERSION | {"version": 0, "parent": None, "anchor": "file:///a", "bytes_per_changed": None, "delta_bytes": 0}
    shown = {}
    for width in (80, 140):
        terminal_of_width(monkeypatch, width)
        print_chain([first, VERSION], 1, False)
        shown[width] = COLORS.sub("", capsys.readouterr().out).splitlines()
    assert len(shown[140]) == 3
    assert shown[140][2].split() == ["1", "0", "1", "1e-05", "1.200%", "12,345", "1028.750", "false",
                                     "replica-0,", "replica-1", "head"]  # fmt: skip
    assert shown[80][-2:] == ["proved_by      replica-0, replica-1", "remarks        head"]
    assert shown[80][12] == "version        1"


def decided(version: int | None) -> GateDecision:
    return build(GateDecision, verdict=GateVerdict.HOLD, version=version, reason="a launch\ttoday", numbers={"p": 0.5},
                 at=1_000_000)  # fmt: skip


def test_the_gates_decisions_are_rows(capsysbinary):
    print_decisions([decided(3), decided(None)], as_csv=True)
    rows = rows_in(capsysbinary.readouterr().out)
    assert [(row["version"], row["reason"]) for row in rows] == [("3", "a launch\ttoday"), ("", "a launch\ttoday")]
    numbers = {"canary/reward": 0.123456789, "stable/reward": 0.5, "share": 0.1}
    snapshot = Snapshot("run", "main", 0, "bench", 4, 3, 4, True, None, None, numbers, [decided(3)], {"a": 3})
    print_status(snapshot)
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[2:6] == ["measure\tcanary\tstable", "reward\t0.123456789\t0.5", "share\t0.1\t\\N", "a serves 3"]
    assert lines[6:] == ["decided_at\tverdict\tversion\tby\treason",
                         "1970-01-01 00:00:01\thold\t3\tada\ta launch\\ttoday"]  # fmt: skip


def letter(offset: int, reason: str) -> Any:
    return SimpleNamespace(
        source=("rollouts", 0), origin=f"rollouts[0]@{offset}", reason=reason, found_by="assembly",
        name=f"rollouts.dlq/0/{offset}", order=(17, 0, offset),
        raw=SimpleNamespace(timestamp_ms=1000 * offset, n_bytes=10),
    )  # fmt: skip


def test_dead_letters_are_listed_and_judged(monkeypatch):
    letters = [letter(1, "unknown framing"), letter(2, "unknown framing"), letter(3, "a\nb")]
    verdicts = [
        SimpleNamespace(letter=letters[0], record=None, attempts=1, why_not="unknown framing"),
        SimpleNamespace(letter=letters[1], record=decided(3), attempts=2, why_not=""),
    ]

    @contextmanager
    def opened(_settings: object) -> Iterator[Any]:
        yield SimpleNamespace(read=lambda _topics: letters, judge=lambda *_: verdicts, send_back=len)

    monkeypatch.setattr("tidemill.compose.cli.dead_letters_command._dead_letters", opened)
    listed = csv_of("dead-letters", "list")
    assert [(row["letters"], row["reason"], row["found_by"]) for row in listed] == [
        ("2", "unknown framing", '["assembly"]'), ("1", "a\nb", '["assembly"]')
    ]  # fmt: skip
    documents = json_of("dead-letters", "list")
    assert documents[0]["letters"] == 2 and documents[0]["found_by"] == ["assembly"]
    assert documents[0]["example"] == "rollouts.dlq/0/2"
    assert "\ta\\nb\t1\t" in run("dead-letters", "list").stdout
    redriven = run("dead-letters", "redrive", "--topic", "rollouts", "--csv")
    assert [(row["goes_back"], row["record"], row["why_not"]) for row in rows_in(redriven.stdout_bytes)] == [
        ("false", "", "unknown framing"), ("true", "GateDecision", "")
    ]  # fmt: skip
    assert redriven.stderr == "nothing was written: --yes sends 1 back\n"


def test_dead_letters_are_counted_without_keeping_them(monkeypatch):
    """A topic of dead letters may be larger than memory, and its partitions arrive interleaved."""

    class Letter(SimpleNamespace):
        __hash__ = object.__hash__

    held, most = weakref.WeakSet[Letter](), 0

    def read(_topics: object) -> Iterator[Letter]:
        nonlocal most
        long = [(offset, f"user 'u{offset}' at 1,{offset}: " + "x" * 500 + str(offset)) for offset in (11, 12)]
        for offset, reason in ((7, "torn"), (2, "torn"), (9, "torn"), (1, "unknown framing"), *long):
            one = Letter(**vars(letter(offset, reason)))
            held.add(one)
            yield one
            most = max(most, len(held))

    @contextmanager
    def opened(_settings: object) -> Iterator[Any]:
        yield SimpleNamespace(read=read)

    monkeypatch.setattr("tidemill.compose.cli.dead_letters_command._dead_letters", opened)
    counted = [tuple(row.values()) for row in json.loads(run("dead-letters", "list", "--json").stdout)]
    times = ["1970-01-01T00:00:02.000Z", "1970-01-01T00:00:09.000Z"]
    quoted = ["1970-01-01T00:00:11.000Z", "1970-01-01T00:00:12.000Z"]
    assert counted == [
        ("rollouts", "unknown framing", 1, *["1970-01-01T00:00:01.000Z"] * 2, ["assembly"], "rollouts.dlq/0/1"),
        ("rollouts", "torn", 3, *times, ["assembly"], "rollouts.dlq/0/9"),
        ("rollouts", "user 'u11' at 1,11: " + "x" * 140 + "...", 2, *quoted, ["assembly"], "rollouts.dlq/0/12"),
    ]
    assert most <= 2


def test_more_letters_than_memory_holds_are_not_judged(monkeypatch):
    @contextmanager
    def opened(_settings: object) -> Iterator[Any]:
        read = [letter(1, "torn"), letter(2, "other"), letter(3, "torn")]
        yield SimpleNamespace(read=lambda _topics: read, judge=lambda chosen, *_: [], send_back=len)

    monkeypatch.setattr("tidemill.compose.cli.dead_letters_command._dead_letters", opened)
    monkeypatch.setattr("tidemill.compose.cli.dead_letters_command.MOST_BYTES", 20)
    assert run("dead-letters", "redrive", "--reason", "torn").exit_code == 0
    refused = run("dead-letters", "redrive", "--topic", "rollouts").exception
    assert isinstance(refused, ValueError) and "name fewer, by --topic, --reason or their positions" in str(refused)


def test_a_copy_gives_its_topics(capsysbinary):
    told = {"topic": "t.groups", "first": "2026-01-01", "last": "2026-01-02"}
    lanes = [{**told, "partition": n, "records": n, "n_bytes": 1500 * n} for n in range(2)]
    made = {"source_prefix": "t.", "into": "new.", "lanes": lanes, "records": 1, "undecodable": 0, "missing": 0,
            "references_outside": 2}  # fmt: skip
    replay: Any = SimpleNamespace(prepare=lambda _progress: made)
    options = {"speed": None, "do_it": False, "manifest_file": None}
    carry_out(replay, **options, as_json=False, as_csv=True)
    said = capsysbinary.readouterr()
    assert rows_in(said.out) == [
        {"topic": "groups", "partitions": "2", "filled": "1", "records": "1", "bytes": "1500", "first": "2026-01-01",
         "last": "2026-01-02"}
    ]  # fmt: skip
    assert b"2 references are to records that are not selected" in said.err
    assert b"nothing was written: --yes copies 1 records" in said.err
    carry_out(replay, **options, as_json=True, as_csv=False)
    assert json.loads(capsysbinary.readouterr().out)["records"] == 1


def test_replayed_steps_are_rows(monkeypatch):
    from tidemill.trainer.replay.steps import ReplayedStep
    from tidemill.trainer.step import StepOutcome

    recorded = replace(step(3, [], []), metrics={"reward": 0.5, "loss": 1.0}, learning_rate=1e-5)
    outcome = StepOutcome({"reward": 0.75, "loss": 1.0}, [], 3e-5, 1, 1, None)
    made = ReplayedStep(recorded, recorded.fingerprint, outcome, 1.25)

    class Replay(nullcontext[Any]):
        def __init__(self, *_: object) -> None:
            super().__init__(self)

        def run(self, *_: object, **__: object) -> list[ReplayedStep]:
            return [made]

    monkeypatch.setattr("tidemill.compose.cli.replay_steps.with_reachable_log", lambda settings: settings)
    monkeypatch.setattr("tidemill.trainer.replay.steps.StepReplay", Replay)
    (row,) = csv_of("replay", "steps", "3")
    assert (row["step"], row["recorded"], row["replayed"], row["same"]) == (
        "3", recorded.fingerprint, recorded.fingerprint, "true"
    )  # fmt: skip
    assert "identical: 1 of 1" in run("replay", "steps", "3").stdout
    what_if = ("replay", "steps", "3", "--what-if", "trainer.optimizer.learning_rate=3e-5")
    rows = csv_of(*what_if)
    assert {row["metric"]: (row["recorded"], row["what_if"]) for row in rows} == {
        "learning_rate": ("1e-05", "3e-05"), "reward": ("0.5", "0.75"), "loss": ("1.0", "1.0")
    }  # fmt: skip
    assert run(*what_if).stdout.splitlines()[0].split("\t") == [*rows[0]]


def test_judged_steps_are_rows(monkeypatch):
    from tidemill.trainer.replay.staleness import JudgedStep, MovedGroup

    moved = [MovedGroup("g6", 0, 1, 3, "excluded"), MovedGroup("g7", 0, 2, 0, "included")]
    monkeypatch.setattr("tidemill.compose.cli.replay_steps.with_reachable_log", lambda settings: settings)
    monkeypatch.setattr("tidemill.trainer.history.read_steps", lambda *_: [])
    monkeypatch.setattr("tidemill.trainer.replay.staleness.read_groups", lambda *_: {})
    judged = [JudgedStep(4, 3, None, 2, 0, 3, moved, 0)]
    monkeypatch.setattr("tidemill.trainer.replay.staleness.judge", lambda *_: judged)
    listed = run("replay", "staleness", "--max-policy-lag", "2", "--csv")
    assert listed.exit_code == 1
    assert rows_in(listed.stdout_bytes) == [
        {"step": "4", "version": "3", "bound": "", "trained": "2", "stale": "0", "max_lag": "3",
         "excluded": '["g6"]', "included": '["g7"]', "unknown": "0"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("microseconds", "shown"),
    [(1_700_000_000_999_999, "2023-11-14 22:13:20"), (2**62, f"{2**62} µs"), (-(2**62), f"{-(2**62)} µs")],
)
def test_a_time_that_no_date_has_is_shown_as_a_number(microseconds, shown):
    assert utc(microseconds) == shown
