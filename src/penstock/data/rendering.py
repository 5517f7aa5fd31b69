"""Rendering of chat templates in a process of its own, which can be ended: a template may loop without end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

MOST_S = 5
"""Seconds of a processor that one rendering may take, at most."""

_PROGRAM = Path(__file__).with_name("rendering_process.py")


class RenderingError(ValueError):
    """A template that refuses what it is given, or takes too much time or memory; the message is a reason."""


class Rendered(NamedTuple):
    """A text, and where in it the template marks what the assistant says: first character, and one past the last."""

    text: str
    spans: list[tuple[int, int]]


class TemplateRenderer:
    """Renders chat templates, one at a time, as transformers does; threads may share it.

    Args:
        most_s: seconds of a processor for each.
    """

    #: as given
    _most_s: int
    #: the process that renders, and the one that started it; None before the first
    _process: subprocess.Popen[bytes] | None
    _owner: int
    #: held while the process renders
    _lock: threading.Lock

    def __init__(self, most_s: int = MOST_S) -> None:
        self._most_s, self._process, self._owner, self._lock = most_s, None, 0, threading.Lock()

    def start(self) -> None:
        """Start the process before it is needed; it takes a moment."""
        with self._lock:
            self._started()

    def render(self, template: str, **arguments: Any) -> Rendered:
        """Render one conversation.

        arguments: those of transformers' `render_jinja_template`, as values of JSON, and the template's own.

        Raises:
            RenderingError: why there is no text.
        """
        asked = json.dumps({"chat_template": template, **arguments}, default=str)
        with self._lock:
            process = self._started()
            try:
                answer = _exchange(process, asked.encode() + b"\n")
            except BaseException:
                # Its answer may still come, and would then be taken for that of the next.
                _end(process, self._owner)
                raise
            if not answer:
                # It has ended, and so closed its output.
                process.wait()
                _end(process, self._owner)
                if process.returncode == -signal.SIGXCPU:
                    raise RenderingError(f"it computes for more than {self._most_s} s")
                raise RenderingError(f"the process that renders it has ended with code {process.returncode}")
        content = json.loads(answer)
        if "error" in content:
            raise RenderingError(content["error"])
        return Rendered(content["text"], [(start, end) for start, end in content["spans"]])

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            command = [sys.executable, "-P", str(_PROGRAM), str(self._most_s)]
            # In a session of its own, since Ctrl-C ends what is being rendered for in its own way.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._process, self._owner = process, os.getpid()
            weakref.finalize(self, _end, process, self._owner)
        return process


def _exchange(process: subprocess.Popen[bytes], asked: bytes) -> bytes:
    """The answer to one line; empty where the process has ended instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(asked)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, unless it is that of another one which forked this one."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
