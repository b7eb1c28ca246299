"""Write a file whole or not at all, and make names of files durable."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it if the block succeeds, and is deleted otherwise.

    durable: its content is on disk (fsync) before it replaces `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Make a folder's file names durable (fsync), unless its file system syncs no folders, as of some shares."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): not supported
            raise
    finally:
        os.close(descriptor)
