#!python
"""``python -m course`` is the ``course`` command; an editable install puts this file there under that name."""

from course.cli import app

if __name__ == "__main__":
    app(prog_name="course")
