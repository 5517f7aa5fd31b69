"""A model in a folder, a run's or Hugging Face's: its shape, tokens and weights, and the arguments of its engine."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from penstock.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from penstock.engine.checkpoint import CheckpointInfo, CheckpointReader
from penstock.engine.checkpoint.manifest import published
from penstock.engine.folders.runs import (
    CHECKPOINT_FOLDER,
    MODEL_FOLDER,
    RUN_FILE,
    TOKENIZER_FILE,
    read_run,
    tokenizer_of,
)
from penstock.engine.model_state import ModelState
from penstock.engine.optimizer.state import STATE
from penstock.engine.options import EngineArguments, EngineOptions
from penstock.engine.quantization import bytes_of_weight
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.families import (
    CONFIG_FILE,
    STORED_EMBEDDING,
    STORED_HEAD,
    HuggingFaceForm,
    NotNative,
    architecture,
    config_from_json,
    end_tokens_in,
    names_of,
    read_config_json,
    sampling_in,
)
from penstock.model.hf.files import MissingFile, Names, WeightFiles, is_quantized, units_from_files
from penstock.parallel.grid import wait_for_all
from penstock.parallel.host import on_all_ranks
from penstock.settings import (
    ConfigError,
    Layout,
    ModelConfig,
    Native,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Quantize,
    RunConfig,
    ScheduleConfig,
    checked,
)

if TYPE_CHECKING:
    from penstock.model.transformers.model import TransformersModel

_SENTENCEPIECE = "tokenizer.model"
_PRECISIONS = {"F64": Precision.FP64, "F32": Precision.FP32, "BF16": Precision.BF16, "F16": Precision.FP16}


@checked
def open_folder(path: Path | str, native: Native = "auto", **opened: Any) -> ModelFolder:
    """The model in a folder, a run's or else Hugging Face's; `opened`: further fields of `ModelFolder`."""
    folder = Path(path)
    return (RunFolder if (folder / RUN_FILE).is_file() else HfFolder)(folder, native, **opened)


def open_model(folder: Path | str, may_rate: bool = False, **opened: Any) -> ModelFolder:
    """Open a model to score or generate with, and check at once that it can.

    `may_rate`: accepts a model that rates texts instead of giving tokens, such as a reward model. `opened`: further
    arguments of `open_folder`.

    Raises: ValueError if there is no such folder, or it holds no model that can be run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give that of a run, or one of Hugging Face's")
    if not (folder / RUN_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} holds neither a run ({RUN_FILE}) nor a Hugging Face model ({CONFIG_FILE})")
    model = open_folder(folder, **opened)
    model.check()
    if not may_rate:
        model.refuse_classifier()
    return model


