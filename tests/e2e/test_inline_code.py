"""Options and settings that the documentation names within its sentences exist."""

import pytest

from tests.e2e.inline_code import ROOT, inline_codes, unknown_in

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_option_and_setting_in_inline_code_exists() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert sum("--" in code for text in texts.values() for code in inline_codes(text)) > 50
    assert {name: unknown for name, text in texts.items() if (unknown := unknown_in(text))} == {}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("Give `--dry-rum` to it.", ["--dry-rum"]),
        ("Give `penstock train run.toml --parallel.pipes 2` to it.", ["--parallel.pipes"]),
        ("It is `optimizer.speed`,\nor `train.steps = 3`.", ["optimizer.speed"]),
        ("| option |\n|---|\n| `--pprt` |", ["--pprt"]),
        ("`torchrun --nproc-per-nod 2`", ["--nproc-per-nod"]),
        ("`--dry-run`, `--parallel.timeout-s 8`, `schedule.verify`, `kubectl apply -f train.yaml`, `data.py`", []),
        ("```sh\nanother --option\n```", []),
    ],
)
def test_what_does_not_exist_is_found(text: str, unknown: list[str]) -> None:
    assert unknown_in(text) == unknown
