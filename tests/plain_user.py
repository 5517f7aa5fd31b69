"""A user who is not root, for the process that tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def plain_user(folder: Path) -> Iterator[None]:
    """The modes of files hold for this process, which works in `folder` (as root it would read and write them all)."""
    before = Path.cwd()
    os.chdir(folder)  # its parents may be closed to others
    try:
        if os.getuid() != 0:
            yield
            return
        folder.chmod(0o777)
        os.setresuid(_NOBODY, _NOBODY, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
    finally:
        os.chdir(before)
