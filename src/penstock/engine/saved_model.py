"""A model in a folder, opened for reading: that of a run, which may still go on, or one in Hugging Face's form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.data import CorpusError
from penstock.data.tokenizer import Tokenizer, load_tokenizer
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.config import OptimizerSection, ParallelSection, RunConfig, ScheduleSection
from penstock.engine.config_file import ConfigError, read_config
from penstock.engine.engine import Engine
from penstock.engine.manifest import published
from penstock.engine.optimizer import state_aliases
from penstock.engine.options import EngineOptions
from penstock.engine.pretrained import open_pretrained
from penstock.engine.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE
from penstock.engine.run_parts import layout, run_engine
from penstock.model import ModelGroups

_HUGGING_FACE_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Loaded:
    """An engine that has a saved model's weights, and these alone; `version` says which, and differs where they do."""

    engine: Engine
    version: str


@dataclass(frozen=True)
class SavedModel:
    """What is known of a model before its weights are read.

    max_length: tokens of the longest sequence. num_units: pieces that stages can be cut from. tokenizer: None where
    the folder has none, and only token ids can be given. load: makes the engine and reads the weights; every process
    of the layout calls it at the same point. end_tokens: those that end a text.
    """

    folder: Path
    vocab_size: int
    max_length: int
    num_units: int
    tokenizer: Tokenizer | None
    load: Callable[[ParallelSection], Loaded]
    end_tokens: tuple[int, ...] = ()


def open_model(folder: Path | str, native: bool = True) -> SavedModel:
    """The model in a folder; nothing is written there, and no weight is read yet.

    Without `native` a Hugging Face model is run by transformers' own layers, whatever its family.

    Raises:
        ValueError: there is no such folder, no model in it, or one that can not be run.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).is_file():
        return _open_run(folder)
    if (folder / _HUGGING_FACE_CONFIG).is_file():
        return _open_hugging_face(folder, native)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give that of a run, or one of Hugging Face's")
    raise ConfigError(f"{folder} holds neither a run ({CONFIG_FILE}) nor a Hugging Face model ({_HUGGING_FACE_CONFIG})")


# ---- runs


def _open_run(folder: Path) -> SavedModel:
    config = read_config(folder / CONFIG_FILE)
    if not published(folder / CHECKPOINT_FOLDER):
        raise ConfigError(f"{folder} holds no checkpoint yet; a run saves the first after checkpoint.every steps")
    name, vocab_size = config.data.tokenizer, config.model.vocab_size
    try:
        # What is given is scored and continued as it is: no end token is put after it.
        tokenizer = load_tokenizer(name)
        ending = load_tokenizer(name, config.data.end_token or False)
        vocab_size, ends = vocab_size or ending.vocab_size, ending.end_tokens
    except CorpusError:
        if vocab_size is None:
            raise
        tokenizer, ends = None, ()
    size = vocab_size

    def load(parallel: ParallelSection) -> Loaded:
        return _load_run(folder, config, size, parallel)

    return SavedModel(folder, size, config.model.max_length, config.num_units, tokenizer, load, ends)


def _load_run(folder: Path, config: RunConfig, vocab_size: int, parallel: ParallelSection) -> Loaded:
    """The engine of a run in another layout, with the weights of its newest intact checkpoint.

    Raises:
        ConfigError: all its checkpoints are damaged.
    """
    # How it was trained has no say in how it is run: a plain cut, and nothing of the optimizer is read.
    # Nor has what it began with.
    model = replace(config.model, pretrained=None)
    ours = replace(config, model=model, parallel=parallel, schedule=ScheduleSection(), optimizer=OptimizerSection())
    engine = run_engine(ours, vocab_size, learns=False)
    saved = Checkpointer(
        folder / CHECKPOINT_FOLDER, engine.grid, config.identity(), aliases=state_aliases(engine.ties), claim=False
    )
    found = saved.latest()
    if found is None:
        path, reason = next(iter(saved.refused.items()))
        raise ConfigError(
            f"all {len(saved.refused)} checkpoints of {folder} are damaged, such as {path.name} ({reason})"
        )
    saved.load(found, engine.state(optimizer=False))
    return Loaded(engine, f"step {found.step} of {config.digest()}")


# ---- Hugging Face


def _open_hugging_face(folder: Path, native: bool) -> SavedModel:
    try:
        found = open_pretrained(folder, native)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None
    content = found.form.describe()
    tokenizer = load_tokenizer(str(folder)) if (folder / _TOKENIZER).is_file() else None

    def load(parallel: ParallelSection) -> Loaded:
        grid = layout(RunConfig(parallel=parallel))
        options = EngineOptions(device=parallel.device, timeout_s=parallel.timeout_s, learns=False)
        return Loaded(Engine.from_hf(folder, grid, options, native), f"{_version(folder)} {native=}")

    return SavedModel(
        folder,
        vocab_size=_size(content, folder, "vocab_size"),
        max_length=_size(content, folder, "max_position_embeddings", "n_positions", "max_seq_len"),
        num_units=len(found.units(ModelGroups())),
        tokenizer=tokenizer,
        load=load,
        end_tokens=_hugging_face_ends(folder),
    )


def _size(content: Mapping[str, Any], folder: Path, *names: str) -> int:
    """The first of these settings that there is."""
    for name in names:
        if isinstance(content.get(name), int):
            return content[name]
    raise ConfigError(f"{folder / _HUGGING_FACE_CONFIG} has no {' or '.join(names)}")


def _hugging_face_ends(folder: Path) -> tuple[int, ...]:
    """The end tokens that the generation's own settings name, else those of the model's."""
    for name in (_GENERATION_CONFIG, _HUGGING_FACE_CONFIG):
        path = folder / name
        if path.is_file():
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if named is not None:
                return tuple(named) if isinstance(named, list) else (named,)
    return ()


def _version(folder: Path) -> str:
    """Differs where a file was replaced: names, sizes and times, for reading all weights would take too long."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
