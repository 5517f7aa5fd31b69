"""The units of a causal model of transformers: everything before its layers, each layer, everything after them.

Sequences of unequal length are padded with their own last token. Since no token sees a later one, padding changes
nothing before it, whatever the family's masks.

Shapes: T tokens of the microbatch or batch, B sequences, L tokens of the longest or of one item, D hidden size, V
vocabulary, S sampled tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.kv_cache import CachedRows, CacheSize
from penstock.model.sequences import Sequences
from penstock.model.transformers.skeleton import LayerArguments, Skeleton
from penstock.schedule import NO_ROW, BatchItem

_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""transformers' names for kinds of layers that keep keys and values alone."""


@dataclass(frozen=True, eq=False)
class PaddedGroup:
    """Sequences padded to one length."""

    #: place -> the microbatch's token there
    rows_BL: Tensor
    #: the places without padding, in the order of their tokens; None without padding
    tokens: Tensor | None
    #: place -> its position in the sequence
    positions_BL: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], starts: tuple[int, ...], sequences: Sequences) -> "PaddedGroup":
        """The arguments for sequences that have these lengths and begin at these tokens of the microbatch."""
        positions_T = sequences.positions
        device, longest = positions_T.device, max(lengths)
        places_L, ends_B1 = torch.arange(longest), torch.tensor(lengths)[:, None] - 1
        within_BL = torch.minimum(places_L[None], ends_B1)
        rows_BL = (torch.tensor(starts)[:, None] + within_BL).to(device)
        beyond_BL = (places_L[None] - within_BL).to(device)
        full = min(lengths) == longest
        tokens = None if full else (beyond_BL == 0).flatten().nonzero().squeeze(1)
        positions_BL = positions_T[rows_BL]
        if not sequences.has_own_positions:
            # Positions of padding continue, so that a family that looks for several texts in a row finds one.
            positions_BL = positions_BL + beyond_BL
        return cls(rows_BL, tokens, positions_BL)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...]."""
        return x.index_select(0, self.rows_BL.flatten()).unflatten(0, self.rows_BL.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> one row for each token of these sequences."""
        flat = x.flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens)


@dataclass(frozen=True, eq=False)
class PaddedGroups:
    """A microbatch's sequences in groups, each padded by itself."""

    groups: tuple[PaddedGroup, ...]
    #: row of the microbatch -> row of the groups' concatenated tokens; None for a single group
    order: Tensor | None

    @classmethod
    def of(cls, sequences: Sequences, by_length: bool) -> "PaddedGroups":
        """All sequences in one group, or with `by_length` one group for each length."""
        starts = tuple(sequences.cu_seqlens.tolist()[:-1])
        numbers = range(len(sequences.lengths))
        lengths = sorted(set(sequences.lengths)) if by_length else [None]
        members = [[n for n in numbers if length in (None, sequences.lengths[n])] for length in lengths]
        groups = tuple(
            PaddedGroup.of(tuple(sequences.lengths[n] for n in group), tuple(starts[n] for n in group), sequences)
            for group in members
        )
        if len(groups) == 1:
            return cls(groups, None)
        return cls(groups, torch.cat([group.unpad(group.rows_BL) for group in groups]).argsort())

    def join(self, parts: list[Tensor]) -> Tensor:
        """The rows of all groups as rows of the microbatch."""
        return parts[0] if self.order is None else torch.cat(parts).index_select(0, self.order)


@dataclass(eq=False)
class RowCaches:
    """transformers' caches of one layer, one for each row."""

    #: the layer's number
    number: int
    #: row -> transformers' cache
    _rows: dict[int, Any] = field(default_factory=dict)

    def of(self, item: BatchItem) -> Any:
        """The cache to which the item adds; a new one if it begins a sequence."""
        if item.start == 0:
            self._rows[item.row] = _new_cache()
        return self._rows[item.row]

    def copy(self, rows: CachedRows) -> None:
        """Copy the beginning of a prompt to rows that share it from the row that has read it."""
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                read, copied = self._rows[item.source].layers[self.number], _new_cache()
                copied.update(read.keys[..., : item.start, :], read.values[..., : item.start, :], self.number)
                self._rows[item.row] = copied


@dataclass(eq=False)
class Past:
    """The tokens before an item, as far as the model without its layers needs them.

    A model computes masks and positions only from the length of its cache.
    """

    #: the model without its layers
    skeleton: Skeleton
    #: the item's positions
    positions_1L: Tensor
    #: an empty cache that is as long as the sequence so far
    stub: Any
    _arguments: dict[torch.dtype, Mapping[int, LayerArguments]] = field(default_factory=dict)

    def arguments(self, rows: CachedRows, dtype: torch.dtype) -> Mapping[int, LayerArguments]:
        """Each layer's arguments for this item, computed once for all layers."""
        if dtype not in self._arguments:
            self._arguments[dtype] = self.skeleton.layer_arguments(self.positions_1L, dtype, self.stub)
        return self._arguments[dtype]


