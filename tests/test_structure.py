"""Holds the package to its own rules of structure: no circles, one name for one thing, short functions."""

import ast
import collections
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.package_source import FILES, PACKAGE, imports_of, room_of, tree_of

MAX_LINES = 60
MAX_PARAMETERS = 6

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def file_of(module: str) -> Path | None:
    """The file that a dotted name is imported from; for a name inside a module, that module's."""
    parts = module.split(".")[1:]
    while parts:
        place = PACKAGE.joinpath(*parts)
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if (place / "__init__.py").is_file():
            return place / "__init__.py"
        parts.pop()
    return None


def files_imported_by(path: Path) -> set[Path]:
    names = [name for _, name in imports_of(path) if name.startswith("penstock.")]
    # A package's own front collects what its files declare; that the files name their package is no circle.
    return {found for name in names if (found := file_of(name)) and found not in (path, PACKAGE / "__init__.py")}


def functions_of(path: Path) -> Iterator[tuple[str, Definition]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Definition):
            yield f"{path.relative_to(PACKAGE).as_posix()}:{node.name}", node


def num_parameters(function: Definition) -> int:
    """The parameters a caller gives; `self` and `cls` are not."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def test_no_circle_between_files() -> None:
    """Deferred imports and those for type checking count like any other."""
    graph = {path: files_imported_by(path) for path in FILES}
    assert sum(map(len, graph.values())) > len(FILES)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = [path.relative_to(PACKAGE).as_posix() for path in error.args[1]]
        raise AssertionError("a circle of imports: " + " <- ".join(circle)) from None


def test_no_class_name_twice() -> None:
    places = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}")
    assert places
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_functions_are_short() -> None:
    functions = [function for path in FILES for function in functions_of(path)]
    assert functions
    lengths = [(name, (node.end_lineno or node.lineno) - node.lineno + 1) for name, node in functions]
    assert not {name: n for name, n in lengths if n > MAX_LINES}


def test_functions_take_few_parameters() -> None:
    functions = [function for path in FILES for function in functions_of(path)]
    assert functions
    counts = [(name, num_parameters(node)) for name, node in functions]
    assert not {name: n for name, n in counts if n > MAX_PARAMETERS}


def test_the_engines_face_is_imported_by_nobody_in_its_room() -> None:
    """But for the check, which makes engines and calls them as a user does."""
    face = PACKAGE / "engine" / "engine.py"
    above = ("engine.py", "__init__.py", "ranks_in_turn.py")
    others = [path for path in FILES if path.is_relative_to(face.parent) and path.name not in above]
    assert others
    assert [path.name for path in others if face in files_imported_by(path)] == []


def undocumented(owner: ast.ClassDef, lines: list[str]) -> set[str]:
    """The attributes that a class sets in `__init__`, or a dataclass may change, without a line of documentation."""
    made = next((node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    targets = [
        target
        for node in (ast.walk(made) if made else ())
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for top in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(top)
    ]
    own = {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"}
    decorators = [ast.unparse(decorator) for decorator in owner.decorator_list]
    if any(text.startswith("dataclass") and "frozen=True" not in text for text in decorators):
        # The fields of a frozen one are its arguments. These are state too, unless the docstring explains them.
        fields = {n.target.id for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        own |= {name for name in fields if not re.search(rf"\b{name}\b", ast.get_docstring(owner) or "")}
    documented: set[str] = set()
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = lines[node.lineno - 2].strip()
            # One line of documentation may stand for the attributes that follow at once.
            before = isinstance(last := owner.body[owner.body.index(node) - 1], ast.AnnAssign) and last.end_lineno
            if first.startswith("#") or before == node.lineno - 1:
                documented.add(node.target.id)
    return own - documented


def modules_of_torch(classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """The classes of the package that derive from `nn.Module`, directly or not."""
    found: set[str] = set()
    while more := {
        name
        for name, node in classes.items()
        if name not in found and any(ast.unparse(base) in {"nn.Module", "nn.ModuleList", *found} for base in node.bases)
    }:
        found |= more
    return found


def test_classes_document_their_state() -> None:
    """A module's parts are its constructor's lines, which name and make them, as torch's own modules are written."""
    places = {node.name: path for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
    classes = {node.name: node for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
    modules = modules_of_torch(classes)
    assert {"AttentionBlock", "Head", "Skeleton"} <= modules
    found = {
        f"{places[name].name}:{name}": missing
        for name, node in classes.items()
        if name not in modules and (missing := undocumented(node, places[name].read_text().splitlines()))
    }
    assert not found


def test_docstrings_name_their_subject() -> None:
    """A description is a noun phrase or a verb: one that begins with a question word has no subject yet."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = [
        f"{path.name}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]
    assert len(lines) > 1000
    assert [
        line for line in lines if re.search(r": (What|Whatever|Who|Whose|Where|Whether|Which|Those|How|Of) ", line)
    ] == []


def test_the_quick_tests_cover_every_room() -> None:
    makefile = (PACKAGE.parents[1] / "Makefile").read_text()
    [listed] = re.findall(r"^QUICK := (.*?)$", makefile.replace("\\\n", " "), re.MULTILINE)
    places = [PACKAGE.parents[1] / place for place in listed.split()]
    files = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]
    rooms, tests = {room_of(path) for path in FILES}, PACKAGE.parents[1] / "tests"
    assert "schedule" in rooms
    homes = {room: (tests / room, tests / "unit" / room) for room in rooms}
    assert {
        room for room in rooms if not any(file.is_relative_to(home) for file in files for home in homes[room])
    } == set()
