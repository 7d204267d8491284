"""Rules for generated files: modules, notebooks and outputs are what the sources make, and nothing is left over."""

from itertools import zip_longest
from pathlib import Path

from course.export import build_notebook, edited, module_text, notebook_text, output_digest
from course.files import CourseError, read_notebook
from course.findings import Finding
from course.fingerprint import run_hash
from course.outputs import ALT, IMAGE, WIDGET
from course.source import LANGUAGES, PACKAGES, Chapter, chapter_paths

SIZE = 300_000  # bytes of a notebook
MARK = "# Generated from notebooks/source/"


def generated_findings(chapter: Chapter) -> list[Finding]:
    """Everything that was made from one chapter, compared with what it would be made into now."""
    try:
        return module_findings(chapter) + notebook_findings(chapter)
    except CourseError as error:
        return [Finding(chapter.source, "module", str(error))]


def module_findings(chapter: Chapter) -> list[Finding]:
    """The module's bytes."""
    path, expected = chapter.module_path, module_text(chapter)
    if path is None:
        return []
    name, fix = path.relative_to(chapter.root).as_posix(), f"run `course export {chapter.number}`"
    if not path.is_file():
        return [Finding(name, "module", f"missing; {fix}")]
    actual = path.read_text(encoding="utf-8")
    if actual == expected:
        return []
    pairs = zip_longest(actual.splitlines(), expected.splitlines())
    line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)
    return [Finding(name, "module", f"is not what {chapter.source} exports; {fix}", line=line)]


def notebook_findings(chapter: Chapter) -> list[Finding]:
    """Both notebooks: cells, outputs, size."""
    findings, results, expected = [], {}, run_hash(chapter)
    for language in LANGUAGES:
        path = chapter.notebook_path(language)
        name = path.relative_to(chapter.root).as_posix()
        notebook = read_notebook(path)
        if notebook is None:
            findings.append(Finding(name, "notebook", f"missing; run `course run {chapter.number}`"))
            continue
        findings += cell_findings(chapter, language, name, notebook)
        findings += output_findings(chapter, name, notebook, expected)
        if (size := path.stat().st_size) > SIZE:
            findings.append(
                Finding(name, "size", f"{size // 1000} kB; at most {SIZE // 1000} kB, draw smaller pictures")
            )
        results[language] = {c["id"]: c["outputs"] for c in notebook["cells"] if c["cell_type"] == "code"}
    if len(results) == 2:
        findings += _same_outputs(chapter, results)
    return findings


def cell_findings(chapter: Chapter, language: str, name: str, notebook: dict) -> list[Finding]:
    """Cells that differ from the source's, named; else any other byte that an export would change."""
    fix = f"`course adopt {name}`" if edited(notebook) else f"`course export {chapter.number}`"
    why = "was edited by hand" if edited(notebook) else "is older than its source"
    expected = {cell.id: (cell.text, list(cell.tags)) for cell in chapter.reading(language)}
    actual = {cell.get("id", "?"): (cell["source"], cell["metadata"].get("tags", [])) for cell in notebook["cells"]}
    odd = [i for i in {**expected, **actual} if expected.get(i) != actual.get(i)]
    if not odd and (list(expected) != list(actual) or len(actual) != len(notebook["cells"])):
        odd = [a for a, b in zip_longest(actual, expected) if a and a != b] or list(actual)[-1:]
    if odd:
        return [Finding(name, "notebook", f"this cell {why}; {fix}", cell) for cell in odd]
    path = chapter.notebook_path(language)
    if notebook_text(build_notebook(chapter, language, read_notebook(path))) != path.read_text(encoding="utf-8"):
        return [
            Finding(name, "notebook", f"its metadata are not what an export writes; `course export {chapter.number}`")
        ]
    return []


def output_findings(chapter: Chapter, name: str, notebook: dict, expected: str) -> list[Finding]:
    """Outputs that are stale, failed, live or mute."""
    fix = f"run `course run {chapter.number}`"
    record = notebook["metadata"].get("course", {})
    findings = []
    if record.get("run") != expected:
        why = "are older than the code or a module it imports" if record.get("run") else "were never stored"
        findings.append(Finding(name, "outputs", f"outputs {why}; {fix}"))
    elif record.get("outputs") != output_digest(notebook):
        findings.append(Finding(name, "outputs", f"outputs are not those that the last run stored; {fix}"))
    if "widgets" in notebook["metadata"]:
        findings.append(Finding(name, "outputs", f"saved widget state; {fix}"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                message = f"a stored {output['ename']}; catch it in the cell, then {fix}"
                findings.append(Finding(name, "outputs", message, cell["id"]))
            data = output.get("data", {})
            if any(mime.startswith(WIDGET) for mime in data):
                findings.append(Finding(name, "outputs", f"a live widget; {fix}", cell["id"]))
            if "image/png" in data and not output["metadata"].get("image/png", {}).get("alt"):
                message = "a picture without alt text; end the plot with course.figures.show(fig, alt=…)"
                findings.append(Finding(name, "alt", message, cell["id"]))
            pictures = IMAGE.findall("".join(data.get("text/html", "")))
            if not all(ALT.search(picture) for picture in pictures):
                message = "HTML with a picture without alt text; course.sliders.slider writes one for every frame"
                findings.append(Finding(name, "alt", message, cell["id"]))
    return findings


def _same_outputs(chapter: Chapter, results: dict[str, dict]) -> list[Finding]:
    """Both languages show the outputs of one run."""
    zh, en = (results[language] for language in LANGUAGES)
    name = chapter.notebook_path("en").relative_to(chapter.root).as_posix()
    message = f"its output differs from the zh notebook's; run `course run {chapter.number} --all`"
    return [Finding(name, "outputs", message, cell) for cell in zh if cell in en and zh[cell] != en[cell]]


def orphan_findings(root: Path, chapters: list[Chapter]) -> list[Finding]:
    """Generated files whose chapter is gone or builds something else."""
    stems, modules = {path.stem for path in chapter_paths(root)}, {c.module_path for c in chapters}
    findings = []
    for path in sorted(p for language in LANGUAGES for p in (root / "notebooks" / language).glob("*.ipynb")):
        if path.stem not in stems:
            name = path.relative_to(root).as_posix()
            findings.append(Finding(name, "orphan", f"no notebooks/source/{path.stem}.py; delete it"))
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        if path not in modules and path.read_text(encoding="utf-8").startswith(MARK):
            findings.append(
                Finding(path.relative_to(root).as_posix(), "orphan", "no chapter builds this module; delete it")
            )
    for path in sorted((root / "notebooks" / "source").glob("*.py")):
        if path.stem not in stems:
            message = "is no chapter's name; write NN_name.py in small letters"
            findings.append(Finding(path.relative_to(root).as_posix(), "orphan", message))
    return findings
