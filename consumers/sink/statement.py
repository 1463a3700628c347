"""Which statements the read-only endpoint runs: one query that reads tables of the engine, and nothing else.

ClickHouse's `readonly = 1` refuses writes, definitions and most table functions. It lets through what reads or writes
files and processes by other ways: the `file` function, `INTO OUTFILE`, `DESCRIBE` of a table function, `KILL`. What is
judged here is the statement as the engine's own parser printed it (`formatQuerySingleLine`), and that same text is
run, so that comments, quoting and heredocs cannot hide a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

READONLY_CODE = 164
"""ClickHouse's READONLY."""

READING = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "EXPLAIN", "EXISTS"})
HARMLESS_TABLE_FUNCTIONS = frozenset(
    {"format", "fuzzjson", "generaterandom", "generateseries", "generate_series", "null", "numbers", "numbers_mt"}
    | {"primes", "sqlstandardvalues", "values", "view", "viewexplain", "zeros", "zeros_mt"}
)
"""Table functions that make rows from their arguments alone. Every other one the engine knows is refused."""
REACHING_FUNCTIONS = frozenset({"file", "hascolumnintable", "catboostevaluate"})
"""Ordinary functions that read a file or ask another host."""

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r", "\0": r"\0"})
_TOKEN = re.compile(r"'(?:[^'\\]|\\.|'')*'|`(?:[^`\\]|\\.|``)*`|\"(?:[^\"\\]|\\.)*\"|\w+|\S", re.DOTALL)


class Refused(ValueError):
    """A statement that the read-only endpoint does not run; the message says which part and what to do instead."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that may be run."""

    sql: str
    format: str
    """Its FORMAT clause; empty without one."""

    def with_format(self, name: str) -> str:
        """The statement with another FORMAT clause."""
        if not self.format:
            return f"{self.sql} FORMAT {name}"
        head, _clause, tail = self.sql.rpartition(f"FORMAT {self.format}")
        return f"{head}FORMAT {name}{tail}"


def escaped(value: str) -> str:
    """A query parameter's value in ClickHouse's own escaping."""
    return value.translate(_ESCAPES)


def tokens(sql: str) -> list[str]:
    """Strings, quoted names, words and single signs of a statement without comments."""
    return _TOKEN.findall(sql)


def _has_phrase(parts: list[str], first: str, second: str) -> bool:
    upper = [part.upper() for part in parts]
    return (first, second) in pairwise(upper)


def refused_functions(table_functions: Iterable[str]) -> frozenset[str]:
    """Names that may not be called, in lower case, given the engine's table functions."""
    return (frozenset(name.lower() for name in table_functions) - HARMLESS_TABLE_FUNCTIONS) | REACHING_FUNCTIONS


def check(normalized: str, refused: frozenset[str]) -> Statement:
    """A statement, as the engine's parser prints it, if it only reads the engine's tables. Raises Refused."""
    parts = tokens(normalized)
    verb = next((part.upper() for part in parts if part != "("), "")
    if verb not in READING:
        raise Refused(f"{verb}: this endpoint is read-only and answers {', '.join(sorted(READING))}")
    if _has_phrase(parts, "INTO", "OUTFILE"):
        raise Refused("INTO OUTFILE: this endpoint writes no files; redirect the answer instead")
    if _has_phrase(parts, "PARALLEL", "WITH"):
        raise Refused("PARALLEL WITH: only one statement per request")
    called = (word for word, following in pairwise(parts) if following == "(" and word[0] != "'")
    for name in (word.strip('`"').lower() for word in called):
        if name in refused or name.startswith("ai"):
            raise Refused(f"{name}(): this endpoint reads its own tables only, no files, hosts or processes")
    formats = [name for word, name in pairwise(parts) if word == "FORMAT" and re.fullmatch(r"\w+", name)]
    return Statement(normalized, formats[-1] if formats else "")
