"""Settings of the ClickHouse sink: which engine, how much a flush holds, and where it is served."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, SecretStr

from tidemill.schemas.config import HttpSettings, Section

FLUSH_BYTES = 16 * 2**20


class TableEngine(StrEnum):
    """Engine of the record tables. The sink writes each record once into either."""

    MERGE_TREE = "MergeTree"
    """One writer per partition, exact by its watermarks."""
    REPLACING = "ReplacingMergeTree"
    """Merges rows of equal position: a second guard where several writers may overlap; exact with FINAL."""


class MergeSettings(Section):
    """The limits of a merge of a table's parts. ClickHouse expects many small rows; the sink's are trajectories,
    large long before they are many. Existing tables are changed to these."""

    vertical_rows: int = Field(default=1, ge=1)
    """Rows from which a merge of a table with many columns takes one column after the other, so that it holds the
    buffers of one and not of all (`vertical_merge_algorithm_min_rows_to_activate`)."""

    block_bytes: int = Field(default=2**20, ge=2**16)
    """Bytes of each part that are read at a time (`merge_max_block_size_bytes`)."""

    parts: int = Field(default=10, ge=2)
    """Parts that are merged into one at most (`max_parts_to_merge_at_once`)."""

    at_once: int = Field(default=2, ge=1)
    """Merges that the embedded engine runs at once, and as many deletions. A server has settings of its own."""


class SinkSettings(Section):
    """The ClickHouse sink."""

    path: str = "data/clickhouse"
    """Directory of the embedded engine (chDB), owned by one process at a time, and of the sink's state file."""

    host: str = ""
    """Address of a ClickHouse server. Empty: the embedded engine at `path`."""

    port: int = Field(default=8123, ge=1, le=65535)
    """HTTP port of the ClickHouse server."""

    user: str = "default"
    """User of the ClickHouse server."""

    password: SecretStr = SecretStr("")
    """Password of the ClickHouse server; better given by the environment than in a file."""

    secure: bool = False
    """Reach the ClickHouse server by HTTPS."""

    database: str = Field(default="tidemill", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Database of the tables; created when it does not exist."""

    table_engine: TableEngine = TableEngine.MERGE_TREE
    """Engine of tables that the sink creates; existing tables keep theirs."""

    http_port: int = Field(default=8123, ge=0, le=65535)
    """Loopback port where the embedded engine answers ClickHouse's HTTP protocol, read-only. 0: a free one, named in
    the log line and in the state file. Unused with a server, which answers for itself."""

    http: HttpSettings = HttpSettings()
    """Limits of the embedded engine's endpoint on clients' connections."""

    merges: MergeSettings = MergeSettings()
    """How the parts of the tables are merged."""

    cache_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Most memory of each of the embedded engine's caches of marks and of primary indexes, which queries and merges
    fill. A server has settings of its own."""

    keep_freed_ms: int = Field(default=1_000, ge=0)
    """Milliseconds for which the embedded engine keeps freed memory before it returns it to the system. With 0, each
    buffer of an insert is mapped anew, which takes a fifth more CPU. The environment's JE_MALLOC_CONF wins. Unused with
    a server."""

    accept_gaps: bool = False
    """Go on where the log deleted records before the sink had read them, and enter what is missing in the table
    `sink_gaps`. Else the sink ends and says so."""

    flush_rows: int = Field(default=4000, ge=1)
    """Rows that one flush holds at most; ClickHouse wants few large inserts."""

    flush_bytes: int = Field(default=FLUSH_BYTES, ge=2**16)
    """Bytes of record values that one insert holds at most, a longer record aside, and at which a flush is due. An
    insert takes several times as much memory while it lasts."""

    flush_seconds: float = Field(default=1.0, gt=0)
    """Age in seconds at which a smaller batch is flushed all the same."""

    query_seconds: float = Field(default=60.0, gt=0)
    """Longest a query over HTTP may run, in seconds."""

    query_memory_bytes: int = Field(default=2 * 2**30, ge=2**20)
    """Most memory a query over HTTP may take."""

    result_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Largest uncompressed result of a query over HTTP."""

    query_threads: int = Field(default=4, ge=1)
    """Queries over HTTP that run at once; further ones wait."""

    @property
    def embedded(self) -> bool:
        return not self.host

    @property
    def server_url(self) -> str:
        """Where a ClickHouse server answers; without one, see the state file of the sink (`query.read_state`)."""
        return f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"

    @property
    def directory(self) -> Path:
        """`path`, absolute, with links resolved: the engine compares paths literally."""
        return Path(self.path).expanduser().resolve()
