"""Any causal model of transformers as a list of units: everything before its layers, each layer, everything after.

Its modules are built without values; when a rank builds a unit, the values come from the folder's files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.model.hf.files import Names, WeightFiles
from penstock.model.linear import switch_linears
from penstock.model.transformers.skeleton import Skeleton, list_of_layers, uses_outside
from penstock.model.transformers.units import AfterLayers, BeforeLayers, TransformersLayer
from penstock.model.units import Limits, UnitSpec
from penstock.parallel.tensor_slice import Shape, StoredSlice
from penstock.settings import ModelConfig

_NO_LIMIT, _NO_TOKEN = 2**31 - 1, -1
_PER_SEQUENCE, _PER_TOKEN = "ForSequenceClassification", "ForTokenClassification"
"""The ends of the names of classes with a classifier as their head, such as a reward model's or a value head."""


@dataclass(frozen=True, eq=False)
class TransformersModel:
    """A causal model of transformers, taken apart."""

    #: everything but the layers, without values
    skeleton: Skeleton
    #: the layers, without values
    layers: Sequence[nn.Module]
    config: Any
    #: the slots of the first unit, and those of the last
    first: frozenset[str]
    last: frozenset[str]
    #: the names in the files
    names: TransformersNames

    @classmethod
    def open(cls, files: WeightFiles) -> TransformersModel:
        """Build the modules of the model that the folder's config.json describes, and find where to cut them.

        Raises:
            ValueError: transformers has no such causal model, or it cannot be cut into its layers.
        """
        model, config = _without_values(files)
        name, text = type(model).__name__, config.get_text_config()
        path = list_of_layers(model, text.num_hidden_layers)
        owners = _owners(model)
        names = TransformersNames.of(model, path, owners, files.tensors)
        if any(files.differ(one.name, other.name) for one, other in names.stored_twice()):
            # As transformers itself does with them.
            model, config = _without_values(files, tied=False)
            owners = _owners(model)
            names = TransformersNames.of(model, path, owners, files.tensors)
        for one, other in names.stored_twice():
            if files.differ(one.name, other.name):
                raise ValueError(f"{files.folder} has other values in {one.name} than in {other.name}; {name} has one")
        layers = list(model.get_submodule(path).children())
        skeleton = Skeleton(model, path)
        skeleton.drop_parameters()
        before, after = uses_outside(skeleton, text.vocab_size)
        if shared := [slot for slot, owner in owners.items() if f"{path}." in f"{slot} {owner}"]:
            raise ValueError(f"{name} shares {shared[0]} between layers, so they cannot be cut")
        both = [slot for slot, owner in owners.items() for part in (before, after) if slot in part and owner in part]
        if both:
            raise ValueError(f"{name} uses {both[0]} and {owners[both[0]]}, one parameter, on one side of its layers")
        # Unused parameters belong to the first unit, so that they are not lost when the model is saved.
        first = frozenset(skeleton.hollow) - (after - before)
        return cls(skeleton, layers, config, first, after, names)

    @property
    def shape(self) -> ModelConfig:
        """The settings that any model has; of heads and widths inside a layer they say nothing."""
        text, limits = self.config.get_text_config(), self._limits()
        return ModelConfig(
            native=False,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            num_heads=1,
            head_dim=2,
            max_length=limits.max_length if limits else _NO_LIMIT,
        )

    def units(self) -> tuple[UnitSpec, ...]:
        """The model's units, without values."""
        rope = str(self.config.to_dict().get("rope_parameters"))
        inputs = copy.deepcopy(self.skeleton)
        # Rotary tables that depend on the longest text in the batch.
        inputs.by_length = "dynamic" in rope or "longrope" in rope

        def layer(number: int) -> nn.Module:
            module = copy.deepcopy(self.layers[number])
            switch_linears(module)
            return TransformersLayer(module, number, inputs)

        tied = {}
        for slot in self.last:
            owners = self.names.owners
            same = {slot} | {s for s, owner in owners.items() if owner == slot} | {owners.get(slot, slot)}
            if both := sorted(same & self.first):
                tied[OWN + slot] = f"{FIRST}.{OWN}{both[0]}"
        last = _spec(LAST, lambda: AfterLayers(inputs, self._part(self.last)), tied)
        return (
            replace(_spec(FIRST, lambda: BeforeLayers(inputs, self._part(self.first))), limits=self._limits()),
            *(_spec(f"layers.{i}", lambda i=i: layer(i)) for i in range(len(self.layers))),
            replace(last, flops_if_read=last.flops_per_token),
        )

    def _limits(self) -> Limits | None:
        """The model's limits; None if its config.json does not limit the length of a text."""
        text = self.config.get_text_config()
        length = getattr(text, "max_position_embeddings", None)
        if length is None:
            return None
        # From this length on such a rotation turns by other factors.
        rope = getattr(text, "rope_parameters", None) or {}
        before_change = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        return Limits(text.vocab_size, length, max_generated_length=before_change)

    def _part(self, slots: frozenset[str]) -> Skeleton:
        part = copy.deepcopy(self.skeleton)
        for name in slots:
            shape = part.hollow.pop(name)
            path, _, own = name.rpartition(".")
            owner = part.model.get_submodule(path)
            owner.__dict__.pop(own, None)
            owner.register_parameter(own, nn.Parameter(torch.empty(shape, device="meta")))
        switch_linears(part)
        return part


