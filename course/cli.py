"""The ``course`` command: from a chapter's source to its module, notebooks and outputs, and the check of them."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from course.files import CourseError, find_root

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False, soft_wrap=True)
SLOW = 30  # seconds a chapter should take at most
Numbers = Annotated[list[str] | None, typer.Argument(metavar="[NN…]", help="Chapters by number; all by default.")]


@app.callback()
def main(
    ctx: typer.Context, root: Annotated[Path | None, typer.Option(help="Repository; found upwards by default.")] = None
):
    """Remember the repository that the command works on."""
    with teaching():
        ctx.obj = find_root((root or Path.cwd()).resolve(), above=root is None)


class teaching:
    """Turns a CourseError, or a file that cannot be read or written, into one sentence and exit status 2."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> None:
        if isinstance(error, CourseError | OSError):
            complain(str(error))
            raise typer.Exit(2) from error


def complain(message: str) -> None:
    """Print one error to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error[/] {escape(message)}")


@app.command()
def export(
    ctx: typer.Context,
    numbers: Numbers = None,
    force: Annotated[bool, typer.Option(help="Overwrite notebooks that were edited by hand.")] = False,
):
    """Write modules and notebooks from the sources; a second time changes no byte."""
    with teaching():
        if _export(ctx.obj, numbers, force)[1]:
            raise typer.Exit(1)


def _export(root: Path, numbers: list[str] | None, force: bool) -> tuple[list, int]:
    """Export the wanted chapters; returns those that worked and the number of those that did not."""
    from course.export import export_chapter
    from course.source import LANGUAGES, chapter_paths, load_chapter

    chapters, failed = [], 0
    for path in chapter_paths(root, numbers):
        try:
            chapter = load_chapter(path, root)
            for written in export_chapter(chapter, LANGUAGES if force else ()):
                console.print(f"wrote {written.relative_to(root)}")
            chapters.append(chapter)
        except CourseError as error:
            complain(str(error))
            failed += 1
    return chapters, failed


@app.command()
def run(
    ctx: typer.Context,
    numbers: Numbers = None,
    all: Annotated[bool, typer.Option("--all", help="Run chapters whose outputs are fresh, too.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Kernels at a time; each uses one thread.")] = os.cpu_count() or 1,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds one cell may take.")] = 120,
):
    """Export, then execute each stale chapter once and store its outputs in both languages."""
    from course.run import is_fresh, run_chapters

    with teaching():
        chapters, failed = _export(ctx.obj, numbers, force=False)
        stale = [chapter for chapter in chapters if all or not is_fresh(chapter)]
        console.print(f"{len(stale)} to run, {len(chapters) - len(stale)} fresh")
        with _progress() as bars:
            tasks = {c.number: bars.add_task(c.path.stem, total=len(c.code), start=False) for c in stale}

            def report(number: str, done: int, total: int) -> None:
                if done == 0:
                    bars.start_task(tasks[number])
                bars.update(tasks[number], completed=done, total=total)
                if done == total:
                    bars.stop_task(tasks[number])

            outcomes = run_chapters(stale, jobs, timeout, report)
        for outcome in outcomes:
            _tell(outcome)
    if failed or any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def _progress() -> Progress:
    """One bar a chapter on a terminal; nothing elsewhere."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _tell(outcome) -> None:
    """One line for a chapter that ran; chapter, cell and error for one that did not."""
    chapter = outcome.chapter
    if outcome.error:
        where = f"{chapter.source} stopped at cell {outcome.cell}" if outcome.cell else chapter.source
        complain(f"{where}\n{outcome.error}")
        return
    slow = f" (over {SLOW} s: make it smaller)" if outcome.seconds > SLOW else ""
    console.print(f"ran {chapter.source} in {outcome.seconds:.1f} s{slow}")


