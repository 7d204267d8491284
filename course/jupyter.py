"""JupyterLab on the notebooks, set so that a click on a source opens it as a notebook."""

import os
import sys
from pathlib import Path

SETTINGS = Path(__file__).resolve().parent / "lab"


def lab_command(root: Path, extra: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command and environment that open JupyterLab.

    The server sees the whole repository, so that links from a chapter to a card work, and opens on ``notebooks/``. The
    settings are ours (``course/lab``) and come before the reader's own, which stay in force and stay untouched.

    Args:
        root: the repository.
        extra: further arguments for JupyterLab.
    """
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    command += ["--LabApp.default_url=/lab/tree/notebooks", *extra]
    path = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    modules = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    places = {"JUPYTER_CONFIG_PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(modules)}
    return command, {**os.environ, **places}


def open_lab(root: Path, extra: list[str]) -> None:
    """Become JupyterLab; does not return."""
    command, environment = lab_command(root, extra)
    os.execve(command[0], command, environment)
