"""The search index: one entry a heading section, both languages in it, so that either language finds it in the other."""

import json
import re

from course.site_pages import Page, Section

SPACE = re.compile(r"[^\S\n]*\n\s*|[ \t]+")


def search_index(pages: list[Page], languages: tuple[str, ...]) -> str:
    """A classic script that sets ``window.SITE_INDEX``: a page opened from disk may load scripts but may not fetch.

    ``pages``: [key, kind, {language: title}]; ``entries``: [page, anchor, {language: [heading, prose]}, code].
    """
    by_key: dict[str, dict[str, Page]] = {}
    for page in pages:
        if page.kind not in ("map", "code"):
            by_key.setdefault(page.key, {})[page.language] = page
    listed, entries = [], []
    for key, twins in by_key.items():
        titles = {language: twins[language].title for language in languages if language in twins}
        listed.append([key, next(iter(twins.values())).kind, titles])
        entries += _entries(len(listed) - 1, twins)
    data = json.dumps({"pages": listed, "entries": entries}, ensure_ascii=False, separators=(",", ":"))
    return "window.SITE_INDEX=" + data.replace("</", "<\\/") + ";\n"


def _entries(place: int, twins: dict[str, Page]) -> list[list]:
    """The sections of one page, those of both languages with the same anchor joined."""
    joined: dict[str, dict[str, Section]] = {}
    for language, page in twins.items():
        for section in page.sections:
            joined.setdefault(section.anchor, {})[language] = section
    found = []
    for anchor, sections in joined.items():
        texts = {language: [s.title, squeeze(" ".join(s.prose))] for language, s in sections.items()}
        code = squeeze("\n".join(next(iter(sections.values())).code))
        found.append([place, anchor, texts, code])
    return found


def squeeze(text: str) -> str:
    """Text with every run of spaces and line ends as one space."""
    return SPACE.sub(" ", text).strip()
