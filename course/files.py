"""Small helpers every tool shares: errors that teach, digests, and writes that change a file only when they must."""

import hashlib
import json
import os
import tempfile
from pathlib import Path


class CourseError(Exception):
    """A mistake in the course's files, told in one sentence: the value, the rule, the fix."""


def digest(*parts: str | bytes, length: int = 8) -> str:
    """Hex digest of the parts, each closed by its length, so that moving text between parts changes it."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big") + data)
    return state.hexdigest()[:length]


def write_if_changed(path: Path, text: str) -> bool:
    """Write ``text`` through a temporary file and a rename; do nothing when the file already holds it.

    Returns:
        True when the file was written.
    """
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return True


def read_notebook(path: Path, advice: str = "delete it and run `course export`") -> dict | None:
    """The notebook's JSON with every cell's source as one string, or None when there is no such file.

    Args:
        path: the notebook.
        advice: what to do when it is damaged.

    Raises:
        CourseError: the file is no notebook (a merge conflict, say).
    """
    if not path.is_file():
        return None
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            cell["cell_type"].encode(), cell["source"].encode()
            cell.setdefault("metadata", {}).get("tags")
        stamp = notebook.setdefault("metadata", {}).get("course", {})
        stamp.get("cells", "").split()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(f"{path} is not a notebook ({type(error).__name__}: {error}); {advice}") from error
    return notebook


def find_root(start: Path, above: bool = True) -> Path:
    """The nearest folder at (or ``above``) ``start`` that holds ``notebooks/source``."""
    for folder in (start, *(start.parents if above else ())):
        if (folder / "notebooks" / "source").is_dir():
            return folder
    where = "at or above" if above else "in"
    raise CourseError(f"no notebooks/source {where} {start}; run inside the repository or pass its folder as --root")
