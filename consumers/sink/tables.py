"""The tables: one per record type of the catalogue, named after its topic, with DDL that any ClickHouse accepts.

Every table is ordered by `(_topic, _partition, _offset)`, the identity of a row, so that the highest offset of a
partition is read from the primary index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tidemill.consumers.sink.columns import DEAD_LETTER, POSITION, Column, record_columns
from tidemill.consumers.sink.config import MergeSettings, TableEngine
from tidemill.consumers.sink.rows import DeadLetter
from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.codec import schema_file_name

WATERMARKS = "sink_watermarks"
GAPS = "sink_gaps"


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    """The record's columns; the position columns precede them."""

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """The position columns, then the record's."""
        return (*POSITION, *self.columns)

    def create(self, database: str, engine: TableEngine, merges: MergeSettings) -> str:
        columns = ",\n".join(f"    `{column.name}` {column.type}" for column in self.all_columns)
        return (
            f"CREATE TABLE IF NOT EXISTS `{database}`.`{self.name}`\n(\n{columns}\n)\nENGINE = {engine.value}\n"
            f"ORDER BY (_topic, _partition, _offset)\n"
            f"SETTINGS {', '.join(table_settings(merges))}"
        )


def table_settings(merges: MergeSettings) -> list[str]:
    """Return the settings of a table, as SHOW CREATE TABLE lists them."""
    return [
        # Without Keeper, ClickHouse stores a block's deduplication token before the block. If it is killed between the
        # two, it drops the same block when the sink inserts it again.
        "non_replicated_deduplication_window = 0",
        f"vertical_merge_algorithm_min_rows_to_activate = {merges.vertical_rows}",
        f"merge_max_block_size_bytes = {merges.block_bytes}",
        f"max_parts_to_merge_at_once = {merges.parts}",
    ]


def table_name(topic: Topic, record_type: type) -> str:
    """Return the topic's name with underscores for its first record type; for others (ticks) their own name, plural."""
    if record_type is CATALOGUE[topic].values[0]:
        return topic.value.replace(".", "_").replace("-", "_")
    return f"{schema_file_name(record_type)}s"


@lru_cache(maxsize=1)
def tables() -> dict[type, Table]:
    """Return every table by the record type that it contains."""
    found = {
        record_type: Table(table_name(topic, record_type), record_columns(record_type))
        for topic, spec in CATALOGUE.items()
        for record_type in spec.values
    }
    return {**found, DeadLetter: Table("dead_letters", DEAD_LETTER)}


OWN_TABLES = {
    # The offset from which each partition is read after a restart.
    WATERMARKS: "(\n    `_topic` LowCardinality(String),\n    `_partition` Int32,\n    `next_offset` Int64\n)\n"
    "ENGINE = ReplacingMergeTree(next_offset)\nORDER BY (_topic, _partition)",
    # Retention gaps, deleted from the log before they were read: offsets [first_offset, end_offset).
    GAPS: "(\n    `_topic` LowCardinality(String),\n    `_partition` Int32,\n    `first_offset` Int64,\n"
    "    `end_offset` Int64,\n    `found_at` DateTime64(3, 'UTC') DEFAULT now64(3)\n)\n"
    "ENGINE = ReplacingMergeTree\nORDER BY (_topic, _partition, first_offset)",
}
"""The definitions of the sink's tables without records, for CREATE TABLE, by name."""
