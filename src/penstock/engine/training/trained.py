"""Parameters that require a gradient when a step begins, with their gradients and their optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from torch import nn

from penstock.engine.agreement import build_on_all_ranks
from penstock.engine.optimizer.optimizer import LossScaler, Optimizer
from penstock.engine.pipeline import Pipeline
from penstock.parallel import GradientBuckets
from penstock.parallel.host import gather_json
from penstock.settings import Precision


class TrainedParameters:
    """All that requires a gradient on any rank, as of when ranks last compared.

    Every process of the layout constructs it at the same point and calls its methods in the same order.

    Raises:
        ValueError: when it is made or rebuilt, ranks disagree on a parameter, or one is frozen without the parameter it
            is tied to; on all ranks alike.
    """

    #: this rank's parameters by full name
    parameters: Mapping[str, nn.Parameter]
    #: by parameter, True if it required a gradient when ranks last compared
    required: list[bool]
    #: full names of all that is trained, on any rank
    names: set[str]
    #: local stage -> its flat gradients, which the program's REDUCE_GRAD actions sum over ranks
    buckets: dict[int, GradientBuckets]
    #: steps the parameters of this rank, or with ZeRO its shard of them
    optimizer: Optimizer
    #: this rank's stages
    _pipeline: Pipeline
    #: `Optimizer.num_missed` when gradients and optimizer were made
    _num_missed: Mapping[str, int]

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.parameters = pipeline, pipeline.model.parameters()
        self._compare_ranks()
        self._build({})

    def rebuild(self, num_seen: Mapping[str, int] | None = None) -> None:
        """Give gradients and optimizer state to exactly the parameters that require a gradient now.

        Parameters that are trained already keep their state. That of those which are frozen now is set aside, and given
        back when they are thawed; others begin without one. num_seen: the number of updates that a parameter, of any
        rank, has seen; left out, as the optimizer has counted.
        """
        pipeline, old = self._pipeline, self.optimizer
        num_seen = self._num_seen() if num_seen is None else num_seen
        self._compare_ranks()
        num_missed, seen_by_frozen = self._counts(num_seen)
        state = old.whole_state(pipeline.device, pipeline.grid.control)
        places = [place for of_stage in self.buckets.values() for place in of_stage.places]
        for of_stage in self.buckets.values():
            of_stage.close()
        for place in places:
            if not place.parameter.requires_grad:
                # The bucket's memory goes.
                place.parameter.data = place.parameter.detach().clone()
        self._build(num_missed)
        self.optimizer.take_whole_state(state)
        self.optimizer.load_progress(old.progress() | {"since": num_missed, "paused": seen_by_frozen})

    def rebuild_as_loaded(self) -> None:
        """Rebuild if by the optimizer's progress, which was loaded, parameters have missed other updates."""
        aside = gather_json(sorted(self.optimizer.aside.names), self._pipeline.grid.control)
        num_seen = self._num_seen(itertools.chain.from_iterable(aside))
        num_missed, seen_by_frozen = self._counts(num_seen)
        if num_missed != self._num_missed:
            self.rebuild(num_seen)
        else:
            self.optimizer.num_missed, self.optimizer.num_seen = num_missed, seen_by_frozen

    def _compare_ranks(self) -> None:
        """Learn what requires a gradient on any rank."""
        pipeline = self._pipeline
        rank_values = {name: int(parameter.requires_grad) for name, parameter in self.parameters.items()}
        trained: dict[str, tuple[int, int]] = {}
        for rank, values in enumerate(gather_json(rank_values, pipeline.grid.control)):
            for name, value in values.items():
                other, known = trained.setdefault(name, (rank, value))
                if known != value:
                    raise ValueError(
                        f"{name} requires a gradient on rank {rank if value else other} and none on rank "
                        f"{other if value else rank}; freeze it on every rank that holds it, or on none"
                    )
        for copy, owner in sorted(pipeline.model.ties.originals.items()):
            if copy in trained and owner in trained and trained[copy][1] != trained[owner][1]:
                frozen, other = (owner, copy) if trained[copy][1] else (copy, owner)
                raise ValueError(
                    f"{frozen} is frozen, but {other}, to which it is tied, is not; freeze both or neither"
                )
        self.names = {name for name, (_, value) in trained.items() if value}
        self.required = [parameter.requires_grad for parameter in self.parameters.values()]

    def _build(self, num_missed: Mapping[str, int]) -> None:
        """Make gradients and optimizer of what requires a gradient now. num_missed: see `Optimizer.num_missed`."""
        pipeline, self._num_missed = self._pipeline, num_missed
        self.buckets = build_on_all_ranks(lambda: pipeline.gradient_buckets(num_missed), pipeline.grid.control)
        # Parameters have moved into their buckets.
        pipeline.model.lend_weights()
        pipeline.model.casts.renew()
        options, grid = pipeline.options, pipeline.grid

        def make_optimizer() -> Optimizer:
            optimizer = Optimizer(
                list(self.buckets.values()),
                pipeline.model.parameter_groups,
                grid.control if options.optimizer.zero else grid.model_control,
                pipeline.model.ties.originals,
                LossScaler() if options.precision is Precision.FP16 else None,
                pipeline.model.sharding.norm_names,
            )
            frozen = {name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad}
            optimizer.aside.parameters = frozen
            return optimizer

        self.optimizer = build_on_all_ranks(make_optimizer, grid.control)

    def _num_seen(self, set_aside: Iterable[str] = ()) -> dict[str, int]:
        """The number of updates that a parameter, of any rank, has seen: all, if nothing else is counted of it."""
        optimizer = self.optimizer
        num_seen = dict.fromkeys((*self.names, *set_aside), optimizer.num_updates)
        num_seen |= {name: optimizer.num_updates - num_missed for name, num_missed in optimizer.num_missed.items()}
        return num_seen | optimizer.num_seen

    def _counts(self, num_seen: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """`Optimizer.num_missed` and `Optimizer.num_seen` of what is trained now."""
        num_missed = {name: self.optimizer.num_updates - num_seen.get(name, 0) for name in self.names}
        return (
            {name: number for name, number in num_missed.items() if number},
            {name: number for name, number in num_seen.items() if number and name not in self.names},
        )
