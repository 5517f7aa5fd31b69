"""Small faults in a Python file, one at a time, made on its syntax tree; the rest of the text stays as it is."""

import ast
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

FLIPPED: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
FLIPPED |= {ast.Add: ast.Sub, ast.Mult: ast.FloorDiv, ast.And: ast.Or}
FLIPPED |= {after: before for before, after in FLIPPED.items()}

# What checks our own work or words an error may be wrong in many ways that no test need notice.
NOT_CHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
# The same as arguments of these: a check that both are as long, and what else a constructor would take or show.
OF_CALLS = {"zip": {"strict"}, "field": {"init", "repr", "compare"}, "Thread": {"name"}}


class Fault(NamedTuple):
    """What is written instead of some bytes of a file, the first of which stands in `line`."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        """The whole file with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def compiles(self) -> bool:
        try:
            compile(self.planted(self.path.read_bytes()), self.path.name, "exec")
        except SyntaxError:
            return False
        return True

    @property
    def reads(self) -> str:
        """The changed lines as they read with the fault; of a statement that is left out, the statement."""
        before = self.path.read_bytes()
        source = self.planted(before)
        first, last = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.start + len(self.text.encode()))
        left_out = f"  # {before[self.start : self.end].decode()}" if self.text == "pass" else ""
        return " ".join(f"{source[first:last].decode()}{left_out}".split())

    def __str__(self) -> str:
        before = self.path.read_bytes()[self.start : self.end].decode()
        change = " ".join(f"{before}  ->  {self.text}".split())
        return f"{self.path}:{self.line}  {change[:200]}  in  {self.reads[:200]}"


def faults_in(path: Path) -> Iterator[Fault]:
    """Every fault of the kinds below that the file can have; where an expression is a pattern, it may not compile."""
    source = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(source) if byte == ord("\n"))]
    for node in _inside(ast.parse(source)):
        for other in _changed(node):
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(other) if isinstance(other, ast.stmt) else f"({ast.unparse(other)})"
            yield Fault(path, node.lineno, start, end, text)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one that may be changed."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            annotates = name in ("annotation", "returns", "decorator_list")
            if isinstance(child, ast.AST) and not annotates and not _may_be_wrong(child, node):
                yield child
                yield from _inside(child)


def _may_be_wrong(node: ast.AST, parent: ast.AST) -> bool:
    """Whether a user sees nothing of it if this is another."""
    match node:
        case ast.Assign([ast.Name(name)], value=ast.Constant()):
            return name.endswith("_S")  # a time in seconds: how long something is waited for, not what for
        case ast.FunctionDef(name="__repr__"):
            return True
        case ast.keyword(name):
            return name in _of_call(parent)
    return isinstance(node, NOT_CHANGED)


def _of_call(node: ast.AST) -> set[str]:
    match node:
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(attr=name)):
            return OF_CALLS.get(name, set())
    return set()


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with a fault, each possible one in turn."""
    match node:
        case ast.Compare(ops=[op]):
            yield ast.Compare(node.left, [FLIPPED[type(op)]()], node.comparators)
        case ast.BinOp(left, op, right) if not isinstance(op, ast.BitOr):  # most unite types
            if type(op) in FLIPPED:
                yield ast.BinOp(left, FLIPPED[type(op)](), right)
            yield from (left, right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(FLIPPED[type(op)](), values)
            yield from (values[0], values[-1])
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Call():
            for part, number in (("args", len(node.args)), ("keywords", len(node.keywords))):
                for place in range(number):
                    other = deepcopy(node)
                    left_out = getattr(other, part).pop(place)
                    if getattr(left_out, "arg", "") not in _of_call(node):
                        yield other
        case ast.AugAssign() | ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
