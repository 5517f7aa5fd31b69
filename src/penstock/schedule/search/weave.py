"""Weaving: place the W between the forwards and input backwards of a skeleton, which makes it an order."""

from itertools import dropwhile

from penstock.schedule.search.problem import TOLERANCE, Codes, PartialRun, Problem


def weave(problem: Problem, skeleton: Codes, allowed_span: float | None) -> tuple[float, Codes] | None:
    """Place each rank's W between the forwards and input backwards of a skeleton; None if memory does not allow it.

    Returns the span, the longest time over ranks from a rank's own first start to its own end, and the orders.

    A W goes where it costs nothing: into a wait at least as long as the W. If memory is full, W go before the next
    forward. In a wait shorter than a W the rank stays idle while it can still end within `allowed_span`; after that it
    takes a W, and the next step is late. Backwards that no other rank waits for are late whenever a W fits. The
    remaining W come at the end.

    So `allowed_span` is a goal, not a limit: a small one keeps every rank busy at the expense of those that wait for
    it. Without one, no rank waits longer in total than another has before; the ranks then take turns, forwards from the
    first to the last and one backward each on the way back.

    Source: without `allowed_span` this is the rule of Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.1.
    """
    return _Weaving(problem, skeleton, allowed_span).result()


class _Weaving(PartialRun):
    """All ranks in a run through a skeleton; a rank that needs an input not made yet is put aside."""

    #: The steps whose order is fixed, and by rank its place in them and its first start.
    skeleton: Codes
    place: list[int]
    start: list[float | None]
    #: By rank, the time that it has been idle, and may be; the latter None without an allowed span.
    idle: list[float]
    may_idle: list[float] | None
    #: By rank, the number of steps that others may wait for: all but the first stage's backwards at the end.
    awaited: list[int]
    #: The orders so far, with every W.
    orders: Codes

    def __init__(self, problem: Problem, skeleton: Codes, allowed_span: float | None) -> None:
        super().__init__(problem)
        num_ranks, self.skeleton = problem.num_ranks, skeleton
        self.place, self.start, self.idle = [0] * num_ranks, [None] * num_ranks, [0.0] * num_ranks
        self.may_idle = None if allowed_span is None else [allowed_span - work + TOLERANCE for work in problem.work]
        self.orders = [[] for _ in range(num_ranks)]
        # All but the backwards at the end.
        self.awaited = [len([*dropwhile((1).__eq__, reversed(steps))]) for steps in skeleton]

    def result(self) -> tuple[float, Codes] | None:
        weight = self.problem.backward_weight
        fits = self._run_in_turns() if self.may_idle is None else self._run_all()
        if not fits or any(place < len(steps) for place, steps in zip(self.place, self.skeleton)):
            return None
        for rank, stages in enumerate(self.waiting):
            self.now[rank] += sum(weight[stage] for stage in stages)
            self.orders[rank] += [3 * stage + 2 for stage in stages]
        return max(now - (start or 0.0) for now, start in zip(self.now, self.start)), self.orders

    def _run_all(self) -> bool:
        """Run every rank as far as possible, until none can continue; False if memory stays full."""
        ready = dict.fromkeys(range(self.problem.num_ranks))
        while ready:
            rank, _ = ready.popitem()
            if (reached := self._run(rank)) is None:
                return False
            ready |= dict.fromkeys(reached)
        return True

    def _run_in_turns(self) -> bool:
        """Run the ranks in turn, so that all have progressed about equally when their waits are compared."""
        ranks = range(self.problem.num_ranks)
        num_done = -1
        while num_done < (num_done := sum(self.place)):
            for rank in ranks:
                if self._run(rank, only=0) is None:
                    return False
            for rank in reversed(ranks):
                self._run(rank, only=1)
        return True

    def _run(self, rank: int, only: int | None = None) -> set[int] | None:
        """Continue as far as inputs allow; return the ranks that got an input, or None if memory stays full.

        With `only` 0 the rank stops at the next backward, with 1 after one backward.
        """
        problem, steps = self.problem, self.skeleton[rank]
        times, weight = (problem.forward, problem.backward_input), problem.backward_weight
        share, max_tapes = problem.weight_memory_share, problem.max_tapes + TOLERANCE
        waiting, order, done = self.waiting[rank], self.orders[rank], self.done
        now, live, idle, place = self.now[rank], self.live[rank], self.idle[rank], self.place[rank]
        may_idle = max(self.idle) + TOLERANCE if self.may_idle is None else self.may_idle[rank]
        awaited = self.awaited[rank]
        reached = set()
        while place < len(steps):
            step = steps[place]
            arrivals = self.arrivals[step]
            if done[step] == len(arrivals):
                break
            arrival = arrivals[done[step]]
            stage, backward = step >> 1, step & 1
            if only is not None and backward != only:
                break
            if self.start[rank] is None:
                self.start[rank] = now = arrival
            while not backward and live + 1 + share * len(waiting) > max_tapes:
                if not waiting:
                    return None
                order.append(3 * waiting[0] + 2)
                now += weight[waiting.popleft()]
            while waiting and arrival - now > TOLERANCE:
                gap, end = arrival - now, now + weight[waiting[0]]
                if place < awaited and end > arrival + TOLERANCE and idle + gap <= may_idle:
                    break
                order.append(3 * waiting[0] + 2)
                now += weight[waiting.popleft()]
            if now < arrival:
                idle += arrival - now
                now = arrival
            now += times[backward][stage]
            order.append(3 * stage + backward)
            done[step] += 1
            place += 1
            if backward:
                live -= 1
                waiting.append(stage)
            else:
                live += 1
            if (following := problem.following[step]) is not None:
                self.arrivals[following.step].append(now + following.hop)
                if following.rank != rank:
                    reached.add(following.rank)
            if only == 1:
                break
        self.now[rank], self.live[rank], self.idle[rank], self.place[rank] = now, live, idle, place
        return reached
