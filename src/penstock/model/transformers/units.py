"""The units of a causal model of transformers: everything before its layers, each layer, everything after them.

Sequences of unequal length are padded with their own last token. Since no token sees a later one, padding changes
nothing before it, whatever the family's masks.

Shapes: T tokens of the microbatch or batch, B sequences, L tokens of the longest or of one item, D hidden size, V
vocabulary, S sampled tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.kv_cache import CachedRows, CacheSize
from penstock.model.sequences import Sequences, only_read
from penstock.model.transformers.skeleton import Skeleton, cache_argument
from penstock.schedule import NO_ROW, BatchItem

_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""transformers' names for kinds of layers that keep keys and values alone."""


@dataclass(frozen=True, eq=False)
class TokenGroup:
    """Tokens that the model's own code computes at once: sequences padded to one length, or an item in generation."""

    #: place -> the microbatch's or batch's token there
    rows_BL: Tensor
    #: place -> its position in the sequence
    positions_BL: Tensor
    #: the places without padding, in the order of their tokens; None without padding
    tokens: Tensor | None = None
    item: BatchItem | None = None
    #: in generation, an empty cache that is as long as the sequence so far: a model computes masks and positions only
    #: from its cache's length
    past: Any = None

    @classmethod
    def of_sequences(cls, sequences: Sequences, by_length: bool) -> "list[TokenGroup]":
        """All sequences in one group, or with `by_length` one group for each length."""
        positions_T, starts_B = sequences.positions, sequences.cu_seqlens[:-1].cpu()
        device, lengths_B = positions_T.device, torch.tensor(sequences.lengths)
        groups = []
        for length in sorted(set(sequences.lengths)) if by_length else [None]:
            members = slice(None) if length is None else lengths_B == length
            ends_B1 = lengths_B[members, None] - 1
            longest = int(ends_B1.max()) + 1
            within_BL = torch.minimum(torch.arange(longest), ends_B1)
            rows_BL = (starts_B[members, None] + within_BL).to(device)
            beyond_BL = (torch.arange(longest) - within_BL).to(device)
            full = int(ends_B1.min()) + 1 == longest
            tokens = None if full else (beyond_BL == 0).flatten().nonzero().squeeze(1)
            positions_BL = positions_T[rows_BL]
            if not sequences.has_own_positions:
                # Positions of padding continue, so that a family that looks for several texts in a row finds one.
                positions_BL = positions_BL + beyond_BL
            groups.append(cls(rows_BL, positions_BL, tokens))
        return groups

    @classmethod
    def of_items(cls, rows: CachedRows) -> "list[TokenGroup]":
        """Each item of a batch alone."""
        groups, device = [], rows.positions.device
        rows_T = torch.arange(rows.num_tokens, device=device)
        for item, rows_L in zip(rows.items, rows_T.split([item.length for item in rows.items]), strict=True):
            past = _new_cache()
            if item.start:
                nothing = torch.zeros((), device=device).expand(1, 1, item.start, 1)
                past.update(nothing, nothing, 0)
            positions_1L = torch.arange(item.start, item.end, device=device)[None]
            groups.append(cls(rows_L[None], positions_1L, item=item, past=past))
        return groups

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...]."""
        return x.index_select(0, self.rows_BL.flatten()).unflatten(0, self.rows_BL.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> one row for each token of this group."""
        flat = x.flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens)


@dataclass(eq=False)
class RowCaches:
    """transformers' caches of one layer, one for each row."""

    #: the layer's number
    number: int
    #: row -> transformers' cache
    _rows: dict[int, Any] = field(default_factory=dict)

    def of(self, item: BatchItem) -> Any:
        """The cache to which the item adds: what the row holds up to there, and a new one if it begins a sequence."""
        if item.start == 0:
            self._rows[item.row] = _new_cache()
        cache = self._rows[item.row]
        # A row may hold more of a prompt that begins alike, and its answer.
        if (num_more := cache.get_seq_length(self.number) - item.start) > 0:
            cache.crop(-num_more)
        return cache

    def copy(self, rows: CachedRows) -> None:
        """Copy the beginning of a prompt to rows that share it from the row that has read it."""
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                read, copied = self._rows[item.source].layers[self.number], _new_cache()
                copied.update(read.keys[..., : item.start, :], read.values[..., : item.start, :], self.number)
                self._rows[item.row] = copied


def _new_cache() -> Any:
    """A cache that drops nothing: masks apply the windows, and any beginning of it can be copied."""
    from transformers import DynamicCache

    return DynamicCache()


