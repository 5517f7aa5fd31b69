"""The checks by which a checkpoint counts as intact; one that is not is passed over, and said to be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.checkpoint.manifest import (
    CheckpointInfo,
    DamagedCheckpoint,
    check_files,
    differences,
    published,
    read_manifest,
)
from penstock.model.hf.files import DTYPES, WeightFiles

_logger = logging.getLogger(__name__)


def examine(path: Path, identity: Mapping[str, Any] | None = None, part: int = 0, num_parts: int = 1) -> CheckpointInfo:
    """The checkpoint at `path`, once it has been found intact.

    Of `num_parts` processes that examine it together, each reads its part of the files. identity: that of the run whose
    it must be; None takes that of any.

    Raises: DamagedCheckpoint.
    """
    try:
        info = read_manifest(path)
        if identity is not None and (changed := differences(identity, info.identity)):
            raise DamagedCheckpoint(f"it is of another run: {changed[0]}")
        check_files(info, part, num_parts)
        if part == 0:
            check_headers(info)
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from None
    return info


def check_headers(info: CheckpointInfo) -> None:
    """Compare the headers of all files with the manifest: each tensor is there once, of its dtype and shape.

    Raises: DamagedCheckpoint naming a tensor.
    """
    file_of: dict[str, str] = {}
    for name in sorted(info.files):
        try:
            headers = WeightFiles.of_files(info.path, [name]).tensors
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from None
        for tensor, stored in headers.items():
            found = f"{list(stored.shape)} of {str(DTYPES.get(stored.dtype, stored.dtype)).removeprefix('torch.')}"
            if tensor not in info.tensors:
                raise DamagedCheckpoint(f"its {name} holds {tensor}, which is not in the manifest")
            if found != str(info.tensors[tensor]):
                raise DamagedCheckpoint(f"its {name} holds {tensor} as {found} instead of {info.tensors[tensor]}")
            if tensor in file_of:
                raise DamagedCheckpoint(f"its {name} and {file_of[tensor]} both hold {tensor}")
            file_of[tensor] = name
    if missing := sorted(info.tensors.keys() - file_of.keys()):
        raise DamagedCheckpoint(f"none of its files holds {missing[0]}")


def newest_intact(folder: Path, identity: Mapping[str, Any], quiet: bool = False) -> CheckpointInfo:
    """Find the newest intact checkpoint in the folder, alone; damaged ones are warned of unless `quiet`.

    Raises: DamagedCheckpoint where there is none.
    """
    refused = ""
    for path in reversed(published(folder)):
        try:
            return examine(path, identity)
        except DamagedCheckpoint as error:
            refused = refused or f"; {path.name} is damaged: {error}"
            if not quiet:
                warn_of(path, str(error))
    raise DamagedCheckpoint(f"{folder} holds no intact checkpoint{refused}")


def warn_of(path: Path, reason: str) -> None:
    """Say that a checkpoint is passed over, and why."""
    _logger.warning("checkpoint %s is refused: %s", path, reason)
