"""The README and pages beside it are true: links and paths lead somewhere. Their blocks are run by `test_pages.py`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/serving.md", "docs/testing.md"),
        *(f"docs/guides/{name}.md" for name in ("schedules", "training", "fine_tuning", "generation", "grid")),
    ],
)
def test_links_and_paths_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert links or paths
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
    assert [path for path in paths if not any((ROOT / top / path).exists() for top in ("", "src/penstock"))] == []


def test_the_way_to_read_is_true():
    """The files of the list exist, are few, and none is too long to be read in one go."""
    _, _, rest = README.partition("## What to read first")
    files = re.findall(r"^\d+\. \[`[^`]+`\]\(([^)]+)\)", rest.partition("\n## ")[0], re.MULTILINE)
    assert {"src/penstock/schedule/lower.py", "src/penstock/runtime/stage.py"} <= set(files)
    assert all(len((ROOT / file).read_text().splitlines()) <= 650 for file in files)
