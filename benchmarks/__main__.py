"""`python -m benchmarks`: lists the benchmarks with the first sentence of each."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first sentence of each benchmark by its name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in module.body):
            found[path.stem] = " ".join((ast.get_docstring(module) or "").split()).partition(". ")[0].rstrip(".")
    return found


if __name__ == "__main__":
    print("python -m benchmarks.NAME measures, and with --help says what and how:")
    for name, sentence in benchmarks().items():
        print(f"  {name:16}{sentence}")
