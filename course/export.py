"""Source to everything else: the module of a chapter and its two notebooks."""

import json
import subprocess
from collections import defaultdict, deque
from pathlib import Path

import jupytext
import nbformat
from nbformat import v4
from ruff.__main__ import find_ruff_bin

from course.files import CourseError, digest, read_notebook, write_if_changed
from course.source import LANGUAGES, Chapter

BANNER = """\
# Generated from {source} by `course export`.
# Do not edit: change the chapter and export again.

"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def module_text(chapter: Chapter) -> str | None:
    """The module that the chapter's ``export`` cells make, formatted; None for a chapter that builds none.

    Raises:
        CourseError: header and cells disagree on whether there is a module, or the code does not parse.
    """
    cells = [cell for cell in chapter.code if "export" in cell.tags]
    if bool(cells) != bool(chapter.module):
        found = f"{len(cells)} export cells" if cells else f"module {chapter.module} in its header but no export cell"
        raise CourseError(f"{chapter.source} has {found}; export cells and the header's `module:` go together")
    if not cells:
        return None
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell.text) for cell in cells])
    notebook.metadata["jupytext"] = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "-all"}
    return format_code(
        BANNER.format(source=chapter.source) + jupytext.writes(notebook, fmt="py:nomarker"), chapter.source
    )


def format_code(text: str, name: str) -> str:
    """``ruff format`` with settings of its own, so that no other configuration changes the modules."""
    command = [find_ruff_bin(), "format", "--isolated", "--line-length=120", "--target-version=py311", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise CourseError(f"{name}: the export cells do not make a module: {done.stderr.strip()}")
    return done.stdout


def cell_digests(cells: list[dict]) -> str:
    """One short digest a cell, in order: what `course export` wrote, so that later edits can be told from it."""
    return " ".join(digest(cell["source"]) for cell in cells)


def output_digest(notebook: dict) -> str:
    """Digest of all outputs of a notebook as it lies on disk: what `course run` stored, so that others can be told."""
    outputs = [[cell["outputs"], cell["execution_count"]] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return digest(json.dumps(outputs, sort_keys=True))


def edited(notebook: dict | None) -> bool:
    """Whether someone changed cells of a generated notebook since it was written."""
    if notebook is None:
        return False
    return notebook["metadata"].get("course", {}).get("cells") != cell_digests(notebook["cells"])


def build_notebook(chapter: Chapter, language: str, previous: dict | None) -> dict:
    """The notebook of one language; outputs of ``previous`` stay with every code cell whose code is unchanged."""
    kept = defaultdict(deque)
    for cell in previous["cells"] if previous else []:
        if cell["cell_type"] == "code":
            kept[cell["source"]].append((cell["outputs"], cell["execution_count"]))
    cells = []
    for cell in chapter.reading(language):
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        entry = {"cell_type": "code" if cell.kind == "code" else "markdown", "id": cell.id, "metadata": metadata}
        entry["source"] = cell.text
        if cell.kind == "code":
            entry["outputs"], entry["execution_count"] = kept[cell.text].popleft() if kept[cell.text] else ([], None)
        cells.append(entry)
    course = {"source": chapter.source, "language": language, "cells": cell_digests(cells)}
    record = previous["metadata"].get("course", {}) if previous else {}
    course |= {key: record[key] for key in ("run", "outputs") if key in record}
    metadata = {"course": course, "kernelspec": KERNEL, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebook_text(notebook: dict) -> str:
    """The bytes of a notebook file: nbformat's own layout, keys sorted, one newline at the end."""
    return nbformat.writes(nbformat.from_dict(json.loads(json.dumps(notebook)))).rstrip("\n") + "\n"


def export_chapter(chapter: Chapter, force: tuple[str, ...] = ()) -> list[Path]:
    """Write the module and both notebooks where they differ.

    Args:
        chapter: the chapter.
        force: languages whose notebook is overwritten even though its cells were edited by hand.

    Returns:
        The files written.

    Raises:
        CourseError: a notebook holds edits that would be lost; nothing is written then.
    """
    texts = {}
    module = module_text(chapter)
    if module is not None:
        texts[chapter.module_path] = module
    for language in LANGUAGES:
        path = chapter.notebook_path(language)
        previous = read_notebook(path)
        if language not in force and edited(previous) and _differs(previous, chapter, language):
            name = path.relative_to(chapter.root).as_posix()
            raise CourseError(f"{name} was edited by hand; `course adopt {name}` keeps the edits, --force drops them")
        texts[path] = notebook_text(build_notebook(chapter, language, previous))
    return [path for path, text in texts.items() if write_if_changed(path, text)]


def _differs(notebook: dict, chapter: Chapter, language: str) -> bool:
    """Whether a notebook's cells are other than the source's."""
    return [(c.get("id"), c["source"]) for c in notebook["cells"]] != [
        (c.id, c.text) for c in chapter.reading(language)
    ]
