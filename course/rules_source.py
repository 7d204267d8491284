"""Rules that a chapter's source must keep by itself: header, tags, rhythm."""

import ast
import re
from statistics import median

from course.findings import Finding, at
from course.source import TAGS, Chapter, read_percent, write_percent

CELLS = (25, 45)  # a reader of one language
CELLS_WITHOUT_MODULE = (10, 45)
MEDIAN_LINES, LONG_LINES, MOST_LINES = 7, 20, 40
CHECKS, SOLUTIONS, FIRST_PICTURE = 6, 3, 10
META = {"module", "package", "minutes"}
PICTURE = re.compile(r"(?<!def )\b(show|image_grid|slider|imshow)\(")
JUDGES = re.compile(r"\bassert|\braise\b")


def header_findings(chapter: Chapter) -> list[Finding]:
    """The header names what the chapter builds, and the file is what a save in JupyterLab would write."""
    found = []
    notebook = read_percent(chapter.text)
    if unknown := set(chapter.meta) - META:
        found.append(f"unknown course entry {', '.join(sorted(unknown))}; known are {', '.join(sorted(META))}")
    if not chapter.meta.get("minutes"):
        found.append("no `minutes` under `course:` in the header")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("no kernelspec python3 in the header")
    exports = any("export" in cell.tags for cell in chapter.code)
    if exports != bool(chapter.module):
        found.append("export cells and `course: module:` in the header go together; one is there without the other")
    findings = [at(chapter, None, "header", message) for message in found]
    if write_percent(notebook) != chapter.text:
        fix = f"`course twins {chapter.number}` writes it in that form"
        findings.append(at(chapter, None, "form", f"a save in JupyterLab would rewrite other lines than yours; {fix}"))
    return findings


def title_findings(chapter: Chapter) -> list[Finding]:
    """The first cells are a title ``# NN · …`` with a table."""
    findings = []
    for language in ("zh", "en"):
        first = next(iter(chapter.reading(language)), None)
        if first is None or not first.text.startswith(f"# {chapter.number} · "):
            findings.append(
                at(chapter, first, "title", f"the first {language} cell must begin `# {chapter.number} · `")
            )
        elif chapter.module and "\n| ---" not in first.text:
            findings.append(
                at(chapter, first, "title", "the title cell needs its table: you build, you need, time, module")
            )
    return findings


def tag_findings(chapter: Chapter) -> list[Finding]:
    """Only known tags and options; one role a cell; checks that can fail."""
    findings = []
    for cell in chapter.cells:
        if cell.kind == "other":
            findings.append(at(chapter, cell, "tag", 'prose needs lang="zh" or lang="en"; raw cells are not used'))
        for tag in cell.tags:
            if tag not in TAGS or cell.kind != "code":
                message = f"unknown tag {tag}; code cells may have {', '.join(TAGS)}"
                findings.append(at(chapter, cell, "tag", message))
        if cell.options:
            findings.append(
                at(chapter, cell, "tag", f"unknown option {', '.join(cell.options)}; known are tags, lang, twin")
            )
        roles = [tag for tag in cell.tags if tag in ("export", "check", "solution")]
        if len(roles) > 1:
            findings.append(at(chapter, cell, "tag", f"{' and '.join(roles)} in one cell; a cell plays one role"))
        if "check" in cell.tags and not JUDGES.search(cell.text):
            findings.append(at(chapter, cell, "check", "this check cannot fail; assert something"))
    return findings


def rhythm_findings(chapter: Chapter) -> list[Finding]:
    """Counts: cells, code lines, checks, solutions, the first picture."""
    low, high = CELLS if chapter.module else CELLS_WITHOUT_MODULE
    count = len(chapter.reading("zh"))
    findings = []
    if not low <= count <= high:
        findings.append(at(chapter, None, "cells", f"{count} cells in one language; between {low} and {high}"))
    for tag, least in (("check", CHECKS), ("solution", SOLUTIONS)) if chapter.module else ():
        number = sum(tag in cell.tags for cell in chapter.code)
        if number < least:
            findings.append(at(chapter, None, "checks", f"{number} {tag} cells; at least {least}"))
    drawn = [bool(PICTURE.search(cell.text)) for cell in chapter.code[:FIRST_PICTURE]]
    if not any(drawn):
        findings.append(at(chapter, None, "picture", f"no picture within the first {FIRST_PICTURE} code cells"))
    return findings + code_findings(chapter)


def code_findings(chapter: Chapter) -> list[Finding]:
    """Short code cells: the median, the long ones, the longest; folded plumbing only may not be the longest."""
    every = [(code_lines(cell.text), cell) for cell in chapter.code]
    lengths = [(length, cell) for length, cell in every if "hide" not in cell.tags]
    if not lengths:
        return [at(chapter, None, "code", "no code cell")]
    findings = []
    if (middle := median(length for length, _ in lengths)) > MEDIAN_LINES:
        findings.append(at(chapter, None, "code", f"the median code cell has {middle:g} lines; at most {MEDIAN_LINES}"))
    long = [(length, cell) for length, cell in lengths if length >= LONG_LINES]
    if len(long) > -(-len(lengths) // 10):
        named = ", ".join(f"{cell.id} ({length})" for length, cell in long)
        findings.append(
            at(chapter, None, "code", f"{len(long)} cells of {LONG_LINES} lines or more; one in ten: {named}")
        )
    for length, cell in every:
        if length > MOST_LINES:
            findings.append(at(chapter, cell, "code", f"{length} lines; at most {MOST_LINES}, show it in pieces"))
    return findings


def code_lines(code: str) -> int:
    """Lines of a code cell that a reader must read: no blank lines, no docstrings."""
    lines = {number for number, line in enumerate(code.splitlines(), 1) if line.strip()}
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return len(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def source_findings(chapter: Chapter) -> list[Finding]:
    """Every rule of this module."""
    rules = (header_findings, title_findings, tag_findings, rhythm_findings)
    rules = rules if chapter.is_chapter else (header_findings, tag_findings)
    return [finding for rule in rules for finding in rule(chapter)]
