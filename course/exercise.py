"""A chapter as an exercise: what it exports is blanked, its checks say which tasks they judge, solutions are gone."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from course.export import KERNEL, notebook_text
from course.files import CourseError, digest, read_notebook, write_if_changed
from course.source import Chapter
from course.statements import definitions
from course.tasks import Sheet, Task, spans

FOLDER = "exercises"
NOT_DONE = "not done yet: {task}"
UNDONE = re.compile(r"not done yet: ([0-9A]\d\.\d+)")
NAMED = 6  # tasks that a check's first line names; more are numbers alone
JUDGES = {"zh": "检查", "en": "judges"}
WELCOME = {
    "zh": """\
# 练习 {number}

这一章导出的函数和方法都空着：下面每一项是一道题，题号写在它的 `raise` 里。说明文字留下了，检查也留下了。做法：

1. 读正文，把 `raise NotImplementedError(...)` 换成你的代码；
2. 运行后面的检查，它的第一行写着它检查哪几道题；
3. 在终端里打分：`course grade {number} --lang zh`。没做完也可以打分。

{tasks}""",
    "en": """\
# Exercises {number}

What this chapter exports is blank: each entry below is a task, and its `raise` names it. The prose and the checks are still here. How to work:

1. read on, and put your code in the place of `raise NotImplementedError(...)`;
2. run the checks after it; the first line of a check names the tasks that it judges;
3. in a terminal: `course grade {number} --lang en`. It grades half-done work too.

{tasks}""",
}


def blank(text: str, messages: Mapping[str, str]) -> str:
    """Put ``raise NotImplementedError(message)`` in the place of some bodies; signatures and docstrings stay.

    Args:
        text: a cell.
        messages: qualified name → message.
    """
    lines = text.split("\n")
    known = definitions(ast.parse(text))
    for name, node in sorted(known.items(), key=lambda item: -item[1].lineno):
        if name not in messages:
            continue
        first = node.body[0]
        documented = ast.get_docstring(node) is not None
        begin = first.end_lineno if documented else first.lineno - 1
        head = "" if documented else lines[begin][: first.col_offset]  # of def f(x): return x
        stub = f"raise NotImplementedError({json.dumps(messages[name], ensure_ascii=False)})"
        lines[begin : node.end_lineno] = [(head if head.strip() else " " * first.col_offset) + stub]
    return "\n".join(lines)


def exercise_cells(chapter: Chapter, language: str) -> list[dict]:
    """The cells of the exercise in one language."""
    sheet = Sheet(chapter)
    if not sheet.tasks:
        raise CourseError(f"chapter {chapter.number} builds no module, so there is nothing to write; try another")
    stubs = {task.name: NOT_DONE.format(task=task) for task in sheet.tasks}
    judged = sheet.by_check()
    entries = "\n".join(f"- {task.number} `{task.name}`" for task in sheet.tasks)
    welcome = WELCOME[language].format(number=chapter.number, tasks=entries)
    cells = [{"cell_type": "markdown", "id": f"{chapter.number.lower()}-exercise", "metadata": {}, "source": welcome}]
    for cell in chapter.reading(language):
        if "solution" in cell.tags:
            continue
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        if "hide" in cell.tags:
            metadata["jupyter"] = {"source_hidden": True}
        entry = {"cell_type": "code" if cell.kind == "code" else "markdown", "id": cell.id, "metadata": metadata}
        entry["source"] = blank(cell.text, stubs) if "export" in cell.tags else cell.text
        if judged.get(cell.id):
            told = [str(task) for task in judged[cell.id]]
            told = told if len(told) <= NAMED else [spans([task.number for task in judged[cell.id]])]
            entry["source"] = f"# {JUDGES[language]}: {' · '.join(told)}\n{cell.text}"
        if cell.kind == "code":
            entry |= {"outputs": [], "execution_count": None}
        cells.append(entry)
    return cells


def exercise_path(chapter: Chapter, language: str) -> Path:
    """``exercises/04_attention.zh.ipynb``."""
    return chapter.root / FOLDER / f"{chapter.path.stem}.{language}.ipynb"


def write_exercise(chapter: Chapter, language: str, fresh: bool = False) -> tuple[Path, Path | None, list[Task]]:
    """Write the exercise.

    Args:
        chapter: the chapter.
        language: ``zh`` or ``en``.
        fresh: begin anew; work that is there is moved aside, not lost.

    Returns:
        The notebook, where earlier work was moved to (None if there was none), and the tasks.

    Raises:
        CourseError: the notebook exists, or there is nothing to write in this chapter.
    """
    path = exercise_path(chapter, language)
    cells = exercise_cells(chapter, language)
    name, kept = path.relative_to(chapter.root).as_posix(), None
    if path.exists() and not fresh:
        again = f"course exercise {chapter.number} --lang {language} --fresh"
        raise CourseError(f"{name} exists and is left as it is; `{again}` moves it aside and begins anew")
    if path.exists() and _worked_on(path, cells):
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}.ipynb")).exists():
            number += 1
        path.rename(kept)
    course = {"exercise": chapter.source, "language": language, "made": digest(*(cell["source"] for cell in cells))}
    metadata = {"course": course, "kernelspec": KERNEL, "language_info": {"name": "python"}}
    write_if_changed(path, notebook_text({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    return path, kept, Sheet(chapter).tasks


def _worked_on(path: Path, cells: list[dict]) -> bool:
    """Whether a notebook is more than the untouched exercise; one that cannot be read counts as work."""
    try:
        return [c["source"] for c in read_notebook(path)["cells"]] != [c["source"] for c in cells]
    except CourseError:
        return True


def choose_language(chapter: Chapter, language: str | None, ask: Callable[[str], str]) -> str:
    """The language whose exercise there is; the learner is asked when there are two.

    Raises:
        CourseError: there is none.
    """
    there = [name for name in ("zh", "en") if exercise_path(chapter, name).is_file()]
    if language in there:
        return language
    if language or not there:
        wanted = language or "zh"
        name = exercise_path(chapter, wanted).relative_to(chapter.root).as_posix()
        raise CourseError(f"there is no {name}; write it with `course exercise {chapter.number} --lang {wanted}`")
    language = there[0] if len(there) == 1 else None
    while language not in there:
        language = ask("both languages are there; grade which (zh, en)").strip().lower()
    return language
