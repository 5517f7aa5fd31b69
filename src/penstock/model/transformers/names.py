"""The names of a transformers model's parameters in its files, which may be older than the model's own names.

transformers renames tensors of older files, and stacks the matrices of all experts, which files store separately, in
one parameter. Its own rules are applied; nothing here is specific to a family.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.model.hf.files import Names
from penstock.parallel.tensor_slice import Shape, StoredSlice

FIRST, LAST, OWN = "embedding", "head", "skeleton.model."
"""The first and the last unit, and how names in them begin, of what is outside of the layers."""
_STACKED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""The conversions that can be read in place: experts along the first dimension, parts along the second."""


@dataclass(frozen=True, order=True)
class _StoredTensor:
    """A stored tensor: part `part` of `num_parts` of an expert's matrix, or without an expert a whole parameter."""

    expert: int | None
    part: int
    num_parts: int
    stored: str

    def slice_of(self, shape: Shape) -> StoredSlice:
        """The slice of a parameter of that shape."""
        if self.expert is None:
            return StoredSlice.at(self.stored, shape)
        if self.num_parts == 1:
            return StoredSlice.at(self.stored, shape, self.expert)
        size = shape[1] // self.num_parts
        return StoredSlice.at(self.stored, shape, self.expert, slice(self.part * size, (self.part + 1) * size))


@dataclass(frozen=True)
class TransformersNames(Names):
    """A model's names in its files, by its units' full names."""

    #: the name of the model's list of layers
    path: str
    #: parameter, by its name in transformers' own model -> its stored tensors
    sources: Mapping[str, tuple[_StoredTensor, ...]]
    #: name of a tied parameter -> its owner's name
    owners: Mapping[str, str]
    #: patterns of stored tensors that the model declares unused
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, path: str, owners: Mapping[str, str], stored: Collection[str]) -> "TransformersNames":
        """The names of a whole model with its layers at the path, in files that have these tensors."""
        known, prefix = frozenset(model.state_dict()), getattr(model, "base_model_prefix", "")
        renamings, converters = _rules(model)
        found: dict[str, list[_StoredTensor]] = {}
        for name in stored:
            own, pattern = name, None
            if renamings or converters:
                from transformers.core_model_loading import rename_source_key

                own, pattern = rename_source_key(name, renamings, converters)
            if own not in known:
                # Files of a model without its head omit the prefix.
                others = (f"{prefix}.{own}", own.removeprefix(f"{prefix}."))
                own = next((other for other in others if other in known), own)
            converter = next((rule for rule in converters if pattern in rule.source_patterns), None)
            source = _StoredTensor(None, 0, 1, name)
            if converter is not None and [type(each).__name__ for each in converter.operations] in _STACKED:
                parts = list(converter.source_patterns)
                expert = int(re.findall(r"\.(\d+)\.", name)[-1])
                source = _StoredTensor(expert, parts.index(pattern), len(parts), name)
            elif converter is not None:
                # Unknown, so it is refused as a tensor that belongs to no parameter.
                own = name
            found.setdefault(own, []).append(source)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return cls(path, {own: tuple(sorted(sources)) for own, sources in found.items()}, owners, tuple(ignored))

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
                return tuple(source.slice_of(shape) for source in self.sources[candidate])
        return (StoredSlice.at(name, shape),)

    def is_surplus(self, stored: str) -> bool:
        """True for a stored tensor that no parameter needs: a tied copy, or a tensor that the model computes itself."""
        copies = {source.stored for name in self.owners for source in self.sources.get(name, ())}
        computed = stored.endswith(("inv_freq", "masked_bias")) or any(re.search(p, stored) for p in self.ignored)
        return stored in copies or computed


def _rules(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """transformers' renamings and conversions for this model; it has none before version 5."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return [], []
    rules = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]  # it is transformers' own model
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters
