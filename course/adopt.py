"""Edits made in a generated notebook, brought home to the source by cell id: all of them, or none."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from course.export import export_chapter
from course.files import CourseError, digest, read_notebook, write_if_changed
from course.source import LANGUAGES, PLAYGROUND, Cell, Chapter, chapter_paths, load_chapter, read_percent, write_percent


@dataclass
class Adopted:
    """What came home, and what is left to do."""

    chapter: Chapter
    language: str
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report."""
        if not self.cells:
            return ["nothing was edited"]
        report = [f"adopted {cell.id} ({cell.kind}) into {self.chapter.source}:{cell.line}" for cell in self.cells]
        if any(cell.kind != "code" for cell in self.cells):
            other = "en" if self.language == "zh" else "zh"
            report.append(f"the {other} twins need a look, then `course twins {self.chapter.number}`")
        if any(cell.kind == "code" for cell in self.cells):
            report.append(f"code changed: `course run {self.chapter.number}`")
        return report + self.notes


def adopt_notebook(path: Path, root: Path) -> Adopted:
    """Bring the edits of one notebook home and export the chapter again.

    Raises:
        CourseError: a cell cannot be placed (new, deleted, moved, retyped, unknown), or the source changed the same
            cell meanwhile; no file was touched.
    """
    language, chapter = _belongs_to(path, root)
    notebook = read_notebook(path)
    if notebook is None:
        raise CourseError(f"{path} does not exist")
    cells = chapter.reading(language)
    _same_places(path.name, notebook["cells"], cells, chapter)
    edits = _edits(path.name, notebook, cells, chapter)
    if not edits:
        return Adopted(chapter, language, [])
    text = _rewritten(chapter, edits)
    write_if_changed(chapter.path, text)
    now = load_chapter(chapter.path, root)
    done = Adopted(now, language, [replace(cell, text=edits[cell.line]) for cell in cells if cell.line in edits])
    try:
        export_chapter(now, force=(language,))
    except CourseError as error:
        done.notes.append(f"not exported yet: {error}")
    return done


def _belongs_to(path: Path, root: Path) -> tuple[str, Chapter]:
    """Language and chapter of a generated notebook."""
    language, stem, home = path.parent.name, path.stem, path.parent.parent
    if path.parent == root / "notebooks":  # the playground: notebooks/playground.zh.ipynb
        stem, _, language = path.stem.partition(".")
        home = path.parent
    if language not in LANGUAGES or home != root / "notebooks" or path.suffix != ".ipynb":
        raise CourseError(f"{path} is no generated notebook; name one in notebooks/zh or notebooks/en")
    for source in chapter_paths(root):
        if source.stem == stem and (stem == PLAYGROUND) == (home == path.parent):
            return language, load_chapter(source, root)
    raise CourseError(f"{path.name} has no source notebooks/source/{stem}.py")


def _same_places(name: str, found: list[dict], cells: list[Cell], chapter: Chapter) -> None:
    """Refuse a notebook whose cells are not the source's, one for one and in order."""
    ids, expected = [cell.get("id", "(none)") for cell in found], [cell.id for cell in cells]
    where = f"add, delete or move cells in {chapter.source}, not in {name}; nothing was adopted"
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise CourseError(f"{name} holds {', '.join(twice)} more than once; {where}")
    if unknown := [i for i in ids if i not in expected]:
        raise CourseError(f"{name} has cells that the source does not know: {', '.join(unknown)}; {where}")
    if missing := [i for i in expected if i not in ids]:
        raise CourseError(f"{name} lacks {', '.join(missing)}; {where}")
    if ids != expected:
        moved = next(a for a, b in zip(ids, expected, strict=True) if a != b)
        raise CourseError(f"{name} has its cells in another order, from {moved} on; {where}")
    for here, cell in zip(found, cells, strict=True):
        kind = "code" if cell.kind == "code" else "markdown"
        if here["cell_type"] != kind or here["metadata"].get("tags", []) != list(cell.tags):
            raise CourseError(f"{name}: type or tags of {cell.id} changed; {where}")


def _edits(name: str, notebook: dict, cells: list[Cell], chapter: Chapter) -> dict[int, str]:
    """Line of the source cell → its new text, for every cell edited since the notebook was written."""
    record = notebook["metadata"].get("course", {}).get("cells", "").split()
    if len(record) != len(cells):
        raise CourseError(
            f"{name} does not say what it was exported from; copy its edits into {chapter.source} by hand"
        )
    edits, clashes = {}, []
    for here, cell, written in zip(notebook["cells"], cells, record, strict=True):
        if here["source"] == cell.text or digest(here["source"]) == written:
            continue
        if digest(cell.text) != written:
            clashes.append(cell.id)
        edits[cell.line] = here["source"].strip("\n")
    if clashes:
        fix = f"settle them in {chapter.source}, then `course export {chapter.number} --force`"
        raise CourseError(f"{', '.join(clashes)} changed in {name} and in the source; {fix}. Nothing was adopted")
    return edits


def _rewritten(chapter: Chapter, edits: dict[int, str]) -> str:
    """The source with the edits in place, checked to read back as exactly those cells."""
    notebook = read_percent(chapter.text)
    expected = [edits.get(cell.line, cell.text) for cell in chapter.cells]
    for node, text in zip(notebook.cells, expected, strict=True):
        node.source = text
    text = write_percent(notebook)
    if [node.source for node in read_percent(text).cells] != expected:
        raise CourseError(f"an edit does not survive in {chapter.source} (a line `# %%`, perhaps); nothing was adopted")
    return text
