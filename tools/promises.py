"""Says which of the promised statements the tests show, and which are still open.

A test shows statement N when it bears `@pytest.mark.shows(N)`; docs/promises.md says each in a line. The tests are
read, not run: `make test` says whether they hold.
"""

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^(\d+)\.\s+(.*)$")


def marks(node: ast.AST) -> Iterator[int]:
    """The numbers of every `pytest.mark.shows(...)` found in an expression."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "shows":
            for argument in call.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, int)):
                    raise ValueError(f"line {call.lineno}: shows() takes plain numbers, for they are read unrun")
                yield argument.value


def shown_in(path: Path) -> Iterator[tuple[int, str]]:
    """Each (statement, test) of a file; a mark on a class or on the module holds for all tests in it."""

    def walk(body: list[ast.stmt], inherited: list[int], prefix: str) -> Iterator[tuple[int, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                numbers = inherited + [n for decorator in node.decorator_list for n in marks(decorator)]
                yield from walk(node.body, numbers, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                numbers = inherited + [n for decorator in node.decorator_list for n in marks(decorator)]
                yield from ((number, f"{prefix}{node.name}") for number in numbers)

    tree = ast.parse(path.read_text(), filename=str(path))
    of_module = [
        number
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        for number in marks(node.value)
    ]
    yield from walk(tree.body, of_module, f"{path.relative_to(ROOT)}::")


def collect() -> dict[int, list[str]]:
    """Statement number -> the tests that show it."""
    tests: dict[int, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, test in shown_in(path):
            tests[number].append(test)
    return dict(tests)


def statements() -> dict[int, str]:
    """Statement number -> its line in docs/promises.md."""
    lines = (ROOT / "docs" / "promises.md").read_text().splitlines()
    return {int(found[1]): found[2] for line in lines if (found := LINE.match(line))}


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description="Say which statements the tests show.")
    parser.add_argument("--tests", action="store_true", help="name the tests beside each statement")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    tests, words = collect(), statements()
    open_ones = sorted(set(words) - set(tests))
    if options.json:
        print(json.dumps({"shown": {n: tests[n] for n in sorted(tests)}, "open": open_ones}, indent=2))
    else:
        for number in sorted(tests):
            print(f"shown {number:4d}. {words.get(number, '(no line in docs/promises.md)')}")
            if options.tests:
                print(*(f"              {test}" for test in tests[number]), sep="\n")
        for number in sorted(set(words) - set(tests)):
            print(f"open  {number:4d}. {words[number]}")
        print(f"\n{len(tests)} of {len(words)} statements shown; open: {ranges(open_ones)}")
    unsaid = sorted(set(tests) - set(words))
    if unsaid:
        print(f"shown without a line in docs/promises.md: {unsaid}", file=sys.stderr)
    return 1 if unsaid else 0


if __name__ == "__main__":
    sys.exit(main())
