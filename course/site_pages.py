"""What a page of the site is, and how pages, anchors and pictures find each other."""

import base64
import html
import io
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from course.files import digest
from course.site_text import Piece

DATA_URI = re.compile(r"data:image/(png|jpeg|webp|gif|svg\+xml);base64,([A-Za-z0-9+/=\s]+)")
EXTENSIONS = {"svg+xml": "svg", "jpeg": "jpg"}


@dataclass
class Section:
    """One heading and what follows it, for the outline and the search."""

    anchor: str
    level: int
    title: str
    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


@dataclass
class Page:
    """One page in one language. Its twin in the other language has the same key and the same anchors.

    Attributes:
        key: the address without language and ``.html``: ``03_timestep_embedding``, ``papers/03_dit``, ``api``.
        kind: ``chapter``, ``notebook`` (beside the chapters), ``document``, ``api``, ``map`` or ``code``.
        source: the file it comes from, from the root.
        folder: where relative links in it start, from the root.
        pieces: its Markdown, by cell id in a chapter.
        anchors: those of all headings in order; aliases: what GitHub would call the same headings.
        facts: the one-row table under a chapter's title, as (heading, content).
    """

    language: str
    key: str
    kind: str
    source: str
    folder: str
    pieces: dict[str, Piece] = field(default_factory=dict)
    cells: list = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    title: str = ""
    heading: str = ""
    gloss: str = ""
    number: str = ""
    promise: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    body: str = ""

    @property
    def path(self) -> str:
        """The page's file from the site's root."""
        return f"{self.language}/{self.key}.html"

    @property
    def up(self) -> str:
        """The way from the page to the site's root."""
        return "../" * self.path.count("/")

    def href(self, other: "Page", anchor: str = "") -> str:
        """The way from this page to another."""
        here = os.path.dirname(self.path)
        target = "" if other is self and anchor else os.path.relpath(other.path, here).replace(os.sep, "/")
        return target + (f"#{anchor}" if anchor else "")

    @property
    def outline(self) -> list[Section]:
        """The second- and third-level headings."""
        return [section for section in self.sections if section.level in (2, 3)]


def anchor_name(heading: str) -> str:
    """A heading as an anchor: lower case, ASCII letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"


def github_name(heading: str) -> str:
    """What GitHub makes of a heading in whatever script."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def share_anchors(pages: list[Page], headings: list[dict[str, list[str]]]) -> None:
    """Give the pages of both languages the same anchors, made from the English headings where both have as many.

    Args:
        pages: the page in each language that it exists in, English last.
        headings: for each page, cell id → the words of its headings.
    """
    names = headings[-1]
    for page, own in zip(pages, headings, strict=True):
        seen: Counter[str] = Counter()
        for cell, said in own.items():
            shared = names.get(cell, [])
            lead = shared if len(shared) == len(said) else [f"{cell} {place}" for place in range(len(said))]
            for words, name in zip(said, map(anchor_name, lead), strict=True):
                seen[name] += 1
                anchor = name if seen[name] == 1 else f"{name}-{seen[name]}"
                page.anchors.append(anchor)
                page.aliases.setdefault(github_name(words), anchor)


class Media:
    """Pictures by their contents: what both languages show is stored once."""

    def __init__(self):
        self.files: dict[str, bytes] = {}

    def add(self, data: bytes, extension: str) -> str:
        """Keep a picture; returns its path from the site's root."""
        name = f"media/{digest(data, length=16)}.{extension}"
        self.files[name] = data
        return name

    def figure(self, data: bytes, extension: str, alt: str, up: str, lang: str = "") -> str:
        """A picture on its card, with its size, so that nothing moves while it loads."""
        size = ""
        if extension != "svg":
            width, height = Image.open(io.BytesIO(data)).size
            size = f' width="{width}" height="{height}"'
        lang = f' lang="{lang}"' if lang else ""
        source = up + self.add(data, extension)
        alt = html.escape(alt, quote=True)
        return f'<div class="card"><img src="{source}" alt="{alt}"{lang}{size} loading="lazy" decoding="async"></div>'

    def externalise(self, text: str, up: str) -> str:
        """HTML with every picture inside it moved to a file."""

        def move(found: re.Match) -> str:
            kind, data = found.groups()
            return up + self.add(base64.b64decode(data), EXTENSIONS.get(kind, kind))

        return DATA_URI.sub(move, text)


def commits(root: Path) -> dict[str, str]:
    """The last commit of every file, short; a trailing ``+`` where the file has changed since. Empty without git."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", root, "-c", "core.quotepath=off", *arguments], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""

    found: dict[str, str] = {}
    current = ""
    for line in git("log", "--format=%x00%h", "--name-only").splitlines():
        if line.startswith("\0"):
            current = line[1:]
            found.setdefault("", current)
        elif line:
            found.setdefault(line, current)
    changed = [line[3:] for line in git("status", "--porcelain").splitlines()]
    return found | {name: f"{found[name]}+" for name in changed if name in found}
