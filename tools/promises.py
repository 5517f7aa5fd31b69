"""Says which of the promised statements the last run of the tests has shown, and which it has not, and why.

A test shows statement N when it bears `@pytest.mark.shows(N)`; docs/promises.md says each in a line. A statement was
shown if all its tests ran and passed, or have passed before and what they are about is unchanged (tests/subjects.py).
The tests leave a record of their run in pytest's cache (tests/conftest.py).
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^(\d+)\.\s+(.*)$")
RECORD = ROOT / ".pytest_cache" / "v" / "penstock" / "shown"
Record = dict[str, dict[str, list[str]]]
"""Test without its parameters -> outcome -> the reason, where it was skipped, of each of its cases."""

LACKS = re.compile(
    "needs a CUDA device|NO CHROMIUM FOUND|NO PYODIDE.*npm did not fetch|make test-[a-z-]+ installs"
    "|network namespaces need (iproute2|root)|this machine does not allow network namespaces|reads /proc"
)
"""Reasons of skipped tests that a machine may have: what another command than `make setup` installs is one."""


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


@dataclass(frozen=True)
class Verdict:
    """What a run has shown of a statement: `word` is shown, in part, skipped, failed, not run or open."""

    word: str
    #: what came between, in words
    why: tuple[str, ...] = ()

    @property
    def forgiven(self) -> bool:
        """True if no more can be shown on this machine."""
        return self.word == "shown" or (bool(self.why) and all(map(LACKS.search, self.why)))


def verdict(tests: list[str], run: Record) -> Verdict:
    """The verdict on a statement that these tests show."""
    ran = [run[test] for test in tests if test in run]
    missing = tuple(f"{test} did not run" for test in tests if test not in run)
    reasons = tuple(sorted({reason for outcomes in ran for reason in outcomes.get("skipped", ())}))
    failed = tuple(f"{test} failed" for test in tests if "failed" in run.get(test, ()))
    passed = any("passed" in outcomes or "unchanged" in outcomes for outcomes in ran)
    if not tests:
        return Verdict("open", ("no test shows it",))
    if failed:
        return Verdict("failed", failed)
    if not ran:
        return Verdict("not run", missing)
    if missing or reasons:
        return Verdict("in part" if passed else "skipped", reasons + missing)
    return Verdict("shown")


def main() -> int:
    parser = argparse.ArgumentParser(description="Say which statements the last run of the tests has shown.")
    parser.add_argument("--tests", action="store_true", help="name the tests beside each statement")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--check", action="store_true", help="name only what was not shown; fail if this machine could show it"
    )
    options = parser.parse_args()
    tests, words = collect(), statements()
    run: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    verdicts = {number: verdict(tests.get(number, []), run) for number in sorted(words)}
    unsaid = sorted(set(tests) - set(words))
    if options.json:
        print(
            json.dumps({n: {"verdict": v.word, "why": v.why, "tests": tests.get(n, [])} for n, v in verdicts.items()})
        )
    else:
        for number, found in verdicts.items():
            if options.check and found.word == "shown":
                continue
            print(f"{found.word:8s}{number:4d}. {words[number]}")
            print(*(f"{'':14s}{reason}" for reason in found.why), sep="\n", end="\n" if found.why else "")
            if options.tests:
                print(*(f"{'':14s}{test}" for test in tests.get(number, [])), sep="\n")
        counts = Counter(found.word for found in verdicts.values())
        told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        print(f"\nof {len(words)} statements, in the last run of the tests: {told}")
        unchanged = sorted(test for test, outcomes in run.items() if "unchanged" in outcomes)
        if unchanged:
            print(f"{len(unchanged)} tests have passed before, and what they are about is unchanged")
    if unsaid:
        print(f"shown without a line in docs/promises.md: {unsaid}", file=sys.stderr)
    amiss = [number for number, found in verdicts.items() if not found.forgiven] if options.check else []
    if amiss:
        print(f"not shown, though this machine can: {', '.join(map(str, amiss))}", file=sys.stderr)
    return 1 if unsaid or amiss else 0


if __name__ == "__main__":
    sys.exit(main())