def _new_cache() -> Any:
    """A cache that drops nothing: masks apply the windows, and any beginning of it can be copied."""
    from transformers import DynamicCache

    return DynamicCache()


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of a model's layers beside the hidden states, computed once for all units of a process.

    It holds no parameters.
    """

    #: the model without its layers
    skeleton: Skeleton
    #: True if the arguments depend on the longest sequence, so that sequences of unequal length must not be padded
    #: together
    by_length: bool

    def padded(self, sequences: Sequences) -> PaddedGroups:
        """The sequences in groups. Raises: ValueError if they have positions, and the model takes none."""
        if sequences.has_own_positions and not self.skeleton.takes_positions:
            name = type(self.skeleton.model).__name__
            raise ValueError(f"the batch has the key 'positions', but {name} takes no position_ids; leave the key out")
        return sequences.shared((self, "padded"), lambda: PaddedGroups.of(sequences, self.by_length))

    def arguments(self, sequences: Sequences, dtype: torch.dtype) -> list[Mapping[int, LayerArguments]]:
        """Each group's arguments of each layer, by the layer's number."""
        groups = self.padded(sequences).groups
        return sequences.shared(
            (self, dtype), lambda: [self.skeleton.layer_arguments(group.positions_BL, dtype) for group in groups]
        )

    def check_caches(self) -> None:
        """Refuse a model that caches more than keys and values.

        Raises:
            ValueError: naming the model.
        """
        model: Any = self.skeleton.model
        if type(model).__name__.endswith("Classification"):
            raise ValueError(f"{type(model).__name__} cannot generate: it rates texts and gives no tokens")
        takes = "past_key_values" in inspect.signature(model.forward).parameters
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if not takes or getattr(model, "_is_stateful", False) or not kinds <= _ATTENTION_KINDS:
            raise ValueError(
                f"{type(model).__name__} cannot generate here: it keeps more than keys and values of what it has read"
            )

    def with_pasts(self, x: Tensor, rows: CachedRows) -> Iterator[tuple[Tensor, Past]]:
        """Each item's rows of `x` [T, ...] with its past."""

        def past(item: BatchItem) -> Past:
            stub = _new_cache()
            if item.start:
                nothing = torch.zeros((), device=x.device).expand(1, 1, item.start, 1)
                stub.update(nothing, nothing, 0)
            return Past(self.skeleton, torch.arange(item.start, item.end, device=x.device)[None], stub)

        pasts = rows.shared((self, "pasts"), lambda: list(map(past, rows.items)))
        return zip(x.split([item.length for item in rows.items]), pasts, strict=True)


class _TransformersUnit(nn.Module):
    """A unit whose tables keep their precision when its parameters are cast."""

    inputs: LayerInputs
    #: the part of the unit to compile; what is computed around it depends on the sequences' lengths
    compiles: str | None = None

    def __init__(self, inputs: LayerInputs) -> None:
        super().__init__()
        # Not a submodule, because all units share it.
        self.__dict__["inputs"] = inputs

    def new_cache(self, size: CacheSize) -> RowCaches | None:
        """The unit's cache of tokens that it has read: none, except for layers."""
        self.inputs.check_caches()
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> "_TransformersUnit":
        before = {
            (part, name): part._buffers[name] for part in self.modules() for name in part._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        for (part, name), buffer in before.items():
            now = part._buffers[name]
            if now is not None and buffer is not None:
                part._buffers[name] = buffer.to(now.device)
        return self


class BeforeLayers(_TransformersUnit):
    """Token ids [T] -> the hidden states [T, D] that the first layer receives."""

    def __init__(self, skeleton: Skeleton, inputs: LayerInputs) -> None:
        super().__init__(inputs)
        self.skeleton = skeleton

    def forward(self, tokens_T: Tensor, sequences: Sequences) -> Tensor:
        padded = self.inputs.padded(sequences)
        parts = [
            group.unpad(self.skeleton.before_layers(group.pad(tokens_T), group.positions_BL)) for group in padded.groups
        ]
        return padded.join(parts)

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Token ids [T] of a batch -> hidden states [T, D]."""
        parts = [
            self.skeleton.before_layers(tokens[None], past.positions_1L, past.stub).squeeze(0)
            for tokens, past in self.inputs.with_pasts(x, rows)
        ]
        return torch.cat(parts)


class TransformersLayer(_TransformersUnit):
    """One layer, [T, D] -> [T, D]."""

    compiles = "layer"

    def __init__(self, layer: nn.Module, number: int, inputs: LayerInputs) -> None:
        super().__init__(inputs)
        self.layer, self.number = layer, number

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        padded = self.inputs.padded(sequences)
        parts = []
        for group, by_layer in zip(padded.groups, self.inputs.arguments(sequences, x_TD.dtype), strict=True):
            arguments = by_layer[self.number]
            output = self.layer(group.pad(x_TD), *arguments.args, **arguments.kwargs)
            parts.append(group.unpad(output[0] if isinstance(output, tuple) else output))
        return padded.join(parts)

    def new_cache(self, size: CacheSize) -> RowCaches:
        """A cache of transformers for each row, made when the row is first read."""
        super().new_cache(size)
        return RowCaches(self.number)

    def decode(self, x: Tensor, cache: RowCaches, rows: CachedRows) -> Tensor:
        """[T, D] -> [T, D], item by item; each adds to its row's cache."""
        parts = []
        for (x_LD, past), item in zip(self.inputs.with_pasts(x, rows), rows.items, strict=True):
            arguments = past.arguments(rows, x.dtype)[self.number].instead(past.stub, cache.of(item))
            output = self.layer(x_LD[None], *arguments.args, **arguments.kwargs)
            parts.append((output[0] if isinstance(output, tuple) else output).squeeze(0))
        return torch.cat(parts)


class AfterLayers(_TransformersUnit):
    """Hidden states [T, D] of the last layer -> logits [T, V]."""

    def __init__(self, skeleton: Skeleton, inputs: LayerInputs) -> None:
        super().__init__(inputs)
        self.skeleton = skeleton

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.skeleton.after_layers(x_TD)

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Hidden states [T, D] -> logits [S, V] of the sampled tokens."""
        num_sampled = len(rows.sampled_S)
        # If no token is sampled, one token still gives the width of the logits.
        sampled_SD = x.index_select(0, rows.sampled_S) if num_sampled else x[:1]
        return self.skeleton.after_layers(sampled_SD)[:num_sampled]
