"""The program that `rendering` starts: reads a line of JSON, renders it, writes a line of JSON, until its input ends.

It imports nothing of Penstock, so that it starts quickly and holds little. Limits of the system end a template that
computes or fills memory without end.
"""

import json
import math
import resource
import sys
import time
from typing import Any

_MOST_CHARACTERS = 64 << 20
_MOST_MEMORY_BYTES = 1 << 30


def main(most_s: int) -> None:
    """Render what comes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin.buffer:
        limit = math.ceil(time.process_time()) + most_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        sys.stdout.buffer.write(_answer(render_jinja_template, line).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(render: Any, line: bytes) -> str:
    try:
        asked = json.loads(line)
        [text], spans = render(conversations=[asked.pop("messages")], **asked)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it writes more than {_MOST_CHARACTERS} characters")
        return json.dumps({"text": text, "spans": spans[0] if spans else []})
    except Exception as error:  # a template may raise anything
        return json.dumps({"error": (str(error).strip().splitlines() or [type(error).__name__])[0]})


if __name__ == "__main__":
    main(int(sys.argv[1]))
