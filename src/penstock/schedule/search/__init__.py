"""The search for orders.

problem.py     the search problem, and lower bounds that no order can beat
skeletons.py   orders of forwards and input backwards: from closed forms, heuristics and repeated patterns
weave.py       the placement of weight backwards between them
anneal.py      small changes, kept if they shorten an order
order.py       the search for an order, which uses all of these
"""

from penstock.schedule.search.order import SearchOptions, shortest
from penstock.schedule.search.problem import bound

__all__ = ["SearchOptions", "bound", "shortest"]