class _TransformersUnit(nn.Module):
    """A unit whose tables keep their precision when its parameters are cast."""

    #: the model without its layers and without values: it computes the layers' inputs beside the hidden states, once
    #: for all units of a process
    inputs: Skeleton
    #: the part of the unit to compile; what is computed around it depends on the sequences' lengths
    compiles: str | None = None

    def __init__(self, inputs: Skeleton, skeleton: Skeleton | None = None) -> None:
        super().__init__()
        # Not a submodule, because all units share it.
        self.__dict__["inputs"] = inputs
        if skeleton is not None:
            self.skeleton = skeleton

    def groups(self, rows: Sequences | CachedRows) -> list[TokenGroup]:
        """The sequences in groups, each padded by itself, or each item alone.

        Raises: ValueError if sequences have positions, and the model takes none.
        """
        key = self.inputs, "groups"
        if isinstance(rows, CachedRows):
            return rows.shared(key, lambda: TokenGroup.of_items(rows))
        if rows.has_own_positions and not self.inputs.takes_positions:
            name = type(self.inputs.model).__name__
            raise ValueError(f"the batch has the key 'positions', but {name} takes no position_ids; leave the key out")
        return rows.shared(key, lambda: TokenGroup.of_sequences(rows, self.inputs.by_length))

    def join(self, rows: Sequences | CachedRows, parts: list[Tensor]) -> Tensor:
        """The rows of all groups as rows of the microbatch or batch."""
        if len(parts) == 1:
            return parts[0]
        joined = torch.cat(parts)
        if isinstance(rows, CachedRows):
            return joined
        groups = self.groups(rows)
        order = rows.shared(
            (self.inputs, "order"), lambda: torch.cat([group.unpad(group.rows_BL) for group in groups]).argsort()
        )
        return joined.index_select(0, order)

    def new_cache(self, size: CacheSize) -> RowCaches | None:
        """The unit's cache of tokens that it has read: none, except for layers.

        Raises:
            ValueError: the model caches more than keys and values; names it.
        """
        model: Any = self.inputs.model
        name, takes = type(model).__name__, cache_argument(model) is not None
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if name.endswith("Classification"):
            raise ValueError(f"{name} cannot generate: it rates texts and gives no tokens")
        if not takes or getattr(model, "_is_stateful", False) or not kinds <= _ATTENTION_KINDS:
            raise ValueError(f"{name} cannot generate here: it keeps more than keys and values of what it has read")
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

    def forward(self, tokens_T: Tensor, sequences: Sequences | CachedRows) -> Tensor:
        parts = [
            group.unpad(self.skeleton.before_layers(group.pad(tokens_T), group.positions_BL, group.past))
            for group in self.groups(sequences)
        ]
        return self.join(sequences, parts)

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Token ids [T] of a batch -> hidden states [T, D]."""
        return self.forward(x, rows)


class TransformersLayer(_TransformersUnit):
    """One layer, [T, D] -> [T, D]."""

    compiles = "layer"

    def __init__(self, layer: nn.Module, number: int, inputs: Skeleton) -> None:
        super().__init__(inputs)
        self.layer, self.number = layer, number

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.decode(x_TD, None, sequences)

    def new_cache(self, size: CacheSize) -> RowCaches:
        """A cache of transformers for each row, made when the row is first read."""
        super().new_cache(size)
        return RowCaches(self.number)

    def decode(self, x: Tensor, cache: RowCaches | None, rows: Sequences | CachedRows) -> Tensor:
        """[T, D] -> [T, D], group by group; each item adds to its row's cache."""
        groups, parts = self.groups(rows), []
        # Computed once for all layers.
        arguments = rows.shared(
            (self.inputs, x.dtype),
            lambda: [self.inputs.layer_arguments(group.positions_BL, x.dtype, group.past) for group in groups],
        )
        for group, by_layer in zip(groups, arguments, strict=True):
            args, kwargs = by_layer[self.number]
            if cache is not None and group.item is not None:
                own = cache.of(group.item)
                args = tuple(own if value is group.past else value for value in args)
                kwargs = {name: own if value is group.past else value for name, value in kwargs.items()}
            output = self.layer(group.pad(x), *args, **kwargs)
            parts.append(group.unpad(output[0] if isinstance(output, tuple) else output))
        return self.join(rows, parts)


class AfterLayers(_TransformersUnit):
    """Hidden states [T, D] of the last layer -> logits [T, V]."""

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.skeleton.after_layers(only_read(x_TD, sequences.read_rows))

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Hidden states [T, D] -> logits [S, V] of the sampled tokens."""
        num_sampled = len(rows.sampled_S)
        # If no token is sampled, one token still gives the width of the logits.
        sampled_SD = x.index_select(0, rows.sampled_S) if num_sampled else x[:1]
        return self.skeleton.after_layers(sampled_SD)[:num_sampled]
