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
from penstock.engine.arguments import EngineArguments, engine_arguments
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.config import OptimizerSection, ParallelSection, RunConfig, ScheduleSection
from penstock.engine.config_file import ConfigError, read_config
from penstock.engine.manifest import published
from penstock.engine.optimizer import state_aliases
from penstock.engine.options import EngineOptions
from penstock.engine.pretrained import open_pretrained
from penstock.engine.run_parts import layout
from penstock.engine.runs import CHECKPOINT_FOLDER, CONFIG_FILE
from penstock.engine.state import ModelState
from penstock.model import ModelGroups

_HUGGING_FACE_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class SavedModel:
    """A model in a folder, before its weights are read."""

    folder: Path
    vocab_size: int
    #: tokens of the longest sequence
    max_length: int
    #: pieces that stages can be cut from
    num_units: int
    #: None where the folder has none, and only token ids can be given
    tokenizer: Tokenizer | None
    #: the arguments of an engine that scores and generates with the model in a layout
    arguments: Callable[[ParallelSection], EngineArguments]
    #: reads the weights into such an engine's state, and returns a version that differs where the weights do; every
    #: process of the layout calls it at the same point
    load: Callable[[ModelState], str]
    #: tokens that end a text
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

    def arguments(parallel: ParallelSection) -> EngineArguments:
        # Neither how it was trained nor what it began with matters here: a plain cut, and no optimizer.
        model = replace(config.model, pretrained=None)
        ours = replace(config, model=model, parallel=parallel, schedule=ScheduleSection(), optimizer=OptimizerSection())
        return engine_arguments(ours, size, learns=False)

    def load(state: ModelState) -> str:
        return _load_run(folder, config, state)

    return SavedModel(folder, size, config.model.max_length, config.num_units, tokenizer, arguments, load, ends)


def _load_run(folder: Path, config: RunConfig, state: ModelState) -> str:
    """Read the weights of a run's newest intact checkpoint; returns their version.

    Raises:
        ConfigError: all its checkpoints are damaged.
    """
    aliases, grid = state_aliases(state.ties), state.pipeline.grid
    saved = Checkpointer(folder / CHECKPOINT_FOLDER, grid, config.identity(), aliases=aliases, claim=False)
    found = saved.latest()
    if found is None:
        path, reason = next(iter(saved.refused.items()))
        raise ConfigError(
            f"all {len(saved.refused)} checkpoints of {folder} are damaged, such as {path.name} ({reason})"
        )
    saved.load(found, state.state(optimizer=False))
    return f"step {found.step} of {config.digest()}"


# ---- Hugging Face


def _open_hugging_face(folder: Path, native: bool) -> SavedModel:
    try:
        found = open_pretrained(folder, native)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None
    content = found.form.describe()
    tokenizer = load_tokenizer(str(folder)) if (folder / _TOKENIZER).is_file() else None

    def arguments(parallel: ParallelSection) -> EngineArguments:
        options = EngineOptions(device=parallel.device, timeout_s=parallel.timeout_s, learns=False)
        found = open_pretrained(folder, native)
        return EngineArguments(
            found.units, found.hidden_size, layout(RunConfig(parallel=parallel)), options, found.form
        )

    def load(state: ModelState) -> str:
        # The engine's units have read them as it was made.
        return f"{_version(folder)} {native=}"

    return SavedModel(
        folder,
        vocab_size=_size(content, folder, "vocab_size"),
        max_length=_size(content, folder, "max_position_embeddings", "n_positions", "max_seq_len"),
        num_units=len(found.units(ModelGroups())),
        tokenizer=tokenizer,
        arguments=arguments,
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
