"""LoRA adapters by the peft library: injected into a model's units, and saved in peft's format.

Only the adapters are trained. peft knows layers by their names in transformers, which a `HuggingFaceForm` gives.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.engine.options import UnitSource, units_for
from penstock.engine.pipeline import Pipeline
from penstock.io.files import refuse_used
from penstock.model import ModelGroups, UnitSpec, switch_linears
from penstock.model.hf.families import HuggingFaceForm
from penstock.model.hf.files import WeightFiles, refuse_unfit_files
from penstock.model.layers.dense import AttentionBlock, MLPBlock
from penstock.parallel.host import broadcast_value, gather_json, on_all_ranks
from penstock.settings import AdapterConfig, Layout

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER = "default"
_FILE = "adapter_model.safetensors"
_MAX_RANK = 65536
_KINDS = ("lora_A", "lora_B")
_PREFIX = "base_model.model."
_BASE = ".base_layer"
_READ = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # These say what the adapter is for, and where it comes from.
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("runtime_config", "megatron_core", "qalora_group_size", "fan_in_fan_out"),
}
"""The fields of peft's LoraConfig that are honoured; any other field must have its default."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The LoRA adapters of a model.

    Raises: ValueError for a variant of LoRA that cannot be trained here, or if peft is not installed.
    """

    config: LoraConfig
    #: the model's names in transformers; None for a user's own layers
    form: HuggingFaceForm | None
    #: a folder in peft's format with the initial values; None for peft's own initialisation
    source: Path | None = None

    @classmethod
    def of(cls, adapter: Any, form: HuggingFaceForm | None) -> Adapter:
        """The adapters of an `AdapterConfig`, a LoraConfig of peft, or a folder in its format."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise ValueError("adapters need the peft library; install it with pip install peft") from None
        source = None
        if isinstance(adapter, AdapterConfig):
            adapter = adapter.pretrained or LoraConfig(
                r=adapter.rank,  # pyright: ignore[reportArgumentType]  # one of the two is given
                # Whole numbers are written as such.
                lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,  # type: ignore[arg-type]
                lora_dropout=adapter.dropout,
                target_modules=list(adapter.target_modules),
                use_rslora=adapter.rank_stabilised,
            )
        if isinstance(adapter, str | Path):
            source = Path(adapter)
            adapter = _config_in(source)
        if not isinstance(adapter, LoraConfig):
            raise ValueError(f"adapter = {adapter!r} is neither a LoraConfig of peft nor a folder in its format")
        config = copy.deepcopy(adapter)
        for name, default in vars(LoraConfig()).items():
            value = getattr(config, name)
            if name not in _READ and value != default and (value or default):
                raise ValueError(f"an adapter with {name} = {value!r} cannot be trained here; {default!r} is possible")
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(f"init_lora_weights = {config.init_lora_weights!r} changes base weights; give True")
        if config.target_modules is None:
            from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL_TARGETS

            kind = None if form is None else form.describe().get("model_type")
            if kind not in USUAL_TARGETS:
                raise ValueError("the adapter names no target_modules, and peft has none for this model; name some")
            config.target_modules = sorted(USUAL_TARGETS[kind])
        config.task_type = config.task_type or "CAUSAL_LM"
        return cls(config, form, source)

    def units(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        """The units with adapters, and all other parameters frozen.

        Raises: ValueError if no layer matches the targets, or one that does cannot have an adapter.
        """
        targets = {unit.name: dict(self._targets(unit)) for unit in units}
        if not any(targets.values()):
            named, excluded = self.config.target_modules, self.config.exclude_modules
            raise ValueError(f"no layer fits the adapter's target_modules = {named}, exclude_modules = {excluded}")
        return tuple(
            replace(
                unit,
                build=partial(self._build, unit, targets[unit.name]),
                initialise=partial(self._initialise, unit, targets[unit.name]),
            )
            for unit in units
        )

    def name_of(self, full_name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The names in transformers of a parameter's parts; full_name: as without adapters."""
        return (full_name,) if self.form is None else self.form.names.in_transformers(full_name, shape)

    def _targets(self, unit: UnitSpec) -> Iterator[tuple[str, str]]:
        """(name in the unit's module, name in transformers) of each linear layer that gets an adapter."""
        with torch.device("meta"):
            module = unit.build()
        for name, part in module.named_modules():
            if ".base_layer" in f".{name}" or "lora_" in name:
                continue
            base = getattr(part, "base_layer", part)
            for parameter_name, parameter in base.named_parameters(recurse=False):
                full_name = unit.full_name(f"{name}.{parameter_name}" if name else parameter_name)
                names = self.name_of(full_name, tuple(parameter.shape))
                stored = [weight.removesuffix(".weight") for weight in names if weight.endswith(".weight")]
                # An adapter can lie over a linear layer that its block calls as a module.
                parent = module.get_submodule(name.rpartition(".")[0])
                is_native = type(parent).__module__.startswith("penstock.model.layers")
                is_called = isinstance(parent, AttentionBlock | MLPBlock) or not is_native
                is_linear = isinstance(base, nn.Linear) or _is_transposed(base)
                in_layer = unit.name.startswith("layers.") and name != ""
                is_possible = in_layer and is_linear and is_called and len(stored) == 1
                is_target = (is_possible or not self.takes_all) and any(map(self._is_target, stored))
                if is_target and not is_possible:
                    raise ValueError(f"{stored[0]} cannot have an adapter; linear layers of attention and MLPs can")
                if is_target:
                    yield name, stored[0]

    @property
    def takes_all(self) -> bool:
        """True if the targets are "all-linear", peft's word for every linear layer of the model."""
        targets = self.config.target_modules
        return isinstance(targets, str) and targets.lower() == "all-linear"

    def _is_target(self, module: str) -> bool:
        """True if the settings name a module (by its name in transformers) and do not exclude it."""
        from peft.tuners.tuners_utils import check_target_module_exists

        config = self.config
        if self.takes_all:
            config = copy.copy(config)
            config.target_modules = [module]
        return bool(check_target_module_exists(config, module))

    def _build(self, unit: UnitSpec, targets: Mapping[str, str]) -> nn.Module:
        from peft import inject_adapter_in_model

        module = unit.build()
        if targets and not any(_adapted_layers(module)):
            config = copy.deepcopy(self.config)
            config.target_modules = "|".join(map(re.escape, targets))
            config.layers_to_transform = config.layers_pattern = config.exclude_modules = None
            config.fan_in_fan_out = any(_is_transposed(module.get_submodule(name)) for name in targets)
            module = inject_adapter_in_model(config, module, _ADAPTER)
            # Their weight gradients can then be deferred too.
            switch_linears(module)
            if self.config.lora_dropout:
                module.has_randomness = True  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".lora_" in f".{name}")
        return module

    def _initialise(self, unit: UnitSpec, targets: Mapping[str, str], module: nn.Module, seed: int) -> None:
        adapted = dict(_adapted_layers(module))
        for name, layer in adapted.items():
            module.set_submodule(name, layer.base_layer)
        try:
            unit.initialise(module, seed)
        finally:
            for name, layer in adapted.items():
                module.set_submodule(name, layer)
        for name, layer in adapted.items():
            key = targets[name]
            with torch.random.fork_rng(devices=[]):
                digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                for part in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
                    if part.weight.is_meta:
                        part.to_empty(device="cpu")
                    if self.config.init_lora_weights is False:
                        # With False peft keeps the initial values of a linear layer.
                        nn.Linear.reset_parameters(part)
                layer.reset_lora_parameters(_ADAPTER, self.config.init_lora_weights)
            if self.source is not None:
                self._read(layer, key)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".lora_" in f".{name}")

    @torch.no_grad()
    def _read(self, layer: Any, key: str) -> None:
        assert self.source is not None
        with safe_open(self.source / _FILE, framework="pt") as file:
            for kind in _KINDS:
                name, weight = f"{_PREFIX}{key}.{kind}.weight", getattr(layer, kind)[_ADAPTER].weight
                if name not in file.keys():  # noqa: SIM118  # no mapping
                    raise ValueError(f"{self.source / _FILE} lacks {name}")
                stored = file.get_tensor(name)
                if stored.shape != weight.shape:
                    raise ValueError(f"{name} has the shape {list(stored.shape)} instead of {list(weight.shape)}")
                weight.copy_(stored)


