"""What a check reports: one finding, one line."""

from dataclasses import dataclass

from rich.markup import escape

from course.source import Cell, Chapter


@dataclass(frozen=True)
class Finding:
    """A broken rule: where, which, and what to do about it."""

    file: str
    rule: str
    message: str
    cell: str = ""
    line: int = 0

    def text(self, colour: bool = False) -> str:
        """``file:line [cell] rule: message``, with rich's markup when asked for."""
        where = self.file + (f":{self.line}" if self.line else "")
        cell = f" [{self.cell}]" if self.cell else ""
        if not colour:
            return escape(f"{where}{cell} {self.rule}: {self.message}")
        return f"[bold]{escape(where)}[/][dim]{escape(cell)}[/] [red]{self.rule}[/] {escape(self.message)}"


def at(chapter: Chapter, cell: Cell | None, rule: str, message: str) -> Finding:
    """A finding in a chapter's source, at one cell or at the file as a whole."""
    if cell is None:
        return Finding(chapter.source, rule, message)
    return Finding(chapter.source, rule, message, cell.id, cell.line)
