"""An interpreter of programs that shares nothing with the package's own rules, to hold the proof against.

It carries values about: every send blocks until a receive is posted on its channel, and hands its value to the *oldest*
posted receive, whatever that was meant for. What comes out is compared with what a single process would compute.
"""

from collections import defaultdict, deque

from penstock.schedule import Action, Program, Step

EMPTY = ("nothing", -1, -1)


class Harm(Exception):
    """What goes wrong when a program is run."""


class _Rank:
    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.actions: list[Action] = []
        for step in steps:
            self.actions += [step] if isinstance(step, Action) else [step.forward, step.backward]
        self.at = 0
        self.slots: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        self.outputs: set[tuple[int, int]] = set()
        self.gradients: set[tuple[int, int]] = set()
        self.written: dict[int, set[int]] = defaultdict(set)
        self.reduced: set[int] = set()
        self.live = self.peak = 0
        self.stepped = False


class BruteForce:
    def __init__(self, program: Program) -> None:
        self.schedule, self.placement = program.schedule, program.placement
        self.ranks = [_Rank(steps) for steps in program.ranks]
        self.posted: dict[tuple[int, int, str], deque[tuple[str, int, int]]] = defaultdict(deque)

    def run(self) -> tuple[int, ...]:
        """The peak of live tapes per rank; raises Harm."""
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self.ranks):
                while rank.at < len(rank.actions) and self.act(number, rank, rank.actions[rank.at]):
                    rank.at += 1
                    moved = True
        for number, rank in enumerate(self.ranks):
            if rank.at < len(rank.actions):
                raise Harm(f"rank {number} is stuck at {rank.actions[rank.at]}")
            self.check_result(number, rank)
        if any(self.posted.values()):
            raise Harm("a receive got nothing")
        return tuple(rank.peak for rank in self.ranks)

    def check_result(self, number: int, rank: _Rank) -> None:
        due = {
            (stage, microbatch)
            for stage in self.placement.stages_of(number)
            for microbatch in self.schedule.microbatches_of(stage)
        }
        bound = self.schedule.live_bound
        if rank.outputs != due or rank.slots or (bound is not None and rank.peak > bound[number]):
            raise Harm(f"rank {number} did not do its forwards, or left something over")
        if self.schedule.training and not (
            rank.stepped and rank.gradients == due and rank.actions[-1].op.name == "STEP"
        ):
            raise Harm(f"rank {number} did not do its backwards or its step")

    def act(self, number: int, rank: _Rank, action: Action) -> bool:
        """Carry out an action; False if it has to wait."""
        op, stage, microbatch = action.op.name, action.stage, action.microbatch
        if rank.stepped:
            raise Harm(f"{action} comes after the step")
        if op == "STEP":
            if rank.reduced != set(self.placement.stages_of(number)):
                raise Harm("a step on gradients that were not reduced")
            rank.stepped = True
            return True
        if not 0 <= stage < self.placement.num_stages or self.placement.rank_of(stage) != number:
            raise Harm(f"{action} is on the wrong rank")
        if op == "REDUCE_GRAD":
            if stage in rank.reduced or rank.written[stage] != set(self.schedule.microbatches_of(stage)):
                raise Harm(f"{action} of a gradient that is not whole")
            rank.reduced.add(stage)
            return True
        if microbatch not in self.schedule.microbatches_of(stage) or (op not in FORWARD and not self.schedule.training):
            raise Harm(f"{action} is not wanted")
        return getattr(self, op.lower())(number, rank, stage, microbatch)

    def neighbour(self, stage: int, distance: int) -> int | None:
        """The stage next to another in the same copy of the model."""
        per_copy = self.placement.num_stages // (2 if self.placement.kind.value == "bidirectional" else 1)
        other = stage + distance
        return other if other >= 0 and other // per_copy == stage // per_copy else None

    def take(self, rank: _Rank, key: tuple[str, int, int], wanted: tuple[str, int, int]) -> bool:
        if key not in rank.slots:
            raise Harm(f"{key} was never asked for")
        if rank.slots[key] == EMPTY:
            return False
        if rank.slots.pop(key) != wanted:
            raise Harm(f"{key} got another message")
        return True

    def f(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        before = self.neighbour(stage, -1)
        if (stage, microbatch) in rank.outputs:
            raise Harm("forward twice")
        if before is not None:
            if self.placement.rank_of(before) == number:
                if (before, microbatch) not in rank.outputs:
                    raise Harm("forward without its input")
            elif not self.take(rank, ("input", stage, microbatch), ("output", before, microbatch)):
                return False
        rank.outputs.add((stage, microbatch))
        rank.live += 1
        rank.peak = max(rank.peak, rank.live)
        rank.live -= 0 if self.schedule.training else 1
        return True

    def i(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        after = self.neighbour(stage, +1)
        if (stage, microbatch) in rank.gradients or (stage, microbatch) not in rank.outputs:
            raise Harm("backward twice, or without its forward")
        if after is not None:
            if self.placement.rank_of(after) == number:
                if (after, microbatch) not in rank.gradients:
                    raise Harm("backward without its gradient")
            elif not self.take(rank, ("gradient", stage, microbatch), ("input gradient", after, microbatch)):
                return False
        rank.gradients.add((stage, microbatch))
        return True

    def w(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        if (stage, microbatch) not in rank.gradients or microbatch in rank.written[stage]:
            raise Harm("weight gradient twice, or before its time")
        rank.written[stage].add(microbatch)
        rank.live -= 1
        return True

    def b(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        return self.i(number, rank, stage, microbatch) and self.w(number, rank, stage, microbatch)

    def send_f(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        if (stage, microbatch) not in rank.outputs:
            raise Harm("sends what is not there")
        return self.send(number, self.neighbour(stage, +1), "forward", ("output", stage, microbatch))

    def send_b(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        if (stage, microbatch) not in rank.gradients:
            raise Harm("sends what is not there")
        return self.send(number, self.neighbour(stage, -1), "backward", ("input gradient", stage, microbatch))

    def send(self, number: int, target: int | None, direction: str, value: tuple[str, int, int]) -> bool:
        if target is None or self.placement.rank_of(target) == number:
            raise Harm("sends to nobody")
        other = self.placement.rank_of(target)
        waiting = self.posted[number, other, direction]
        if not waiting:
            return False
        self.ranks[other].slots[waiting.popleft()] = value
        return True

    def recv_f(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        return self.post(number, rank, self.neighbour(stage, -1), "forward", ("input", stage, microbatch))

    def recv_b(self, number: int, rank: _Rank, stage: int, microbatch: int) -> bool:
        return self.post(number, rank, self.neighbour(stage, +1), "backward", ("gradient", stage, microbatch))

    def post(self, number: int, rank: _Rank, source: int | None, direction: str, key: tuple[str, int, int]) -> bool:
        if source is None or self.placement.rank_of(source) == number or key in rank.slots:
            raise Harm("receives from nobody, or twice")
        rank.slots[key] = EMPTY
        self.posted[self.placement.rank_of(source), number, direction].append(key)
        return True


FORWARD = {"F", "SEND_F", "RECV_F"}


def harm_of(program: Program) -> str | None:
    """What goes wrong when the program is run with sends that block; None, if nothing does."""
    try:
        BruteForce(program).run()
    except Harm as harm:
        return str(harm)
    return None
