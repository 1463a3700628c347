"""The web page for watching a run: views of the sink's tables, served to a browser."""