def _config_in(folder: Path) -> Any:
    """The LoraConfig in a folder of peft's format. Raises: ValueError naming the file, or a link out of the folder."""
    from peft import LoraConfig

    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no adapter of peft's: it has no {path.name}")
    refuse_unfit_files(folder)
    WeightFiles.of_files(folder, [_FILE])
    try:
        config: Any = LoraConfig.from_pretrained(str(folder))
        targets = config.target_modules
        if not 0 < config.r <= _MAX_RANK or not isinstance(targets, str | set | None):
            raise ValueError(f"r is {config.r} and target_modules {targets!r}")
        re.compile(targets if isinstance(targets, str) else "")
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{path} is none of peft's LoRA: {error}") from None
    # peft writes True into every folder, and asks whoever reads one whether it is to be trained.
    config.inference_mode = False
    return config


def with_adapter(units: UnitSource, adapter: Any, form: HuggingFaceForm | None, layout: Layout) -> UnitSource:
    """The source of a model's units with adapters, which are made, and a folder of them read, when an engine asks.

    That raises ValueError if the units cannot have adapters, or tensor-parallel ranks share them.
    """

    def adapted(groups: ModelGroups) -> Sequence[UnitSpec]:
        base_units = units_for(units, groups, layout)
        if groups.tp_size > 1:
            raise ValueError(f"adapters cannot be shared over tp = {groups.tp_size}; pp, dp and cp are possible")
        return Adapter.of(adapter, form).units(base_units)

    return adapted


