"""The weights layer: versions and the paths between them, anchors, versions in memory, publication."""
