"""Prints what an environment of the oldest releases consists of, as pip takes it: `make test-oldest` installs it.

Every package that pyproject.toml names for users is taken at its lower bound, and what the tests need besides at any.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_TESTS = ("httpx", "hypothesis", "openai", "pytest", "pytest-timeout", "pytest-xdist", "setuptools")
"""TRL is left out: the release that the tests compare with needs newer libraries than Penstock does."""

USERS_EXTRAS = ("hf", "serve", "plot", "track", "terminal")


def requirements() -> list[str]:
    """Each package of a user at the lowest release that is allowed, as `name==release`, and what the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(one for name in USERS_EXTRAS for one in extras[name])]
    for_tests = [one for one in extras["dev"] if re.split(r"[<>=\[]", one)[0] in FOR_TESTS]
    return [*(re.sub(r">=([^,]*).*", r"==\1", one) for one in needed), *for_tests]


if __name__ == "__main__":
    print("\n".join(requirements()))
