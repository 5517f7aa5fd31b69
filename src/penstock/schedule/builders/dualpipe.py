"""Two streams of microbatches that meet on every rank; the forward of one is fused with the backward of the other."""

from collections import deque
from dataclasses import dataclass, field

from penstock.schedule.actions import Action, Op, Pair, Schedule, Step, peak_tapes
from penstock.schedule.builders.orders import check_stages_per_rank
from penstock.schedule.builders.registry import builder
from penstock.schedule.placement import Placement, PlacementKind


@builder("dualpipe-v")
def dualpipe_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """DualPipe folded into a V: fused pairs that hide communication, with one copy of the model.

    Every microbatch runs down the ranks through their first stages and back up through their second ones. With 2p or
    more microbatches a rank is idle for (p-1)(F&B + B - 3W), where F&B is the time of a pair and B that of a full
    backward, and holds 2p+1 tapes at the peak.

    Raises: ValueError for counts below one, or other than two stages a rank.

    Source: DeepSeek-AI, DualPipe (github.com/deepseek-ai/DualPipe), DualPipeV.
    """
    check_stages_per_rank("dualpipe-v", stages_per_rank, 2)
    placement = Placement(PlacementKind.V, ranks, stages_per_rank)
    num_turns = max(microbatches, 2 * ranks)
    orders = []
    for rank in range(ranks):
        near, far = (_Stream(stage, range(microbatches)) for stage in placement.stages_of(rank))
        orders.append(_GrowingOrder(near, far, to_middle=ranks - rank - 1, from_end=rank + 1).steps(num_turns))
    return Schedule("dualpipe-v", placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))


@builder("dualpipe")
def dualpipe(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Microbatches enter at both ends at once, each half with its own copy of the model; pairs are fused.

    A rank holds a stage of each direction, and the gradients of the two copies are summed. For even p and at least p
    microbatches in each direction a rank is idle for (p/2-1)(F&B + B - 3W) and holds p+1 tapes at the peak. An odd p is
    ordered like p+1 with one of the two middle ranks left out.

    Raises: ValueError for counts below one, or other than two stages a rank.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2.1, figure 5.
    """
    check_stages_per_rank("dualpipe", stages_per_rank, 2)
    placement = Placement(PlacementKind.BIDIRECTIONAL, ranks, stages_per_rank)
    empty = Schedule("dualpipe", placement, microbatches, ((),) * ranks)
    half = -(-ranks // 2)
    num_turns = max(-(-microbatches // 2), 2 * half)
    orders = []
    for rank in range(ranks):
        down, up = (_Stream(stage, empty.microbatches_of(stage)) for stage in placement.stages_of(rank))
        near, far = (down, up) if rank < half else (up, down)
        place = min(rank, ranks - rank - 1)
        orders.append(_GrowingOrder(near, far, to_middle=half - place - 1, from_end=place + 1).steps(num_turns))
    return Schedule("dualpipe", placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))


@dataclass
class _Stream:
    """The microbatches that pass through one local stage.

    A turn beyond the last gives no action; the rest of the order stays legal without it.
    """

    stage: int
    microbatches: range
    num_forwards: int = 0
    num_backwards: int = 0

    def forward(self) -> list[Action]:
        self.num_forwards += 1
        return self._action(Op.F, self.num_forwards - 1)

    def backward(self, op: Op) -> list[Action]:
        self.num_backwards += 1
        return self._action(op, self.num_backwards - 1)

    def _action(self, op: Op, turn: int) -> list[Action]:
        return [Action(op, self.stage, self.microbatches[turn])] if turn < len(self.microbatches) else []


@dataclass
class _GrowingOrder:
    """One rank's order under construction.

    The comments on its eight steps use F, B, I, W for the near stream and F', B', I', W' for the far one.
    """

    #: The stream that enters on the rank's side.
    near: _Stream
    #: The stream that comes from the other side.
    far: _Stream
    #: The number of ranks between this one and the meeting point of the streams.
    to_middle: int
    #: The rank's place, counted from 1 at its own end.
    from_end: int
    #: The steps so far.
    done: list[Step] = field(default_factory=list)
    #: The pending W of each I, oldest first.
    weights: deque[list[Action]] = field(default_factory=deque)

    def steps(self, num_turns: int) -> tuple[Step, ...]:
        """The whole order, for `num_turns` microbatches in each stream."""
        near, far = self.near, self.far
        # Step 1, F: the far stream has not arrived yet.
        for _ in range(2 * self.to_middle):
            self.done += near.forward()
        # Step 2, F F': it arrives, but no backward has.
        for _ in range(self.from_end):
            self.done += near.forward()
            self.done += far.forward()
        # Step 3, I' W' F': the first backwards arrive. They are split, since the ranks before wait for their gradients.
        for _ in range(self.to_middle):
            self._inputs(far)
            self.done += self.weights.popleft()
            self.done += far.forward()
        # Step 4, (F;B') (F';B): the steady middle, where every action is in a pair.
        for turn in range(num_turns - 2 * self.to_middle - self.from_end):
            # At the middle the first backward waits for no other rank, so it need not wait for a forward either.
            self._pair(near, far, fused=turn > 0 or self.to_middle > 0)
            self._pair(far, near)
        # Step 5, B' (F';B): the near stream has no forwards left.
        for _ in range(self.to_middle):
            self.done += far.backward(Op.B)
            self._pair(far, near)
        # Step 6, B' B, in the second half I' I: no forwards are left. Late backwards are split, as in step 3.
        for turn in range(2 * self.from_end):
            stream = near if turn % 2 else far
            if turn < self.from_end:
                self.done += stream.backward(Op.B)
            else:
                self._inputs(stream)
        # Step 7, W I: pending W fill the time until the near stream's last gradients arrive.
        for _ in range(self.to_middle):
            self.done += self.weights.popleft()
            self._inputs(near)
        # Step 8, W: the rest.
        while self.weights:
            self.done += self.weights.popleft()
        return tuple(self.done)

    def _inputs(self, stream: _Stream) -> None:
        inputs = stream.backward(Op.I)
        self.done += inputs
        self.weights.append([Action(Op.W, action.stage, action.microbatch) for action in inputs])

    def _pair(self, forward: _Stream, backward: _Stream, *, fused: bool = True) -> None:
        both = [*forward.forward(), *backward.backward(Op.B)]
        self.done += [Pair(*both)] if fused and len(both) == 2 else both
