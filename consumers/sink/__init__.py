"""The ClickHouse sink: every topic as a table, one row for each record, readable over ClickHouse's HTTP protocol."""
