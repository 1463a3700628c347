"""The checks of an audit, one a file. Each is a pure function of the facts, and names what it finds with its place."""
