"""The published schedules, those of one idea in one file; a file in this folder is found without being listed."""

from importlib import import_module
from pkgutil import iter_modules

from penstock.schedule.builders.registry import (
    Builder,
    build,
    builder,
    default_stages,
    describe,
    is_published,
    names,
    options,
    register,
    source,
    trains,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Builder",
    "build",
    "builder",
    "default_stages",
    "describe",
    "is_published",
    "names",
    "options",
    "register",
    "source",
    "trains",
]
