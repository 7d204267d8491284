"""What is graded: the learner's cells with the chapter's own checks between them."""

import ast
from dataclasses import dataclass, field

from course.exercise import UNDONE, blank
from course.source import Chapter
from course.statements import definitions
from course.tasks import Sheet
from course.trial import Code, mend

MAGIC = ("%", "!")


@dataclass
class Program:
    """What is run: the learner's cells with the chapter's checks, each definition that does not parse set aside.

    ``broken`` is qualified name → what is wrong with it: it does not parse, or never came back.
    """

    cells: list[Code]
    checks: frozenset[str]
    broken: dict[str, str] = field(default_factory=dict)

    def retire(self, name: str, reason: str) -> None:
        """Put a stub in the place of a function that never came back."""
        self.broken[name] = reason
        for number, cell in enumerate(self.cells):
            if name in definitions(ast.parse(cell.text)):
                self.cells[number] = Code(cell.id, blank(cell.text, {name: reason}))

    def undone(self, sheet: Sheet) -> set[str]:
        """Tasks that nobody began: no such function, or nothing in it."""
        found = {}
        for cell in self.cells:
            found |= definitions(ast.parse(cell.text))
        return {t.name for t in sheet.tasks if t.name not in self.broken and _empty(found.get(t.name))}


def _empty(node: ast.AST | None) -> bool:
    """Whether a body is missing, ``pass``, ``…`` or the exercise's own raise."""
    if node is None:
        return True
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    text = "\n".join(ast.unparse(statement) for statement in body)
    return (
        text in ("", "pass", "...") or len(body) == 1 and isinstance(body[0], ast.Raise) and bool(UNDONE.search(text))
    )


def assemble(chapter: Chapter, cells: list[Code]) -> Program:
    """The learner's code cells, with the chapter's own text in every check, and the cells that were deleted put back.

    Args:
        chapter: the chapter.
        cells: the notebook's code cells; cells that the chapter does not know stay where they are.
    """
    source = [cell for cell in chapter.code if "solution" not in cell.tags]
    checks = {cell.id: cell.text for cell in source if "check" in cell.tags}
    program = [Code(cell.id, checks.get(cell.id, cell.text)) for cell in _unique(cells)]
    for before, cell in zip([None, *source], source):
        places = {code.id: place for place, code in enumerate(program)}
        if cell.id not in places and "export" not in cell.tags:
            program.insert(places.get(before.id, len(program) - 1) + 1 if before else 0, Code(cell.id, cell.text))
    broken, mended = {}, []
    for code in program:
        text, found = mend(_python(code.text))
        mended.append(Code(code.id, text))
        broken |= {name or code.id: error for name, error in found.items()}
    return Program(mended, frozenset(checks), broken)


def _unique(cells: list[Code]) -> list[Code]:
    """Cells with ids that differ: a copy gets another."""
    seen: set[str] = set()
    found = []
    for number, cell in enumerate(cells):
        found.append(Code(f"{cell.id}-copy-{number}" if cell.id in seen else cell.id, cell.text))
        seen.add(cell.id)
    return found


def _python(text: str) -> str:
    """A cell without the lines that only a notebook understands."""
    return "\n".join("" if line.startswith(MAGIC) else line for line in text.split("\n"))