class _EmptyOnMeta(TorchFunctionMode):
    """Within this context uninitialised tensors (parameters) take no memory; tables are computed as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def _without_values(files: WeightFiles, tied: bool = True) -> tuple[nn.Module, Any]:
    """The model of a folder, and its config; with `tied` false its head is no embedding, whatever config.json says."""
    from transformers import AutoConfig

    folder = files.folder
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text, num_tensors = config.get_text_config(), len(files.tensors)
        # Refused, since the library would build it for hours.
        if text.num_hidden_layers > num_tensors:
            raise ValueError(f"it has {text.num_hidden_layers} layers, and its files only {num_tensors} tensors")
        if "/" in str(config._attn_implementation):
            raise ValueError(f"it names {config._attn_implementation!r}, code from elsewhere, which is never run")
        if not tied:
            config.tie_word_embeddings = text.tie_word_embeddings = False
        # Of training alone; a model without layers has none.
        if hasattr(text, "output_router_logits"):
            text.output_router_logits = False
        with torch.device("cpu"), _EmptyOnMeta():
            model = _auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
        if type(model).__name__.endswith(_PER_SEQUENCE):
            # Each token is run as a sequence of its own, so none is padding; but the embedding has its row for it.
            model.config.get_text_config().pad_token_id = _NO_TOKEN
    except Exception as error:  # whatever the library stumbles over in a config.json
        # A list of all types that it knows may be one.
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"transformers cannot build the causal model of {folder}: {reason}") from None
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                # Scales of norms, which are created as ones.
                part._parameters[name] = nn.Parameter(parameter.to("meta"))
    return model.eval(), config


def _auto_class(config: Any) -> Any:
    """transformers' class of models with the head that config.json names: of a language model where it names none."""
    import transformers

    named = (getattr(config, "architectures", None) or [""])[0]
    if named.endswith(_PER_SEQUENCE):
        return transformers.AutoModelForSequenceClassification
    if named.endswith(_PER_TOKEN):
        return transformers.AutoModelForTokenClassification
    has_encoder = config.is_encoder_decoder and not named.endswith("ForCausalLM")
    is_known = type(config) in transformers.AutoModelForCausalLM._model_mapping
    if has_encoder or named.endswith("ForMaskedLM") or not is_known:
        raise ValueError(
            f"{named or config.model_type} is no causal language model; possible are models of a decoder alone "
            "(...ForCausalLM), or its layers as your own (Engine.from_layers, as in examples/encoder_decoder.py)"
        )
    return transformers.AutoModelForCausalLM


def _owners(model: nn.Module) -> dict[str, str]:
    """Slots with a parameter that an earlier slot has too: slot -> the earlier one."""
    first: dict[int, str] = {}
    owners: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            owners[name] = owner
    return owners


