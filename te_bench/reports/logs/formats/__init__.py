"""One file for each kind of log; `logs/__init__.py` says what a file has."""
