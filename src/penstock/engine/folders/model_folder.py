"""A model in a folder, of a run or in Hugging Face's form: opened for reading."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.data import CorpusError
from penstock.data.tokenizer import Tokenizer, WithoutSpecialTokens, load_tokenizer
from penstock.engine.build import bytes_of_weight
from penstock.engine.checkpoint import CheckpointReader
from penstock.engine.checkpoint.manifest import published
from penstock.engine.folders.hf_folder import (
    EngineArguments,
    Pretrained,
    Rates,
    check_quantizable,
    open_pretrained,
    rates_of,
    reason_for_transformers,
    refuse_classifier,
    reward_model_of,
)
from penstock.engine.folders.run_parts import engine_arguments
from penstock.engine.folders.runs import CHECKPOINT_FOLDER, RUN_FILE, read_run
from penstock.engine.model_state import ModelState
from penstock.engine.options import EngineOptions
from penstock.io.documents import read_json_object
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.settings import (
    ConfigError,
    Native,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Quantize,
    RunConfig,
    ScheduleConfig,
)

# ---- A model's own settings of generation, in its folder's generation_config.json


GENERATION_CONFIG = "generation_config.json"
_SAMPLED = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that would change an answer, and the values besides null that change nothing.
_LACKING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha", "top_h"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_strings", "sequence_bias"), ([], {}, "")),
    **dict.fromkeys(("force_words_ids", "constraints", "dola_layers", "exponential_decay_length_penalty"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "max_time"), ()),
    "max_length": (20,),
}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The settings of `SamplingParams` that the folder's file names; as there, top_p follows top_k.

    Raises: ConfigError for a file that cannot be read, or words that are no tokens.
    """
    content = _content(folder)
    found = {name: content[name] for name in _SAMPLED if content.get(name) is not None}
    if found.get("top_k") == 0:
        del found["top_k"]
    if {"top_k", "top_p"} <= found.keys():
        found["chained"] = True
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    if words := content.get("bad_words_ids"):
        if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
            path = folder / GENERATION_CONFIG
            raise ConfigError(f"{path}: bad_words_ids is {str(words)[:60]}; a list of lists of token ids is expected")
        found["bad_words"] = words
    return found


def lacking_defaults(folder: Path) -> dict[str, Any]:
    """The fields of the folder's file that would change answers in transformers, and have no effect here."""
    content = _content(folder)
    found = {name: content.get(name) for name in _LACKING}
    # In transformers as well, the number of new tokens decides where both are given.
    if content.get("max_new_tokens") is not None:
        del found["max_length"]
    return {name: value for name, value in found.items() if value is not None and value not in _LACKING[name]}


def _content(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG
    return read_json_object(path) if path.is_file() else {}


# ---- A model in a folder, of a run or in Hugging Face's form: opened for reading


_HUGGING_FACE_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True)
class SavedModel:
    """A model in a folder, before its weights are read."""

    folder: Path
    vocab_size: int
    #: tokens of the longest sequence
    max_length: int
    #: units that stages can be cut from
    num_units: int
    #: None where the folder has none, and only token ids can be given
    tokenizer: Tokenizer | None
    #: the arguments of an engine that scores and generates with the model in a layout
    arguments: Callable[[ParallelConfig], EngineArguments]
    #: reads the weights into such an engine's state, and returns a version that differs where the weights do; every
    #: process of the layout calls it at the same point
    load: Callable[[ModelState], str]
    #: tokens that end a text
    end_tokens: tuple[int, ...] = ()
    #: settings of `SamplingParams` by name, as the folder's generation_config.json gives them
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: the folder that may have a chat template; None where the tokenizer has no files
    tokenizer_folder: Path | None = None
    #: the reason why transformers' own layers run it; None where Penstock's do
    transformers_because: str | None = None
    #: bytes of its weights in the form in which they are used; takes a moment
    weight_bytes: Callable[[], int] = field(kw_only=True)
    #: tokens of the longest sequence that can be generated; takes a moment
    max_generated_length: Callable[[], int] = field(kw_only=True)
    #: what its head rates, and the token that pads texts and is not rated; None for a model that gives tokens
    rates: Rates | None = None
    pad_token: int | None = None
    #: fields of that generation_config.json which would change answers in transformers, and have no effect here
    lacking: Mapping[str, Any] = field(default_factory=dict)


def open_model(
    folder: Path | str,
    native: Native = "auto",
    precision: Precision | None = None,
    quantize: Quantize | None = None,
    reproducible: bool = False,
    may_rate: bool = False,
) -> SavedModel:
    """Open the model in a folder; nothing is written there, and no weight is read yet.

    `native`: by Penstock's own layers, by transformers', or by its own where they are the model. `precision`: left out,
    that of the model's files. `quantize`: the numbers that weights of products are kept as, while they are read; left
    out, those of the files.
    `reproducible`: tokens get the bits that training gives them; a run whose settings say so does it anyway.
    `may_rate`: a model is possible that rates texts, such as a reward model, instead of giving tokens.

    Raises:
        ValueError: there is no such folder, no model in it, or one that cannot be run.
    """
    folder = Path(folder)
    if (folder / RUN_FILE).is_file():
        return _open_run(folder, precision, quantize or Quantize.NONE, reproducible)
    if (folder / _HUGGING_FACE_CONFIG).is_file():
        model = _open_hugging_face(folder, native, precision, quantize, reproducible)
        if model.rates is not None and not may_rate:
            refuse_classifier(open_pretrained(folder, native).form)
        return model
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give that of a run, or one of Hugging Face's")
    raise ConfigError(f"{folder} holds neither a run ({RUN_FILE}) nor a Hugging Face model ({_HUGGING_FACE_CONFIG})")


# ---- runs


def _open_run(folder: Path, precision: Precision | None, quantize: Quantize, reproducible: bool) -> SavedModel:
    config = read_run(folder)
    _refuse_without_checkpoint(folder)
    tokenizer, size, ends = _tokenizer_of(config)
    if quantize is not Quantize.NONE:
        _check_quantizable_run(folder, config)

    def arguments(parallel: ParallelConfig) -> EngineArguments:
        if quantize is not Quantize.NONE:
            found = open_pretrained(folder, config.model.native, config.model.whole(size))
            same_bits = reproducible or config.train.reproducible
            return _arguments(found, parallel, precision or config.train.precision, quantize, same_bits)
        # The settings of training and the pretrained model do not matter here: a plain cut, and no optimizer.
        own = config.model if config.model.native is False else replace(config.model, pretrained=None)
        train = replace(
            config.train,
            precision=precision or config.train.precision,
            reproducible=reproducible or config.train.reproducible,
        )
        ours = replace(config, model=own, parallel=parallel, train=train)
        ours = replace(ours, schedule=ScheduleConfig(), optimizer=OptimizerConfig())
        return engine_arguments(ours, size, learns=False)

    def load(state: ModelState) -> str:
        if quantize is not Quantize.NONE:
            # The engine's units read them when it was made.
            return f"{published(folder / CHECKPOINT_FOLDER)[-1].name} of {config.digest()}, {quantize}"
        return _load_run(folder, config, state)

    name, model, numbers = config.data.tokenizer, config.model, config.train.precision
    files = None if name in (None, "bytes") else Path(name).expanduser()
    return SavedModel(
        folder,
        size,
        model.max_length,
        model.num_units,
        tokenizer,
        arguments,
        load,
        ends,
        generation_defaults(Path(name or "")),
        files if files is None or files.is_dir() else files.parent,
        reason_for_transformers(folder, model.native),
        weight_bytes=lambda: _weight_bytes(_units_of_run(folder, config, size), precision or numbers, quantize),
        max_generated_length=cache(lambda: _max_generated_length(_units_of_run(folder, config, size))),
        lacking=lacking_defaults(Path(name or "")),
        **_rating_of(config),
    )


def _tokenizer_of(config: RunConfig) -> tuple[Tokenizer | None, int, tuple[int, ...]]:
    """A run's tokenizer, if it can be loaded, with the size of the vocabulary and the tokens that end a text.

    Raises: CorpusError if the size is known from the tokenizer alone, and it cannot be loaded.
    """
    name, size = config.data.tokenizer, config.model.vocab_size
    try:
        # A given text is scored and continued as it is: no end token is put after it.
        tokenizer = load_tokenizer(name)
        ending = load_tokenizer(name, config.data.end_token or False)
    except CorpusError:
        if size is None:
            raise
        return None, size, ()
    ends = ending.end_tokens or _hugging_face_ends(Path(name or ""))
    if not config.data.special_tokens:
        tokenizer = WithoutSpecialTokens(tokenizer)
    return tokenizer, size or ending.vocab_size, ends


def _refuse_without_checkpoint(folder: Path) -> None:
    if published(folder / CHECKPOINT_FOLDER):
        return
    with contextlib.suppress(FileNotFoundError):
        os.listdir(folder / CHECKPOINT_FOLDER)  # one that may not be read is not empty
    raise ConfigError(f"{folder} holds no checkpoint yet; a run saves the first after checkpoint.every steps")


def _check_quantizable_run(folder: Path, config: RunConfig) -> None:
    if config.adapter.is_used:
        raise ConfigError(
            f"{folder} cannot be quantized, since it has an adapter; merge it into its model with peft first"
        )
    check_quantizable(folder, config.model)


