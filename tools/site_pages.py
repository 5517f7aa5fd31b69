"""What the documentation site adds to the pages in docs/: tables and references from the code, links to the repository.

mkdocs calls `on_page_markdown` for each page. The line `<!-- settings -->` becomes the table of all settings,
`<!-- names of PACKAGE -->` the reference of each of its public names that the page has not yet, `<!-- file: PATH -->` a
file of the repository. A picture on a line of its own leads to itself, in its full size; a schedule's, in the gallery,
also to the playground.
Beside the pages lies the timeline that the home page opens with.
"""

import importlib
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

from penstock import schedule
from penstock.draw import Layer, write_drawing
from penstock.settings import SETTINGS
from penstock.settings.declare import in_words, plain
from penstock.settings.run import section_summaries

ROOT = Path(__file__).parents[1]
#: columns of a line of code, for which a wide window has room
LONGEST_LINE = 120
_LINK = re.compile(r"(\]\()(\.\.?/[^)#\s]+)")
_FILE = re.compile(r"^<!-- file: (.+) -->$", re.MULTILINE)
_SCHEDULE = re.compile(r"^!\[([\w-]+), (\d+) ranks, (\d+) microbatches\]\(gallery/.+\)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$", re.MULTILINE)
_BLOCK = re.compile(r"<pre>(.+?</pre>)", re.DOTALL)
_NUMBERED = re.compile(r"(\d+)\. ")
_CODE = re.compile(r"<code>[^<]+</code>")
_OPTION = re.compile(r"(?<![\w-])--?[\w.-]+")
_NAMES = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's Markdown as it is built."""
    markdown = markdown.replace("<!-- settings -->", settings_table())
    markdown = with_files(markdown)
    markdown = _NAMES.sub(lambda found: reference_of(found[1], markdown), markdown)
    markdown = _SCHEDULE.sub(in_playground, markdown)
    markdown = _PICTURE.sub(r"[\g<0>](\1)", with_gaps(markdown))
    return outer_links(markdown, page.file.src_uri, config["repo_url"])


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML, where no line ends within an option of a command, and blocks of long lines are marked."""
    html = _BLOCK.sub(lambda block: f'<pre class="long">{block[1]}' if _is_long(block[1]) else block[0], html)
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_build(*, config: Any) -> None:
    """Write the timeline of the home page into the built site, as the command that the page names does."""
    program = schedule.lower(schedule.build("interleaved", ranks=4, microbatches=8))
    schedule.verify(program)
    write_drawing(Path(config["site_dir"]) / "step.html", [Layer.simulated(schedule.simulate(program))])


def _is_long(block: str) -> bool:
    return max(map(len, unescape(re.sub("<[^>]+>", "", block)).split("\n"))) > LONGEST_LINE


def in_playground(picture: re.Match[str]) -> str:
    """A schedule's picture in the gallery with a link to the playground, where it can be changed."""
    state = f"schedule={picture[1]}&amp;ranks={picture[2]}&amp;microbatches={picture[3]}"
    return f'{picture[0]}\n\n<p><a href="playground.html#{state}">Open {picture[1]} in the playground</a></p>'


def with_gaps(markdown: str) -> str:
    """Return a page's Markdown with a new list wherever numbers leave one out, since a list counts for itself."""
    lines, last = [], 0
    for line in markdown.split("\n"):
        number = int(found[1]) if (found := _NUMBERED.match(line)) else 0
        if number and last and number != last + 1:
            lines += ["", "<!-- -->", ""]
        last = number or (last if line.startswith(" ") else 0)
        lines.append(line)
    return "\n".join(lines)


def outer_links(markdown: str, page: str, repository: str) -> str:
    """Let links from docs/ to other files of the repository lead to the repository's own pages."""

    def outer(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]}{repository}/blob/main/{path}"

    return _LINK.sub(outer, markdown)


def with_files(markdown: str) -> str:
    """Return a page's Markdown with each file that it includes as a block of Python, under the file's name."""

    def block(found: re.Match[str]) -> str:
        path = ROOT / found[1]
        return f'```python title="{path.name}"\n{path.read_text(encoding="utf-8")}```'

    return _FILE.sub(block, markdown)


def settings_table() -> str:
    """A table a section: each setting with its values, its default, its bounds and its sentence of help."""
    parts = []
    for section, summary in {"": "Outside all sections.", **section_summaries()}.items():
        own = [setting for setting in SETTINGS.values() if setting.section == section]
        rows = ["| setting | values | default | meaning |", "|---|---|---|---|"]
        for setting in own:
            values = (
                f"{in_words(setting.type)}{f', {setting.bounds}' if setting.bounds and str(setting.bounds) else ''}"
            )
            cells = (f"`{setting.key}`", values, _shown(plain(setting.default)), setting.help)
            rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        parts.append(f"## {f'[{section}]' if section else 'The run'}\n\n{summary}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    """A default as a file has it; nothing for one that is empty."""
    if value is None or value in ((), {}):
        return ""
    words = value if isinstance(value, tuple) else (value,)
    return f"`{' '.join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)}`"


def reference_of(package: str, page: str) -> str:
    """The public names of a package, each with its own documentation, but for those that the page has by itself."""
    names = [name for name in importlib.import_module(package).__all__ if not name.startswith("__")]
    places = (f"::: {package}.{name}" for name in names)
    return "\n\n".join(place for place in places if place not in page.splitlines())