@dataclass(eq=False)
class ModelFolder(ABC):
    """A model in a folder. Nothing is written there, and no weight is read before an engine is made.

    Each property is read on first use. Any of them may raise ValueError, for a model that cannot be run, damaged files
    and pickles, or MissingFile, a FileNotFoundError too, with the path.
    """

    folder: Path
    #: the layers that run it: True for Penstock's, False for transformers', "auto" for Penstock's if they know the
    #: family; of no effect for a run
    native: Native = "auto"
    #: precision to score and generate in; None for that of the files or of the run
    precision: Precision | None = None
    #: quantization of the weights of products as they are read; None for that of the files
    quantize: Quantize | None = None
    #: True if tokens get the bits that training gives them; a run's settings may ask for it too
    reproducible: bool = False
    #: True to pass over damaged checkpoints without a warning
    quiet: bool = False

    # ---- the model

    @property
    def source(self) -> Path | None:
        """The folder of the model's config.json; None for a run that began with random weights."""
        return self.folder

    @property
    def config(self) -> ModelConfig:
        """The settings of the decoder, as far as they are known."""
        return self.shape

    @cached_property
    def shape(self) -> ModelConfig:
        """The settings of a decoder of its size, complete also for a model run by transformers."""
        if not self.is_native:
            return self.in_transformers.shape
        shape = config_from_json(self.content)
        # As in transformers, a head in the files that differs from the embedding overrules config.json.
        has_own_head = shape.tie_embeddings and self.source_files.differ(STORED_EMBEDDING, STORED_HEAD)
        return replace(shape, tie_embeddings=False) if has_own_head else shape

    @property
    @abstractmethod
    def transformers_because(self) -> str | None:
        """The reason why transformers' own layers run it; None if Penstock's do."""

    @property
    def has_adapters(self) -> bool:
        """True for the folder of a run that trains adapters."""
        return False

    @cached_property
    def content(self) -> Mapping[str, Any]:
        assert self.source is not None
        return read_config_json(self.source)

    @cached_property
    def source_files(self) -> WeightFiles:
        """The files of weights beside config.json, which is read first."""
        assert self.source is not None and self.content is not None
        return WeightFiles.open(self.source)

    @cached_property
    def in_transformers(self) -> TransformersModel:
        """The model as transformers' own layers."""
        # Imported here, since it loads transformers.
        from penstock.model.transformers.model import TransformersModel

        return TransformersModel.open(self.source_files)

    @property
    def is_native(self) -> bool:
        """True if Penstock's own layers run it."""
        return self.transformers_because is None

    def check_learnable(self) -> None:
        """Refuse to train a model whose loss in transformers has parts that are missing here. Raises: ConfigError."""
        if self.source is not None and self.content.get("output_router_logits"):
            raise ConfigError(
                f"output_router_logits in {self.source / CONFIG_FILE} asks for a loss of all routers together, which "
                "is not computed here; make it false, and balance experts by a loss of model.experts"
            )

    def check_quantizable(self) -> None:
        """Refuse to quantize a model other than a dense native one. Raises: ConfigError."""
        if self.has_adapters or not self.is_native or self.config.experts.num_experts:
            raise ConfigError(
                f"{self.folder} cannot be quantized; only dense models of Penstock's own layers without adapters can, "
                "so leave quantize out"
            )

    # ---- its head: tokens, or ratings

    @property
    def rates(self) -> Literal["texts", "tokens"] | None:
        """The things that a reward model or another classifier rates; None for a model that gives tokens."""
        if self.is_native or not architecture(self.content).endswith("Classification"):
            return None
        return "texts" if architecture(self.content).endswith("SequenceClassification") else "tokens"

    @property
    def is_reward_model(self) -> bool:
        """True for a model that gives each text one number."""
        if self.rates != "texts":
            return False
        # Transformers' default is two labels.
        return self.content.get("num_labels", len(self.content.get("id2label") or (0, 1))) == 1

    @property
    def pad_token(self) -> int | None:
        """The token that pads texts and is not rated."""
        return None if self.rates is None else self.content.get("pad_token_id")

    def refuse_classifier(self, but_reward_models: bool = False) -> None:
        """Refuse a model whose head gives no tokens. Raises: ValueError."""
        if self.rates is not None and not (but_reward_models and self.is_reward_model):
            raise ValueError(
                f"{architecture(self.content)} rates texts and gives no tokens; penstock score writes its "
                "ratings, penstock train takes a reward model, which has one label, and "
                "Engine.from_hf(..., native=False) runs any with a loss of your own"
            )

    # ---- its tokens

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """The value of `data.tokenizer` for its tokenizer. Raises: ValueError if it is not known."""

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of tokenizer, chat template and generation_config.json; None for a model of bytes."""
        return self.folder

    @cached_property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None if the folder has none, so that only token ids can be given."""

    @property
    def vocab_size(self) -> int:
        return self.shape.vocabulary

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, from generation_config.json or else config.json."""
        return end_tokens_in(self.tokenizer_folder)

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """The settings of `SamplingParams` that its generation_config.json names."""
        return sampling_in(self.tokenizer_folder)

    def without_special_tokens(self) -> ModelFolder:
        """A copy of the model whose tokenizer puts no special tokens around a text."""
        folder = copy.copy(self)
        if self.tokenizer is not None:
            folder.tokenizer = self.tokenizer.without_special_tokens()
        return folder

    # ---- its weights

    @property
    def files(self) -> WeightFiles:
        """The files of its weights, as their headers describe them."""
        return self.source_files

    @property
    def names(self) -> Names:
        """The names of its tensors there."""
        return self.form.names

    @property
    def step(self) -> int | None:
        """The step of a run's checkpoint; None for a Hugging Face folder."""
        return None

    @cached_property
    def form(self) -> HuggingFaceForm:
        """Its form in transformers: names and configuration."""
        names = names_of(self.shape) if self.is_native else self.in_transformers.names
        tied = {}
        if self.content.get("tie_word_embeddings"):
            is_tied = None if self.is_native else self.in_transformers.config.tie_word_embeddings
            tied = {"tie_word_embeddings": self.shape.tie_embeddings if is_tied is None else is_tied}
        return HuggingFaceForm(names, lambda: {**self.content, **tied}, self.source)

    @property
    def kept_as(self) -> Quantize:
        """The quantization of the weights of products."""
        return self.quantize or Quantize.NONE

    @cached_property
    def units(self) -> Sequence[UnitSpec]:
        return decoder_units(self.shape) if self.is_native else self.in_transformers.units()

    @cached_property
    def stored_precision(self) -> Precision:
        """The precision of most values in the files; fp32 if an engine has no such precision."""
        num_values: Counter[str] = Counter()
        for name, stored in self.files.tensors.items():
            if not name.startswith(STATE):
                num_values[stored.dtype] += prod(stored.shape)
        return _PRECISIONS.get(max(num_values, key=num_values.__getitem__, default=""), Precision.FP32)

    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        bytes_each = bytes_of_weight(self.precision or self.stored_precision, self.kept_as)
        return int(sum(unit.num_parameters for unit in self.units) * bytes_each)

    def max_generated_length(self) -> int:
        """Tokens of the longest sequence that can be generated."""
        limits = self.units[0].limits
        assert limits is not None, "the first unit of a saved model takes tokens"
        return limits.max_generated_length or limits.max_length

    # ---- its engine

    @abstractmethod
    def check(self) -> None:
        """Check that it can score and generate. Raises: ValueError, FileNotFoundError."""
        if self.kept_as is not Quantize.NONE:
            self.check_quantizable()
        for name in ("tokenizer", "end_tokens", "sampling", "rates"):
            getattr(self, name)

    def arguments(self, parallel: ParallelConfig) -> EngineArguments:
        """The arguments of an engine that scores and generates with the model; `load` comes next.

        Every process of the layout calls this at the same point.
        """
        precision = self.precision or self.stored_precision
        options = EngineOptions(
            device=parallel.device,
            timeout_s=parallel.timeout_s,
            learns=False,
            precision=precision,
            quantize=self.kept_as,
            reproducible=self.reproducible,
            read_only=precision is not Precision.BF16_AUTOCAST,
        )
        return self.arguments_from_files(parallel, options)

    @abstractmethod
    def load(self, state: ModelState) -> str:
        """Read the weights into an engine of `arguments`, on all its ranks; returns a version that identifies them."""

    def arguments_from_files(
        self,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        shape: ModelConfig | None = None,
        learns: bool = False,
    ) -> EngineArguments:
        """The arguments of an engine whose units read the files while it is made, and never again.

        Every process of the engine calls this at the same point, and each raises when one does. Configuration, names,
        shapes and the files' sizes are checked against each other; no value is read.

        `shape`: of the units; it may differ from the model's own in settings of training. `options`: left out, the
        defaults in the files' precision. `learns`: True if the engine will train.
        """

        def check() -> EngineArguments:
            self.refuse_adapters()
            if learns:
                self.check_learnable()
            units, form = self._units_from_files(shape or self.shape), self.form
            if self.is_native:
                # The names in a run's checkpoint are Penstock's own.
                form = replace(form, names=names_of(shape or self.shape))
            engine_options = options or EngineOptions(precision=self.stored_precision)
            return EngineArguments(units, self.shape.hidden_size, layout or Layout(), engine_options, form)

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return check()
        # A group for this check alone, since the engine's are made later.
        wait_for_all()
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        try:
            return on_all_ranks(check, group, MissingFile, ValueError)
        finally:
            dist.destroy_process_group(group)

    def _units_from_files(self, shape: ModelConfig) -> Callable[[ModelGroups], Sequence[UnitSpec]]:
        def units(groups: ModelGroups) -> Sequence[UnitSpec]:
            if not self.is_native and max(groups.tp_size, groups.cp_size, groups.ep_size) > 1:
                raise ValueError("transformers' own layers cannot be shared over tp, cp or ep; native layers can")
            model_units = decoder_units(shape, groups=groups) if self.is_native else self.units
            return units_from_files(model_units, self.names, self.files)

        # Faults of the files are found here.
        units(ModelGroups())
        return units

    def refuse_adapters(self) -> None:
        """Refuse a run that trains adapters as the beginning of another model. Raises: ValueError."""
        if self.has_adapters:
            raise ValueError(
                f"{self.folder} has adapters, which another model cannot begin with; write both as one by penstock "
                "convert --merge-adapters, or give the base model, and adapter.pretrained for one of its adapter-N"
            )


