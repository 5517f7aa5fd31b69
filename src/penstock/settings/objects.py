"""Objects of a user's own that settings name: ``package.module:object``, or ``path/to/file.py:object``."""

import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from penstock.settings.declare import ConfigError, words_of

_REFERENCE = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_][\w.]*)")


def is_reference(name: str) -> bool:
    """Return whether a name is that of an object in a module or in a Python file.

    >>> is_reference("package.module:function"), is_reference("examples/own.py:function"), is_reference("1f1b")
    (True, True, False)
    """
    return _REFERENCE.fullmatch(name) is not None


def load_object(reference: str) -> Any:
    """Import the object of that name; modules are looked for in the working directory, too.

    Raises:
        ConfigError: there is no such module, file or object, or importing it raised; then the message names the line,
            and the cause is what was raised.

    >>> load_object("math:sqrt")(4.0)
    2.0
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(f"{reference!r} names no object; give package.module:object, or file.py:object")
    try:
        found: Any = (_load_file if match["module"].endswith(".py") else _load_module)(match["module"])
    except ConfigError:
        raise
    except Exception as error:  # a user's own
        fault = f"{type(error).__name__}: {words_of(error)}"
        if isinstance(error, SyntaxError) and error.filename is not None:
            fault = f"{error.filename}, line {error.lineno}, raised {type(error).__name__}: {error.msg}"
        else:
            # The module's frames follow ours and those of the import itself; below may be libraries that it calls.
            ours, frozen = (__file__, importlib.__file__), "<frozen importlib"
            frames = [f for f in extract_tb(error.__traceback__) if f.filename not in ours]
            frames = [f for f in frames if not f.filename.startswith(frozen)]
            if own := [frame for frame in frames if frame.filename == frames[0].filename]:
                fault = f"{own[-1].filename}, line {own[-1].lineno}, raised {fault}"
        raise ConfigError(f"{reference!r} cannot be imported: {fault}") from error
    for part in match["name"].split("."):
        if not hasattr(found, part):
            names = ", ".join(name for name in vars(found) if not name.startswith("_")) or "nothing"
            raise ConfigError(f"{reference!r}: there is no {part!r} in {match['module']}; it has {names}")
        found = getattr(found, part)
    return found


def _load_module(name: str) -> ModuleType:
    here, missing = str(Path.cwd()), name
    # An installed command does not look where it is called.
    for folders in ([], [here]):
        sys.path[:0] = folders
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # A module's own missing imports are its own error.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            missing = error.name
        finally:
            for folder in folders:
                sys.path.remove(folder)
    raise ConfigError(f"there is no module {missing!r}, neither installed nor in {here}")


def _load_file(path: str) -> ModuleType:
    # One module for one file, so that it is not run a second time.
    name = f"penstock_file_{Path(path).resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"there is no file {path!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
