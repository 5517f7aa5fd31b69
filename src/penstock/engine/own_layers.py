"""A user's own layers: what they ask for of a microbatch by name, and what they give each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.data import PackedBatch
from penstock.engine.build import autocast_of
from penstock.engine.messages import KeyShapes, find_messages
from penstock.model import Given, Randomness, UnitSpec
from penstock.runtime import Boundary, Stage, UnitCall
from penstock.runtime.message import SEQUENCES
from penstock.settings import Precision


class OwnLayers:
    """The layers of this rank that are called by the names of their parameters."""

    #: all units of the model, in order
    _units: Sequence[UnitSpec]
    #: stage -> its units, as positions in `_units`; those of a second copy are not listed
    _cut: Sequence[range]
    #: the stages of this rank by number
    _stages: Mapping[int, Stage]
    #: the plain stream between stages
    _boundary: Boundary
    #: precision of the layers' forwards
    _precision: Precision
    #: their calls, stage by stage
    _calls: list[UnitCall]
    #: the keys of the last batch
    _shapes: KeyShapes | None
    #: True if some layer of the model gives more than the plain stream
    _has_messages: bool
    #: the number of classes of the last layer's logits; None if that is not known without data
    num_classes: int | None

    def __init__(
        self,
        units: Sequence[UnitSpec],
        cut: Sequence[range],
        stages: Mapping[int, Stage],
        boundary: Boundary,
        precision: Precision,
    ) -> None:
        self._units, self._cut, self._stages = units, cut, stages
        self._boundary, self._precision = boundary, precision
        self._calls = [call for stage in stages.values() for call in stage.calls]
        self._shapes, self._has_messages, self.num_classes = None, False, None

    def given(self, own: PackedBatch, device: torch.device, randomness: Randomness | None) -> Given:
        """All that this rank's units ask for of their microbatch by name, of which `own` is this rank's part."""
        wanted = {key for call in self._calls for key in call.parameters.wanted(own.keys)}
        num_rows: dict[str, int] = {}
        if self._has_messages:
            num_rows = {SEQUENCES: len(own.sequence_lengths("tokens"))}
            num_rows |= {key: sum(own.item_lengths(key)) for key in own.keys}
        return Given({key: own[key].to(device) for key in sorted(wanted)}, randomness, num_rows)

    def prepare_for(self, batch: PackedBatch) -> None:
        """Find out what the layers give each other for batches with these keys.

        Raises:
            ValueError: a layer of this rank needs more, or gives what cannot go on; names the layer.
        """
        if all(unit.is_own for unit in self._units) and (shapes := KeyShapes.of(batch)) != self._shapes:
            self._find_messages(shapes)
        self._check_keys(batch)

    def _find_messages(self, shapes: KeyShapes) -> None:
        layers = [(unit.name, unit.build()) for unit in self._units]
        autocast, boundary = (
            autocast_of(self._precision, torch.device("cpu")),
            next(iter(self._stages.values())).boundary,
        )
        findings = find_messages(layers, shapes, boundary.hidden_size, boundary.dtype, autocast())
        found, self.num_classes = findings.layers, findings.num_columns
        self._shapes, self._has_messages = shapes, any(one.message is not None for one in found)
        for number, stage in self._stages.items():
            members = self._cut[number % len(self._cut)]
            for call, member in zip(stage.calls, members, strict=True):
                call.takes = found[member - 1].message if member else None
                if member < len(found):
                    call.gives, call.not_found = found[member].message, found[member].reason
            stage.takes, stage.gives = stage.calls[0].takes, stage.calls[-1].gives

    def _check_keys(self, batch: PackedBatch) -> None:
        for call in self._calls:
            if missing := call.missing(batch.keys):
                raise ValueError(
                    f"{call.name} takes {missing[0]!r}, which has no default and is no key of the batch; its keys are "
                    f"{sorted(batch.keys)}"
                )
            if (beyond := call.parameters.unreachable(batch.keys)) is not None:
                raise ValueError(
                    f"{call.name} hands on arguments by position alone, so {beyond[0]!r} needs {beyond[1]!r} before "
                    "it, which is no key of the batch; let its forward take **kwargs, too"
                )
            for key in call.parameters.wanted(batch.keys):
                if batch.data is None:
                    raise ValueError(f"{call.name} takes the key {key!r}, but this rank was given metadata alone")