def save_adapter(pipeline: Pipeline, form: HuggingFaceForm | None, folder: Path | str) -> None:
    """Write the adapters as a new folder in peft's format; all ranks call this at the same point.

    Raises: ValueError if there are none, or the folder is not empty; on all ranks alike.
    """
    setting, grid, folder = pipeline.options.adapter, pipeline.grid, Path(folder)
    if setting is None:
        raise ValueError("this engine has no adapters to save; give one with adapter = LoraConfig(...)")
    adapter, is_first = Adapter.of(setting, form), grid.rank == 0
    on_all_ranks(lambda: refuse_used(folder) if is_first else None, grid.control, ValueError)
    local: dict[str, Tensor] = {}
    for stage in pipeline.model.stages.values() if grid.is_first_of_stages else ():
        stage.wait_for_weights()
        # Second copies are left out.
        for unit, module in stage.units if not stage.suffix else ():
            for name, layer in _adapted_layers(module):
                [stored] = adapter.name_of(f"{unit}.{name}.weight", tuple(layer.base_layer.weight.shape))
                for kind in _KINDS:
                    key = f"{_PREFIX}{stored.removesuffix('.weight')}.{kind}.weight"
                    local[key] = getattr(layer, kind)[_ADAPTER].weight.detach()
    tensors: dict[str, Tensor] = {}
    for rank, has_adapters in enumerate(gather_json(bool(local), grid.control)):
        tensors |= broadcast_value(local, rank, grid.control) if has_adapters else {}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(adapter.config)
        config.inference_mode = True
        if isinstance(config.target_modules, str):
            # A pattern would also match modules around these.
            config.target_modules = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors})
        if form is not None and form.folder is not None:
            config.base_model_name_or_path = str(form.folder)
        config.save_pretrained(str(folder))
        values = {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}
        save_file(values, folder / _FILE, metadata={"format": "pt"})
        # safetensors ignores the umask and writes files that only the user may read.
        shutil.copymode(folder / "adapter_config.json", folder / _FILE)

    on_all_ranks(lambda: write() if is_first else None, grid.control, ValueError)


@torch.no_grad()
def merged_weight(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A tensor of a unit's module with the adapter that lies over it; name: in the module."""
    layer: Any = module.get_submodule(name.rpartition(".")[0].removesuffix(_BASE))
    if not name.endswith(f"{_BASE}.weight"):
        return weight
    return weight + layer.get_delta_weight(_ADAPTER).to(weight.dtype)


def _adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "base_layer"):
            yield name, part


def _is_transposed(part: nn.Module) -> bool:
    """True for the linear layer of GPT-2 in transformers, whose weight is [inputs, outputs]."""
    return type(part).__name__ == "Conv1D" and type(part).__module__ == "transformers.pytorch_utils"
