"""Checkpoints that somebody has changed by hand, with a manifest whose hashes fit again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Change a checkpoint's manifest in place, and let its hashes fit the files that are there."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    for name in content["files"]:
        file = (checkpoint / name).read_bytes()
        content["files"][name] = {"size_bytes": len(file), "sha256": hashlib.sha256(file).hexdigest()}
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file, and leave the values."""
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
