"""Settings of the ClickHouse sink: its engine, the size of a flush, and its address."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, SecretStr

from tidemill.schemas.config import HttpSettings, Section

FLUSH_BYTES = 16 * 2**20


class TableEngine(StrEnum):
    """Engine of the record tables. With either, the sink writes each record once."""

    MERGE_TREE = "MergeTree"
    """For one writer per partition; exact because of its watermarks."""
    REPLACING = "ReplacingMergeTree"
    """Merges rows of equal position: an additional guard if several writers may overlap; exact with FINAL."""


class MergeSettings(Section):
    """The limits of a merge of a table's parts. ClickHouse expects many small rows; the sink has fewer but large
    rows, since they are trajectories. Existing tables are changed to these limits."""

    vertical_rows: int = Field(default=1, ge=1)
    """Number of rows from which a merge of a table with many columns processes one column after the other, so that it
    holds the buffers of one column instead of all (`vertical_merge_algorithm_min_rows_to_activate`)."""

    block_bytes: int = Field(default=2**20, ge=2**16)
    """Bytes of each part that are read at a time (`merge_max_block_size_bytes`)."""

    parts: int = Field(default=10, ge=2)
    """Maximum number of parts merged into one (`max_parts_to_merge_at_once`)."""

    at_once: int = Field(default=2, ge=1)
    """Number of merges that the embedded engine runs at once, and of deletions. A server has its own settings."""


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
    """Password of the ClickHouse server; set it in the environment rather than in a file."""

    secure: bool = False
    """Use HTTPS to the ClickHouse server."""

    database: str = Field(default="tidemill", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Database of the tables; created if it does not exist."""

    table_engine: TableEngine = TableEngine.MERGE_TREE
    """Engine of tables that the sink creates; existing tables keep theirs."""

    http_port: int = Field(default=8123, ge=0, le=65535)
    """Loopback port on which the embedded engine serves ClickHouse's HTTP protocol, read-only. 0: a free port, named in
    the log line and in the state file. Unused with a server, which serves its own port."""

    http: HttpSettings = HttpSettings()
    """Limits on client connections to the embedded engine's endpoint."""

    merges: MergeSettings = MergeSettings()
    """Limits for merging the parts of the tables."""

    cache_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Maximum size of the embedded engine's mark cache, and of its primary index cache, which queries and merges
    fill. A server has its own settings."""

    keep_freed_ms: int = Field(default=1_000, ge=0)
    """Milliseconds for which the embedded engine keeps freed memory before it returns it to the system. With 0, each
    buffer of an insert is mapped again, which takes a fifth more CPU. The environment variable JE_MALLOC_CONF has
    priority. Unused with a server."""

    accept_gaps: bool = False
    """Continue if the log deleted records before the sink had read them, and record the missing offsets in the table
    `sink_gaps`. Otherwise the sink exits with an error."""

    flush_rows: int = Field(default=4000, ge=1)
    """Maximum rows of one flush; ClickHouse works best with few large inserts."""

    flush_bytes: int = Field(default=FLUSH_BYTES, ge=2**16)
    """Maximum bytes of record values in one insert (a longer record is inserted alone), and the size at which a flush
    is due. During an insert, several times as much memory is used."""

    flush_seconds: float = Field(default=1.0, gt=0)
    """Age in seconds at which a smaller batch is flushed too."""

    query_seconds: float = Field(default=60.0, gt=0)
    """Maximum duration of a query over HTTP, in seconds."""

    query_memory_bytes: int = Field(default=2 * 2**30, ge=2**20)
    """Maximum memory of a query over HTTP."""

    result_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Maximum uncompressed result of a query over HTTP."""

    query_threads: int = Field(default=4, ge=1)
    """Number of queries over HTTP that run at once; further ones wait."""

    @property
    def embedded(self) -> bool:
        return not self.host

    @property
    def server_url(self) -> str:
        """The address of a ClickHouse server; without a server, see the sink's state file (`query.read_state`)."""
        return f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"

    @property
    def directory(self) -> Path:
        """`path`, absolute, with links resolved: the engine compares paths literally."""
        return Path(self.path).expanduser().resolve()

    @property
    def has_tables(self) -> bool:
        """Whether the embedded engine made its database there. It would write files into any other directory."""
        return (self.directory / "metadata" / f"{self.database}.sql").is_file()
