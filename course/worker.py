"""The clean process in which a learner's notebook runs: ``python -m course.worker FOLDER``."""

import faulthandler
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from course.trial import Code, Trial


def work(folder: Path) -> None:
    """Run the plan in a folder and tell every event in a file there.

    A statement that takes too long ends the process; ``faulthandler`` writes down where it was, even inside C code.
    """
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    with (folder / "events.jsonl").open("w", encoding="utf-8") as events, (folder / "hung.txt").open("w") as hung:

        def tell(entry: dict) -> None:
            events.write(json.dumps(entry) + "\n")
            events.flush()

        def begin(cell: str, index: int, limited: bool) -> None:
            faulthandler.cancel_dump_traceback_later()
            if limited:
                faulthandler.dump_traceback_later(plan["limit"], exit=True, file=hung)
            tell({"begin": [cell, index]})

        trial = Trial(plan["module"], {(cell, index): why for cell, index, why in plan["dead"]}, begin)
        for cell, text in plan["cells"]:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                results = trial.run(Code(cell, text))
            faulthandler.cancel_dump_traceback_later()
            for result in results:
                tell(result.as_dict())
        tell({"end": True})
    os._exit(0)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
