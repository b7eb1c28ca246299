"""The kinds of logs that are read, a file each: `logs/__init__.py` says what it has."""
