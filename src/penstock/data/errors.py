"""What a user can get wrong in data, one named kind each; all are `ValueError`s whose text is one clear sentence."""


class BatchError(ValueError):
    """A batch contradicts itself; `field` names the part that does ("ids", "lengths['tokens']", ...)."""

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self):
        return type(self), (self.field, self.problem)


class IdError(BatchError):
    """Ids are missing, repeated, of the wrong type, or differ between batches that must agree."""


class KeyMismatch(BatchError):
    """Two parts of a batch, or two batches, do not have the same keys."""


class LengthError(BatchError):
    """A length is not a positive Python int, or the number of lengths is not the number of items."""


class ShapeMismatch(BatchError):
    """A tensor's shape is not the one its lengths and trailing shape promise."""


class DtypeMismatch(BatchError):
    """A tensor's dtype is not the declared one."""


class MetadataError(BatchError):
    """Metadata is not one list with one value per item."""


class PartitionError(ValueError):
    """Parts of a batch overlap, leave items out, or are empty; or indices are no permutation."""


class SplitError(ValueError):
    """A batch cannot be split as the specification asks."""


class ItemTooLong(SplitError):
    """One item alone exceeds the token budget of a microbatch."""


class TooFewItems(SplitError):
    """There are fewer items than microbatches asked for."""


class CorpusError(ValueError):
    """A corpus is missing, empty, unreadable, or does not fit the model."""


class LoaderStateError(ValueError):
    """A saved position belongs to another corpus, packing or order, or is damaged."""