@app.command()
def check(ctx: typer.Context, numbers: Numbers = None):
    """Red (exit 1) when anything drifted: modules, notebooks, outputs, languages, style, terms, links, imports."""
    from course.check import check_all

    with teaching():
        findings = check_all(ctx.obj, numbers)
    for finding in findings:
        console.print(finding.text(console.is_terminal))
    word = f"[red]{len(findings)} findings[/]" if findings else "[green]nothing drifted[/]"
    console.print(word)
    if findings:
        raise typer.Exit(1)


@app.command()
def twins(ctx: typer.Context, names: Annotated[list[str], typer.Argument(metavar="NN…|papers/…|notes/…")]):
    """After a look at both languages: record in each en twin the texts that were seen to agree."""
    from course.source import load_chapters
    from course.twins import stamp_chapter, stamp_documents

    with teaching():
        documents = [name for name in names if name.split("/")[0] in ("papers", "notes", "site")]
        numbers = [name for name in names if name not in documents]
        changed = stamp_documents(ctx.obj, documents)
        for chapter in load_chapters(ctx.obj, numbers) if numbers else []:
            changed += stamp_chapter(chapter)
    for name in changed:
        console.print(f"stamped {name}")
    console.print(f"{len(changed)} stamped anew")


@app.command()
def adopt(
    ctx: typer.Context, notebook: Annotated[Path, typer.Argument(help="A notebook in notebooks/zh or notebooks/en.")]
):
    """Bring edits made in a generated notebook back to its source, by cell id."""
    from course.adopt import adopt_notebook

    with teaching():
        result = adopt_notebook(notebook.resolve(), ctx.obj)
    for line in result.lines():
        console.print(escape(line))


Language = Annotated[Literal["zh", "en"] | None, typer.Option("--lang", help="zh or en.")]
Number = Annotated[str, typer.Argument(metavar="NN", help="A chapter by number.")]


@app.command()
def exercise(
    ctx: typer.Context,
    number: Number,
    language: Language = "zh",
    fresh: Annotated[bool, typer.Option("--fresh", help="Move the work that is there aside and begin anew.")] = False,
):
    """Write a chapter as an exercise: its functions are blank, its checks stay. Never overwrites work."""
    from course.exercise import write_exercise
    from course.source import load_chapters

    with teaching():
        (chapter,) = load_chapters(ctx.obj, [number])
        path, kept, tasks = write_exercise(chapter, language, fresh)
    if kept:
        console.print(f"your work is kept in {kept.relative_to(ctx.obj)}")
    console.print(f"wrote {path.relative_to(ctx.obj)}: {len(tasks)} tasks, {tasks[0].number} to {tasks[-1].number}")
    console.print(f"open it with `course lab`, grade it with `course grade {number} --lang {language}`")


@app.command()
def grade(
    ctx: typer.Context,
    number: Number,
    language: Language = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds one statement may take.")] = 60,
):
    """Grade your exercise; exit status 0 only when every task is right. Half-done work is graded too."""
    from course.exercise import choose_language, exercise_path
    from course.grade import grade, learner_cells, section_names
    from course.source import load_chapters

    with teaching():
        (chapter,) = load_chapters(ctx.obj, [number])
        language = choose_language(chapter, language, typer.prompt)
        path = exercise_path(chapter, language)
        with console.status(f"grading {path.relative_to(ctx.obj)}: it runs once, which takes up to a minute"):
            result = grade(chapter, learner_cells(path), section_names(chapter, language), timeout)
    for line in result.lines(language):
        console.print(line)
    if not result.done:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(ctx: typer.Context):
    """Open JupyterLab on the notebooks; further arguments go to JupyterLab."""
    from course.jupyter import open_lab

    open_lab(ctx.obj, ctx.args)


@app.command()
def site(
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option(help="A folder; site/build by default.")] = None,
):
    """Render chapters, cards, notes and the engine's reference as static HTML; nothing is executed."""
    from course.site import build_site

    with teaching():
        built = build_site(ctx.obj, output.resolve() if output else None)
    size = f"{built.size / 1e6:.1f} MB, {built.seconds:.1f} s"
    console.print(f"{built.pages} pages, {built.files} files, {size}: open {built.output / 'index.html'}")
