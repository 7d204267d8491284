"""Rules for what is written for people: twins that say the same, prose that renders, terms, links, lengths."""

import re
from collections import Counter
from pathlib import Path
from statistics import median
from urllib.parse import unquote

from course.findings import Finding, at
from course.prose import HAN, Prose, analyse, words
from course.source import Cell, Chapter, twin_stamp
from course.terms import Term, term_faults

LENGTH = {"zh": (10, 150), "en": (8, 75)}  # one cell's paragraphs, in Han characters or words
MEDIAN_LENGTH = {"zh": (20, 120), "en": (15, 60)}
LANGUAGE = re.compile(r"(?<![A-Za-z])(zh|en)(?![A-Za-z])")
WORDS_IN_FORMULA = re.compile(r"\\(text|textbf|textit|mbox)\{[^{}]*\}")
# Lone symbols and numbers: a sentence may repeat or drop them.
SYMBOL = re.compile(r"\s*\\?[\w.]+(\s*,\s*\\?[\w.]+)*\s*")
REMOTE = re.compile(r"^(https?:|mailto:|data:)")


def twin_findings(chapter: Chapter) -> list[Finding]:
    """Every zh cell has its en twin directly after it, stamped, with the same skeleton."""
    findings = []
    for slot in chapter.slots():
        cell = slot[0]
        if len(slot) == 2:
            findings += _pair_findings(chapter, *slot)
        elif cell.kind == "zh":
            findings.append(at(chapter, cell, "twin", 'no en twin; write a `lang="en"` cell directly after it'))
        elif cell.kind == "en":
            findings.append(at(chapter, cell, "twin", 'no zh twin; write its `lang="zh"` cell directly before it'))
    return findings


def _pair_findings(chapter: Chapter, zh: Cell, en: Cell) -> list[Finding]:
    """One pair: the stamp, then what differs."""
    findings = [at(chapter, en, "parity", message) for message in differences(analyse(zh.text), analyse(en.text))]
    if message := stamp_fault(zh.text, en.text, en.twin):
        fix = f"look at both, then `course twins {chapter.number}`"
        findings.append(at(chapter, en, "stamp", f"{message}; {fix}"))
    return findings


def stamp_fault(zh: str, en: str, stamp: str | None) -> str:
    """Which of two texts changed since the stamp was made; nothing when neither did."""
    now = twin_stamp(zh, en)
    if not stamp:
        return "the en twin has no stamp"
    changed = [name for name, part in (("zh", slice(0, 4)), ("en", slice(4, 8))) if stamp[part] != now[part]]
    if not changed:
        return ""
    return "both twins changed" if len(changed) == 2 else f"the {changed[0]} twin changed alone"


def differences(zh: Prose, en: Prose) -> list[str]:
    """How the skeletons of twins differ: headings, formulas, links, figures, tables, lists, code blocks."""
    pairs = {
        "headings": ([f"level {level}" for level, _ in zh.headings], [f"level {level}" for level, _ in en.headings]),
        "formulas": tuple(
            sorted({bare_formula(f) for f in prose.formulas if not SYMBOL.fullmatch(f)}) for prose in (zh, en)
        ),
        "links": tuple(sorted(LANGUAGE.sub("*", link) for link in prose.links) for prose in (zh, en)),
        "figures": tuple(sorted(LANGUAGE.sub("*", source) for source, _ in prose.images) for prose in (zh, en)),
        "tables": tuple([f"{rows} rows, {cells} cells" for rows, cells in prose.tables] for prose in (zh, en)),
        "list items": ([str(zh.items)], [str(en.items)]),
        "code blocks": ([str(zh.fences)], [str(en.fences)]),
    }
    found = []
    for name, (left, right) in pairs.items():
        if left != right:
            only = [list((Counter(a) - Counter(b)).elements()) for a, b in ((left, right), (right, left))]
            found.append(f"{name} differ: zh {', '.join(only[0]) or '–'} / en {', '.join(only[1]) or '–'}")
    return found


