"""Faults that change nothing a user sees, each with the reason; `tools/mutants.py` leaves them out and counts them."""

from nearest_tests import PACKAGE
from small_faults import Fault

#: file of the package -> what is written instead of what -> why no test can notice it
HARMLESS: dict[str, dict[str, str]] = {}


def is_harmless(fault: Fault) -> bool:
    known = HARMLESS.get(fault.path.relative_to(PACKAGE).as_posix(), {})
    return bool(known) and fault.change in known