class HfFolder(ModelFolder):
    """A model as transformers writes it: config.json, safetensors files, and usually a tokenizer."""

    @cached_property
    def transformers_because(self) -> str | None:
        if self.native != "auto":
            return None if self.native else "native = false asks for them"
        try:
            config_from_json(self.content)
        except NotNative as error:
            return str(error).rpartition("; ")[0]
        return None

    @property
    def tokenizer_name(self) -> str:
        if any((self.folder / name).is_file() for name in (TOKENIZER_FILE, _SENTENCEPIECE)):
            return str(self.folder.resolve())
        if self.vocab_size > ByteTokenizer(end_token=True).vocab_size:
            raise ValueError(f"it has {self.vocab_size} tokens and no tokenizer.json; give data.tokenizer")
        return "bytes"

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(str(self.folder)) if (self.folder / TOKENIZER_FILE).is_file() else None

    @property
    def kept_as(self) -> Quantize:
        return self.quantize or (Quantize.INT8 if is_quantized(self.content) else Quantize.NONE)

    def check(self) -> None:
        self._units_from_files(self.shape)
        super().check()

    def load(self, state: ModelState) -> str:
        # The units read the files when the engine was made. Names, sizes and times make the version: a hash of all
        # weights would take too long.
        files = [(path.name, path.stat()) for path in sorted(self.folder.iterdir()) if path.is_file()]
        text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
        packing = "" if self.kept_as is Quantize.NONE else f", {self.kept_as}"
        return f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()} native={self.is_native}{packing}"