def _spec(name: str, build: Any, tied: Mapping[str, str] | None = None) -> UnitSpec:
    def no_values(module: nn.Module, seed: int) -> None:
        raise AssertionError("the values of a model of transformers come from its files")

    with torch.device("meta"):
        module = build()
    num_parameters = sum(p.numel() for p in module.parameters())
    # A lookup costs next to nothing; all other units multiply by each of their weights once.
    num_looked_up = num_parameters if name == FIRST else 0
    return UnitSpec(name, build, no_values, num_parameters, 2.0 * (num_parameters - num_looked_up) + 1.0, tied or {})


# ---- The names of a transformers model's parameters in its files, which may be older than the model's own names


FIRST, LAST, OWN = "embedding", "head", "skeleton.model."
"""The first and the last unit, and how names in them begin, of what is outside of the layers."""
_STACKED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""The conversions that can be read in place: experts along the first dimension, parts along the second."""


@dataclass(frozen=True)
class TransformersNames(Names):
    """A model's names in its files, by its units' full names."""

    #: the name of the model's list of layers
    path: str
    #: parameter, by its name in transformers' own model -> its stored tensors
    sources: Mapping[str, tuple[StoredSlice, ...]]
    #: name of a tied parameter -> its owner's name
    owners: Mapping[str, str]
    #: patterns of stored tensors that the model declares unused
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, path: str, owners: Mapping[str, str], stored: Collection[str]) -> TransformersNames:
        """The names of a whole model with its layers at the path, in files that have these tensors."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        prefix = getattr(model, "base_model_prefix", "")
        whole: Any = model
        rules: list[Any] = get_model_conversion_mapping(whole)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        found: dict[str, list[StoredSlice]] = {}
        for name in stored:
            own, pattern = rename_source_key(name, renamings, converters)
            if own not in known:
                # Files of a model without its head omit the prefix.
                others = (f"{prefix}.{own}", own.removeprefix(f"{prefix}."))
                own = next((other for other in others if other in known), own)
            converter = next((rule for rule in converters if pattern in rule.source_patterns), None)
            # Conversions that cannot be read in place: refused, like any tensor that belongs to no parameter.
            is_read = converter is None or [type(each).__name__ for each in converter.operations] in _STACKED
            if own not in known or not is_read:
                continue
            if converter is None:
                source = StoredSlice.at(name, known[own])
            else:
                # One of the parts of an expert's matrix, which lie one after another.
                parts: list[Any] = list(converter.source_patterns)
                expert = int(re.findall(r"\.(\d+)\.", name)[-1])
                size, part = known[own][1] // len(parts), parts.index(pattern)
                source = StoredSlice.at(name, known[own], expert, slice(part * size, (part + 1) * size))
            found.setdefault(own, []).append(source)
        sources = {
            own: tuple(sorted(slices, key=lambda one: (one.part.start, one.name))) for own, slices in found.items()
        }
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return cls(path, sources, owners, tuple(ignored))

    def stored_twice(self) -> Iterator[tuple[StoredSlice, StoredSlice]]:
        """The stored tensors of tied parameters, each with that of its owner, where both are there."""
        for name, owner in self.owners.items():
            yield from zip(self.sources.get(name, ()), self.sources.get(owner, ()))

    def in_transformers(self, full_name: str, shape: Shape) -> tuple[str, ...]:
        unit, _, rest = full_name.partition(".")
        if unit in (FIRST, LAST):
            return (rest.removeprefix(OWN),)
        number, _, own = rest.partition(".layer.")
        return (f"{self.path}.{number}.{own}",)

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        [name] = self.in_transformers(full_name, shape)
        # A tied parameter may be stored under another of its names.
        owner = self.owners.get(name, name)
        for candidate in (name, owner, *(other for other, of in self.owners.items() if of == owner)):
            if candidate in self.sources:
                return self.sources[candidate]
        return (StoredSlice.at(name, shape),)

    def is_surplus(self, stored: str) -> bool:
        """True for a stored tensor that no parameter needs: a tied copy, or a tensor that the model computes itself."""
        copies = {source.name for name in self.owners for source in self.sources.get(name, ())}
        computed = stored.endswith(("inv_freq", "masked_bias")) or any(re.search(p, stored) for p in self.ignored)
        return stored in copies or computed
