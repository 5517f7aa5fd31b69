"""A model's folder rewritten in the other form, a run's or Hugging Face's, by one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.adapter import with_adapter
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.export import ExportedParameter, ExportOptions, Progress, export_model, write_folder
from penstock.engine.pipeline import Pipeline
from penstock.engine.pretrained import (
    HuggingFaceForm,
    StoredModel,
    check_quantizable,
    find_model,
    holds_adapters,
    newest_checkpoint,
)
from penstock.engine.run_check import with_pretrained
from penstock.engine.run_parts import engine_arguments
from penstock.engine.runs import CHECKPOINT_FOLDER, RUN_FILE, RunFolder
from penstock.engine.saved_model import open_model
from penstock.engine.state import ModelState
from penstock.engine.trainer import Trainer
from penstock.model.hf.families import names_of
from penstock.model.hf.files import DTYPES, WeightFiles, slices_of, units_from_files
from penstock.model.hf.quantized import INT8
from penstock.model.linear import joint_weights
from penstock.parallel.tensor_slice import Shape, StoredSlice, TensorSlice, copies
from penstock.settings import DataConfig, ModelConfig, ParallelConfig, Precision, RunConfig, TrainConfig

_TOKENIZER = "tokenizer.json"


def to_hugging_face(
    source: Path, destination: Path, options: ExportOptions, expect: Callable[[int], None], progress: Progress
) -> int | None:
    """Write the model of a run, or of another Hugging Face folder, as a Hugging Face folder.

    Of a run that has trained adapters it is the base, with the adapters in the folder `adapter` inside, or both as one
    with `options.merge_adapters`; memory then holds the whole model, and otherwise the tensors of one file at a time.
    `expect` is called with the number of bytes to write, `progress` after each file with its number of bytes. Returns
    the step of the run's checkpoint; None of a Hugging Face folder.

    Raises:
        ValueError: there is no model, or none that transformers knows, or the destination is not new.
    """
    found, has_adapters = find_model(source), holds_adapters(source)
    if options.merge_adapters and not has_adapters:
        raise ValueError(f"{source} has no adapters to merge")
    if options.quantize and has_adapters:
        raise ValueError(f"{source} has adapters; write it with --merge-adapters first, and quantize what is written")
    if options.quantize:
        check_quantizable(source, found.shape)
    # Any fault of the files is found before one is written.
    units_from_files(found.units, found.names, found.files)
    parameters = tuple(_parameters(found))
    expect(sum(map(options.num_bytes, parameters)))
    form = found.form if found.shape.native is False else replace(found.form, names=names_of(found.shape))
    if has_adapters:
        _export_with_adapters(source, destination, form, options, progress)
    else:
        write_folder(destination, form, parameters, options, progress=progress)
    return found.step


def _export_with_adapters(
    source: Path, destination: Path, form: HuggingFaceForm, options: ExportOptions, progress: Progress
) -> None:
    model = open_model(source)
    units, hidden_size, layout, own, _ = model.arguments(ParallelConfig(device="cpu"))
    pipeline = Pipeline(with_adapter(units, own.adapter, form, layout), hidden_size, layout, own)
    state = ModelState(pipeline, Trainer(pipeline))
    try:
        model.load(state)
        export_model(state, form, destination, options, progress)
    finally:
        state.close()


def _parameters(found: StoredModel) -> Iterator[ExportedParameter]:
    for unit in found.units:
        with torch.device("meta"):
            products = joint_weights(unit.build())
        for name, shape, stored in slices_of(unit, found.names):
            if name not in unit.tied and stored:
                word = found.files.tensors[stored[0].name].dtype
                dtype = torch.float32 if word == INT8 else DTYPES[word]
                fetch = partial(_assembled, found.files, stored, shape, dtype)
                yield ExportedParameter(unit.full_name(name), shape, dtype, fetch, is_product=name in products)


def _assembled(files: WeightFiles, stored: tuple[StoredSlice, ...], shape: Shape, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for name, indices, into in copies(stored, TensorSlice.whole(shape), whole):
        into.copy_(files.read(name, indices))
    return whole


def to_run(source: Path, destination: Path, dtype: str | None) -> int | None:
    """Write the model of a folder as the first checkpoint of a run, for `model.pretrained`, scoring and generation.

    Returns the step of the checkpoint, where the folder is a run's; None of a Hugging Face folder.

    Raises:
        ValueError: there is no model, or the destination is not new.
    """
    if dtype is not None and dtype not in list(Precision):
        raise ValueError(f"a run's dtype {dtype!r} is none of {', '.join(Precision)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already and was left as it is; give the name of a new folder")
    has_tokenizer = (source / _TOKENIZER).is_file()
    config = with_pretrained(
        RunConfig(
            output=str(destination),
            model=ModelConfig(pretrained=str(source)),
            data=DataConfig(tokenizer=str(source.resolve()) if has_tokenizer else "bytes"),
            train=TrainConfig(precision=None if dtype is None else Precision(dtype)),
        )
    )
    units, hidden_size, layout, options, _ = engine_arguments(config, config.model.vocab_size or 0)
    pipeline = Pipeline(units, hidden_size, layout, options)
    state = ModelState(pipeline, Trainer(pipeline))
    before = destination.exists()
    folder = RunFolder(config)
    try:
        aliases = state.aliases
        saved = Checkpointer(
            destination / CHECKPOINT_FOLDER, pipeline.grid, config.identity(), aliases=aliases, parents=False
        )
        saved.save(0, state.state(optimizer=False), extra={}, wait=True)
    except BaseException:
        folder.close()
        shutil.rmtree(destination / CHECKPOINT_FOLDER, ignore_errors=True)
        (destination / RUN_FILE).unlink(missing_ok=True)
        if not before:
            shutil.rmtree(destination, ignore_errors=True)
        raise
    finally:
        state.close()
    folder.close()
    return newest_checkpoint(source, quiet=True).step if (source / RUN_FILE).is_file() else None
