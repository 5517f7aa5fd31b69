"""Options and settings that the documentation names within its sentences exist."""

from tests.e2e.inline_code import ROOT, inline_codes, unknown_in

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_option_and_setting_in_inline_code_exists() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert sum("--" in code for text in texts.values() for code in inline_codes(text)) > 50
    # What is no more is named there alone.
    texts["CHANGELOG.md"] = texts["CHANGELOG.md"].partition("### Removed")[0]
    assert {name: unknown for name, text in texts.items() if (unknown := unknown_in(text))} == {}
