"""The arguments of an engine for a model that settings or a folder describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine.options import EngineOptions
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.families import HuggingFaceForm
from penstock.settings import Layout, ModelConfig
from penstock.settings.declare import check_argument

UnitSource = Sequence[UnitSpec] | Callable[[ModelGroups], Sequence[UnitSpec]]
"""A model's units, or a function that makes them for the groups that share them."""


def units_for(source: UnitSource, groups: ModelGroups, layout: Layout) -> tuple[UnitSpec, ...]:
    """The units, made for these groups. Raises: ValueError for ready-made units where the layout shares layers."""
    if callable(source):
        units = source(groups)
        check_argument("units", units, Sequence[UnitSpec])
        return tuple(units)
    if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
        raise ValueError(
            f"the layout {layout} shares a model over tp, cp or ep, but its units are given ready-made; "
            "give a function that makes them from ModelGroups, or a layout of pp and dp alone"
        )
    return tuple(source)


class EngineArguments(NamedTuple):
    """The arguments of `Engine` for a model that settings or a folder describe."""

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    layout: Layout
    options: EngineOptions
    form: HuggingFaceForm | None

    @classmethod
    def of_decoder(cls, shape: ModelConfig, layout: Layout, options: EngineOptions) -> EngineArguments:
        form = HuggingFaceForm.of(shape)
        return cls(lambda groups: decoder_units(shape, groups=groups), shape.hidden_size, layout, options, form)