@dataclass(eq=False)
class RunFolder(ModelFolder):
    """The model of a run: the decoder of its settings with the weights of its newest intact checkpoint."""

    #: the run's settings, with the folder where it lies now as `output`
    run: RunConfig = field(init=False)

    def __post_init__(self) -> None:
        self.run = replace(read_run(self.folder), output=str(self.folder))
        self.precision = self.precision or self.run.train.precision or Precision.FP32
        self.reproducible |= self.run.train.reproducible

    @cached_property
    def checkpoint(self) -> CheckpointInfo:
        """The newest intact checkpoint; unless `quiet`, one process warns of damaged ones."""
        quiet = self.quiet or (dist.is_initialized() and dist.get_rank() > 0)
        return CheckpointReader(self.folder / CHECKPOINT_FOLDER, None, self.run.identity()).existing(quiet)

    @cached_property
    def source(self) -> Path | None:
        """The folder of the model that the run began with; for native layers its copy within the run's."""
        run = self.run
        if self.is_native and (self.folder / MODEL_FOLDER / CONFIG_FILE).is_file():
            return self.folder / MODEL_FOLDER
        while run.model.pretrained is not None:
            folder = Path(run.model.pretrained)
            if not (folder / RUN_FILE).is_file():
                return folder
            run = read_run(folder)
        return None

    @property
    def config(self) -> ModelConfig:
        return self.run.model

    @property
    def transformers_because(self) -> str | None:
        return "it was trained so" if self.run.model.native is False else None

    @property
    def has_adapters(self) -> bool:
        return self.run.adapter.is_used

    @property
    def tokenizer_name(self) -> str:
        return tokenizer_of(self.run)

    @property
    def tokenizer_folder(self) -> Path | None:
        if self.tokenizer_name == "bytes":
            return None
        files = Path(self.tokenizer_name).expanduser()
        return files if files.is_dir() else files.parent

    @cached_property
    def tokenizer(self) -> Tokenizer:
        # A text is scored and continued as it is, without an end token after it.
        tokenizer = load_tokenizer(self.tokenizer_name)
        return tokenizer if self.run.data.special_tokens else tokenizer.without_special_tokens()

    @cached_property
    def _in_training(self) -> Tokenizer:
        """The tokenizer of the run's own texts, which may put an end token after each."""
        return load_tokenizer(self.tokenizer_name, self.run.data.end_token)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        return self._in_training.end_tokens or super().end_tokens

    @cached_property
    def shape(self) -> ModelConfig:
        if not self.is_native:
            return self.in_transformers.shape
        return self.run.model.whole(self._in_training.vocab_size)

    @cached_property
    def files(self) -> WeightFiles:
        return WeightFiles.of_files(self.checkpoint.path, self.checkpoint.files)

    @property
    def names(self) -> Names:
        return self.checkpoint

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @cached_property
    def form(self) -> HuggingFaceForm:
        if not self.is_native or (self.source is not None and (self.source / CONFIG_FILE).is_file()):
            # Its other settings, such as end tokens, still hold.
            return super().form
        form = HuggingFaceForm.of(self.shape)
        if self.tokenizer_name == "bytes":
            return replace(form, bytes_end=bool(self.run.data.end_token))
        return replace(form, folder=self.tokenizer_folder)

    def check(self) -> None:
        if not published(self.folder / CHECKPOINT_FOLDER):
            raise ConfigError(f"{self.folder} holds no checkpoint yet; a run saves one every checkpoint.every steps")
        super().check()

    def arguments(self, parallel: ParallelConfig) -> EngineArguments:
        """As of every model; unless weights are packed, the ranks read the checkpoint together, in `load`."""
        if self.kept_as is not Quantize.NONE:
            return super().arguments(parallel)
        run = replace(
            self.run,
            parallel=parallel,
            train=replace(self.run.train, precision=self.precision, reproducible=self.reproducible),
            # Not for training: a plain cut, and no optimizer.
            schedule=ScheduleConfig(),
            optimizer=OptimizerConfig(),
        )
        options = replace(EngineOptions.of(run), learns=False)
        if not self.is_native:
            assert self.source is not None
            return HfFolder(self.source, native=False).arguments_from_files(parallel, options)
        return EngineArguments.of_decoder(self.shape, parallel, options)

    def load(self, state: ModelState) -> str:
        checkpoints = self.folder / CHECKPOINT_FOLDER
        if self.kept_as is not Quantize.NONE:
            # The units read the checkpoint when the engine was made.
            return f"{published(checkpoints)[-1].name} of {self.run.digest()}, {self.kept_as}"
        saved = CheckpointReader(checkpoints, state.pipeline.grid, self.run.identity(), state.ties)
        state.load_checkpoint(saved, info := saved.existing())
        return f"step {info.step} of {self.run.digest()}"
