"""Stamp the en twins after a look: each records the texts that were seen to say the same."""

import re
from pathlib import Path

from course.documents import document_names, half, read_pair, stamped
from course.files import CourseError, write_if_changed
from course.source import Chapter, load_chapter, read_percent, twin_stamp, write_percent

TWIN = re.compile(r'\s+twin="[^"]*"')


def stamp_chapter(chapter: Chapter) -> list[str]:
    """Write fresh stamps, and the file in the form that JupyterLab saves; returns the ids of cells stamped anew."""
    lines, changed = chapter.text.splitlines(keepends=True), []
    for slot in chapter.slots():
        if len(slot) == 2:
            zh, en = slot
            stamp = twin_stamp(zh.text, en.text)
            if en.twin != stamp:
                head = TWIN.sub("", lines[en.line - 1].rstrip())
                lines[en.line - 1] = f'{head} twin="{stamp}"\n'
                changed.append(en.id)
    write_if_changed(chapter.path, write_percent(read_percent("".join(lines))))
    load_chapter(chapter.path, chapter.root)
    return changed


def stamp_documents(root: Path, wanted: list[str]) -> list[str]:
    """Stamp document pairs named by path (``papers/03_dit``) or folder (``papers``); returns those stamped anew.

    Raises:
        CourseError: a name fits no pair.
    """
    names, changed = {name.relative_to(root).as_posix(): name for name in document_names(root)}, []
    for word in wanted:
        plain = re.sub(r"\.(zh|en)\.md$", "", word.rstrip("/"))
        chosen = [shown for shown in names if shown == plain or shown.startswith(f"{plain}/")]
        if not chosen:
            raise CourseError(f"{word} is no chapter and no document; try one of {', '.join(names) or 'none yet'}")
        for shown in chosen:
            if not all(half(names[shown], language).is_file() for language in ("zh", "en")):
                raise CourseError(f"{shown} lacks one of its two languages; write it first")
            zh, en, _ = read_pair(names[shown])
            changed += [shown] if write_if_changed(half(names[shown], "en"), stamped(zh, en)) else []
    return changed