def bare_formula(formula: str) -> str:
    """A formula without what a language may change: words, spaces, closing punctuation; a lone symbol is nothing."""
    if SYMBOL.fullmatch(formula):
        return ""
    return re.sub(r"\s+", "", WORDS_IN_FORMULA.sub("", formula)).rstrip(".,;，。；")


def render_faults(text: str) -> list[tuple[str, str]]:
    """(rule, message) for what comes out literally or as the wrong thing."""
    prose, faults = analyse(text), []
    for piece in prose.texts:
        if "**" in piece:
            where = piece[max(0, piece.index("**") - 12) : piece.index("**") + 12].replace("\n", " ")
            faults.append(("bold", f"a literal ** is left in “{where}”; put the punctuation outside the bold"))
        if "$" in piece:
            faults.append(
                ("math", f"a literal $ is left in “{piece.strip()[:40]}”; escape it, or write \\mid for | in a table")
            )
    for formula in prose.formulas:
        if HAN.search(WORDS_IN_FORMULA.sub("", formula)):
            faults.append(("math", f"${formula}$ holds Chinese outside \\text; escape the dollar if it is money"))
        if re.search(r"\\begin\{align\*?\}", formula):
            faults.append(("math", "use aligned, not align"))
    faults += [("alt", f"figure {source} has no alt text") for source, alt in prose.images if not alt.strip()]
    return faults


def link_faults(text: str, folder: Path, root: Path) -> list[str]:
    """Relative links and figures that lead nowhere, from the folder in which the text is read."""
    prose, faults = analyse(text), []
    for link in [*prose.links, *(source for source, _ in prose.images)]:
        path = unquote(link.split("#")[0].split("?")[0])
        if not path or REMOTE.match(link):
            continue
        if path.startswith("/"):
            faults.append(f"{link} is absolute; write it relative to {folder.relative_to(root).as_posix()}/")
        elif not (folder / path).exists():
            faults.append(f"{link} does not exist from {folder.relative_to(root).as_posix()}/")
    return faults


def text_findings(chapter: Chapter, terms: tuple[Term, ...]) -> list[Finding]:
    """Rendering, terms, links and lengths of every prose cell."""
    findings = []
    for cell in chapter.cells:
        if cell.kind not in LENGTH:
            continue
        findings += [at(chapter, cell, rule, message) for rule, message in render_faults(cell.text)]
        prose = analyse(cell.text)
        findings += [at(chapter, cell, "term", m) for m in term_faults(prose.text, cell.kind, terms)]
        folder = chapter.notebook_path(cell.kind).parent
        findings += [at(chapter, cell, "link", m) for m in link_faults(cell.text, folder, chapter.root)]
    return findings + length_findings(chapter)


def length_findings(chapter: Chapter) -> list[Finding]:
    """Prose cells neither too short nor too long, and in the middle as STYLE wants them."""
    findings = []
    for language, (low, high) in LENGTH.items():
        unit, lengths = {"zh": "characters", "en": "words"}[language], []
        for cell in [cell for cell in chapter.cells if cell.kind == language]:
            prose = analyse(cell.text)
            length = words("\n".join(prose.paragraphs), language)
            rich = prose.headings or prose.formulas or prose.tables or prose.items or prose.images or prose.fences
            lengths += [length] if not (prose.tables or prose.items) else []
            if length > high:
                findings.append(at(chapter, cell, "prose", f"{length} {unit}; at most {high}, split the idea"))
            elif length < low and not rich:
                findings.append(
                    at(chapter, cell, "prose", f"{length} {unit}; at least {low}, or join it to its neighbour")
                )
        low, high = MEDIAN_LENGTH[language]
        if lengths and not low <= median(lengths) <= high:
            found = f"the median {language} cell has {median(lengths):g} {unit}; between {low} and {high}"
            findings.append(at(chapter, None, "prose", found))
    return findings
