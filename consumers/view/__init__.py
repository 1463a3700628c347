"""The page on which a run is watched: views of the sink's tables, served to a browser."""
