"""Prints what an environment of the oldest or the newest releases consists of, as pip takes it: `make test-oldest` and
`make test-newest` install it.

Every package that pyproject.toml names for users is taken at its lower bound, or at the newest release that its bounds
allow, and what the tests need besides at any.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_TESTS = ("httpx", "hypothesis", "openai", "pytest", "pytest-timeout", "pytest-xdist", "setuptools")
"""TRL is left out: the release that the tests compare with needs newer libraries than Penstock's lower bounds."""

USERS_EXTRAS = ("hf", "serve", "plot", "track", "terminal")
ENDS = ("oldest", "newest")


def requirements(end: str) -> list[str]:
    """Each package of a user at that end of its bounds, the oldest as `name==release`, and what the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(one for name in USERS_EXTRAS for one in extras[name])]
    for_tests = [one for one in extras["dev"] if re.split(r"[<>=\[]", one)[0] in FOR_TESTS]
    if end == "oldest":
        needed = [re.sub(r">=([^,]*).*", r"==\1", one) for one in needed]
    return [*needed, *for_tests]


if __name__ == "__main__":
    if sys.argv[1:] not in ([end] for end in ENDS):
        sys.exit(f"usage: bounds.py {' | '.join(ENDS)}")
    print("\n".join(requirements(sys.argv[1])))
