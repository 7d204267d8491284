"""Execute chapters, each once in a kernel of its own, and store the same outputs in both languages' notebooks."""

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from course.export import KERNEL, build_notebook, notebook_text, output_digest
from course.files import CourseError, read_notebook, write_if_changed
from course.fingerprint import run_hash
from course.outputs import clean
from course.source import LANGUAGES, Chapter, load_chapter

THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON", "VECLIB_MAXIMUM")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Report = Callable[[str, int, int], None]


@dataclass
class Outcome:
    """What became of one chapter: its seconds, or the cell at which it stopped and why."""

    chapter: Chapter
    seconds: float = 0.0
    cell: str = ""
    error: str = ""
    written: list[Path] = field(default_factory=list)


def kernel_environment(root: Path, scratch: str, threads: int = 1) -> dict[str, str]:
    """Environment of a kernel: a fixed number of threads, no network for hubs, and the repository on its path."""
    here = Path(__file__).resolve().parents[1]
    path = [str(root), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {f"{name}_NUM_THREADS": str(threads) for name in THREADS}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    quiet["TRANSFORMERS_VERBOSITY"] = "error"
    steady = {"PYTHONHASHSEED": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "IPYTHONDIR": scratch}
    return {**os.environ, **fixed, **quiet, **steady, "PYTHONPATH": os.pathsep.join(path)}


def is_fresh(chapter: Chapter) -> bool:
    """Whether both notebooks hold the outputs of one run of this very code and these very modules."""
    expected, records = run_hash(chapter), []
    for language in LANGUAGES:
        notebook = read_notebook(chapter.notebook_path(language)) or {"cells": [], "metadata": {}}
        record = notebook["metadata"].get("course", {})
        records.append((record.get("run"), record.get("outputs") == output_digest(notebook), record.get("outputs")))
    return records[0] == records[1] and records[0][:2] == (expected, True)


def run_chapters(chapters: list[Chapter], jobs: int, timeout: int, report: Report) -> list[Outcome]:
    """Run the chapters, at most ``jobs`` kernels at a time; a failure of one does not stop the others.

    Args:
        chapters: what to run.
        jobs: kernels at a time; each has one thread, so ``jobs`` is also the number of busy cores.
        timeout: seconds a single cell may take.
        report: called with (chapter number, cells done, cells in all) as cells begin and end.
    """

    async def everything() -> list[Outcome]:
        gate = asyncio.Semaphore(jobs)
        return await asyncio.gather(*(_run_one(chapter, gate, timeout, report) for chapter in chapters))

    return asyncio.run(everything())


async def _run_one(chapter: Chapter, gate: asyncio.Semaphore, timeout: int, report: Report) -> Outcome:
    """Execute one chapter and store its outputs; every failure becomes part of the outcome."""
    async with gate:
        outcome, begun = Outcome(chapter), time.monotonic()
        expected = run_hash(chapter)
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
        notebook.cells = [nbformat.v4.new_code_cell(cell.text, id=cell.id) for cell in chapter.code]
        client = _client(notebook, chapter, timeout, report, outcome)
        with tempfile.TemporaryDirectory(prefix="course-") as scratch:
            try:
                await client.async_execute(env=kernel_environment(chapter.root, scratch))
                outcome.cell = ""
                outcome.written = store(chapter, notebook.cells, expected)
            except CellExecutionError as error:
                outcome.error = f"{error.ename}: {error.evalue}\n\n{_where(error)}"
            except CellTimeoutError:
                outcome.error = f"the cell took longer than {timeout} s; make it smaller or pass --timeout"
            except DeadKernelError as error:
                outcome.error = f"the kernel died: {error}"
            except CourseError as error:
                outcome.error = str(error)
        outcome.seconds = time.monotonic() - begun
    return outcome


def _client(notebook, chapter: Chapter, timeout: int, report: Report, outcome: Outcome) -> NotebookClient:
    """A client that keeps no times, runs at the repository's root and tells where it is."""
    total = len(notebook.cells)

    def on_start(cell, cell_index: int) -> None:
        outcome.cell = cell["id"]
        report(chapter.number, cell_index, total)

    def on_done(cell, cell_index: int, **_) -> None:
        report(chapter.number, cell_index + 1, total)

    return NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=KERNEL["name"],
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        resources={"metadata": {"path": str(chapter.root)}},
        on_cell_start=on_start,
        on_cell_executed=on_done,
    )


def _where(error: CellExecutionError) -> str:
    """The traceback of a failed cell without colours, cut to its last forty lines."""
    return "\n".join(COLOURS.sub("", str(error.traceback)).splitlines()[-40:])


def store(chapter: Chapter, cells: list, expected: str) -> list[Path]:
    """Put the outputs into both notebooks, with the hash of what made them.

    Raises:
        CourseError: the source changed while it ran.
    """
    now = load_chapter(chapter.path, chapter.root)
    if [cell.text for cell in now.code] != [cell.text for cell in chapter.code]:
        raise CourseError(f"{chapter.source} changed while it ran; run it again")
    results = {}
    for cell, ran in zip(now.code, cells, strict=True):
        results[cell.id] = (clean(ran.outputs, now.root), ran.execution_count)
    written = []
    for language in LANGUAGES:
        path = now.notebook_path(language)
        notebook = build_notebook(now, language, None)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = results[cell["id"]]
        stored = json.loads(notebook_text(notebook))
        notebook["metadata"]["course"] |= {"run": expected, "outputs": output_digest(stored)}
        written += [path] if write_if_changed(path, notebook_text(notebook)) else []
    return written
