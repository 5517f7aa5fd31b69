"""A saved model rewritten in the other form, by one process: a run's as a Hugging Face folder, and such a folder as a
run that others can begin with.

Writing for transformers holds one file's tensors in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from penstock.engine.arguments import engine_arguments
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.config import DataSection, ModelSection, Precision, RunConfig, TrainSection
from penstock.engine.export import ExportOptions, Parameter, Progress, Share, write_folder
from penstock.engine.optimizer import state_aliases
from penstock.engine.pipeline import Pipeline
from penstock.engine.pretrained import StoredDecoder, find_decoder
from penstock.engine.pretrained_settings import with_pretrained
from penstock.engine.runs import CHECKPOINT_FOLDER, CONFIG_FILE, RunFolder
from penstock.engine.state import ModelState
from penstock.engine.trainer import Trainer
from penstock.model import decoder_units
from penstock.model.hf.families import names_of
from penstock.model.hf.files import WeightFiles
from penstock.model.hf.load import Piece, pieces_of, placed_units

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER = "tokenizer.json"


def to_hugging_face(
    source: Path, destination: Path, options: ExportOptions, expect: Callable[[int], None], progress: Progress
) -> None:
    """Write the model of a run, or of another Hugging Face folder, as a Hugging Face folder.

    `expect` is told how many bytes will be written, `progress` after each file how many it has.

    Raises:
        ValueError: there is no model, or none that transformers knows, or the destination is not new.
    """
    found = find_decoder(source)
    # Everything that could be wrong with the files is found before one is written.
    placed_units(decoder_units(found.shape), found.names, found.files)
    parameters = tuple(_parameters(found))
    expect(sum(torch.Size(p.shape).numel() * options.torch_dtype(p.dtype).itemsize for p in parameters))
    form = replace(found.form, names=names_of(found.shape))
    write_folder(destination, form, Share(parameters), options, progress=progress)


def _parameters(found: StoredDecoder) -> Iterator[Parameter]:
    for unit in decoder_units(found.shape):
        for name, shape, pieces in pieces_of(unit, found.names):
            if name not in unit.tied and pieces:
                dtype = _DTYPES[found.files.tensors[pieces[0].stored].dtype]
                fetch = partial(_assembled, found.files, pieces, shape, dtype)
                yield Parameter(unit.full_name(name), shape, dtype, fetch)


def _assembled(files: WeightFiles, pieces: tuple[Piece, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for piece in pieces:
        whole[piece.place].copy_(files.read(piece.stored))
    return whole


def to_run(source: Path, destination: Path, dtype: str | None) -> None:
    """Write the model of a folder as the first checkpoint of a run, for `model.pretrained`, scoring and generation.

    Raises:
        ValueError: there is no model, or the destination is not new.
    """
    if dtype is not None and dtype not in get_args(Precision):
        raise ValueError(f"a run's dtype {dtype!r} is none of {', '.join(get_args(Precision))}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already and was left as it is; give the name of a new folder")
    has_tokenizer = (source / _TOKENIZER).is_file()
    config = with_pretrained(
        RunConfig(
            output=str(destination),
            model=ModelSection(pretrained=str(source)),
            data=DataSection(tokenizer=str(source.resolve()) if has_tokenizer else "bytes"),
            train=TrainSection(precision=dtype or "fp32"),  # pyright: ignore[reportArgumentType]  # checked above
        )
    )
    units, hidden_size, layout, options, _ = engine_arguments(config, config.model.vocab_size or 0)
    pipeline = Pipeline(units, hidden_size, layout, options)
    state = ModelState(pipeline, Trainer(pipeline))
    before = destination.exists()
    folder = RunFolder(config)
    try:
        aliases = state_aliases(state.ties)
        saved = Checkpointer(destination / CHECKPOINT_FOLDER, pipeline.grid, config.identity(), aliases=aliases)
        saved.save(0, state.state(optimizer=False), extra={}, wait=True)
    except BaseException:
        folder.close()
        shutil.rmtree(destination / CHECKPOINT_FOLDER, ignore_errors=True)
        (destination / CONFIG_FILE).unlink(missing_ok=True)
        if not before:
            shutil.rmtree(destination, ignore_errors=True)
        raise
    finally:
        state.close()
    folder.close()