def _rating_of(config: RunConfig) -> dict[str, Any]:
    """The arguments of `SavedModel` by which the reward model of a run rates texts."""
    found = reward_model_of(config)
    return {} if found is None else {"rates": "texts", "pad_token": found.get("pad_token_id")}


def _units_of_run(folder: Path, config: RunConfig, vocab_size: int) -> Sequence[UnitSpec]:
    if config.model.native is False:
        return open_pretrained(folder, False, quiet=True).units(ModelGroups())
    return decoder_units(config.model.whole(vocab_size))


def _load_run(folder: Path, config: RunConfig, state: ModelState) -> str:
    """Read the weights of a run's newest intact checkpoint; returns their version.

    Raises:
        ConfigError: all its checkpoints are damaged.
    """
    aliases, grid = state.aliases, state.pipeline.grid
    saved = CheckpointReader(folder / CHECKPOINT_FOLDER, grid, config.identity(), aliases)
    found = saved.latest()
    if found is None:
        path, reason = next(iter(saved.refused.items()))
        raise ConfigError(
            f"all {len(saved.refused)} checkpoints of {folder} are damaged, such as {path.name} ({reason})"
        )
    saved.load(found, state.state(optimizer=False))
    return f"step {found.step} of {config.digest()}"


# ---- Hugging Face


def _open_hugging_face(
    folder: Path, native: Native, precision: Precision | None, quantize: Quantize | None, reproducible: bool
) -> SavedModel:
    try:
        because = reason_for_transformers(folder, native)
        found = open_pretrained(folder, native)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None
    tokenizer = load_tokenizer(str(folder)) if (folder / _TOKENIZER).is_file() else None
    kept_as = quantize or (Quantize.INT8 if found.is_quantized else Quantize.NONE)
    if kept_as is not Quantize.NONE:
        check_quantizable(folder, found.config)
    units = found.units(ModelGroups())

    def arguments(parallel: ParallelConfig) -> EngineArguments:
        return _arguments(open_pretrained(folder, native), parallel, precision, kept_as, reproducible)

    def load(state: ModelState) -> str:
        # The engine's units read them when it was made.
        kept = "" if kept_as is Quantize.NONE else f", {kept_as}"
        return f"{_version(folder)} native={because is None}{kept}"

    return SavedModel(
        folder,
        vocab_size=found.config.vocabulary,
        max_length=found.config.max_length,
        num_units=len(units),
        tokenizer=tokenizer,
        arguments=arguments,
        load=load,
        end_tokens=_hugging_face_ends(folder),
        sampling=generation_defaults(folder),
        lacking=lacking_defaults(folder),
        tokenizer_folder=folder,
        transformers_because=because,
        weight_bytes=lambda: _weight_bytes(units, precision or found.precision, kept_as),
        max_generated_length=cache(lambda: _max_generated_length(units)),
        rates=rates_of(found.form),
        pad_token=found.form.describe().get("pad_token_id"),
    )


def _arguments(
    found: Pretrained, parallel: ParallelConfig, precision: Precision | None, quantize: Quantize, reproducible: bool
) -> EngineArguments:
    """The arguments of an engine that reads the model's weights while it is made, and never again."""
    options = EngineOptions(
        device=parallel.device,
        timeout_s=parallel.timeout_s,
        learns=False,
        precision=precision or found.precision,
        quantize=quantize,
        reproducible=reproducible,
        read_only=precision is not Precision.BF16_AUTOCAST,
    )
    return found.arguments(parallel, options)


def _max_generated_length(units: Sequence[UnitSpec]) -> int:
    limits = units[0].limits
    assert limits is not None, "the first unit of a saved model takes tokens"
    return limits.max_generated_length or limits.max_length


def _weight_bytes(units: Sequence[UnitSpec], precision: Precision | None, quantize: Quantize) -> int:
    return int(sum(unit.num_parameters for unit in units) * bytes_of_weight(precision or Precision.FP32, quantize))


def _hugging_face_ends(folder: Path) -> tuple[int, ...]:
    """The end tokens in the settings for generation, or else in those of the model."""
    for name in (GENERATION_CONFIG, _HUGGING_FACE_CONFIG):
        path = folder / name
        if path.is_file():
            named = read_json_object(path).get("eos_token_id")
            if named is None:
                continue
            ends = tuple(named) if isinstance(named, list) else (named,)
            if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
                raise ConfigError(f"{path}: eos_token_id is {named!r}; a token id or a list of them is expected")
            return ends
    return ()


def _version(folder: Path) -> str:
    """Identify the files by names, sizes and times, since reading all weights would take too long."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
