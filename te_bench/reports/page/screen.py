"""How wide what is printed may be. It stands apart from tables, which take half a second to import."""

import shutil

WIDTH = 100  # characters of a line where the output is no terminal
LEAST = 40  # however narrow the terminal


def columns(most: int | None = None) -> int:
    """Return the columns of the terminal, at most `most`; WIDTH where the output is no terminal."""
    found = max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns)
    return found if most is None else min(found, most)
