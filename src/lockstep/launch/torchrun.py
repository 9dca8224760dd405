"""Reports why a rank of torchrun's failed in the file where torchrun looks for it.

Failure --> its sentence, on stderr
        --> TORCHELASTIC_ERROR_FILE --> the last lines of torchrun's report        exit code (torchrun's own is 1)

Without that file the report, a screen long, ends with a link, and buries what the ranks have said above it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lockstep.core.errors import Failure, message_of
from lockstep.core.terminal import echo


def tell_torchrun(failure: Failure) -> None:
    """Write the failure to torchrun's error file; do nothing under other launchers."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    # as torch.distributed.elastic.multiprocessing.errors writes it, without a traceback
    report = {"message": {"message": message_of(failure), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with suppress(OSError):
        Path(file).write_text(json.dumps(report), encoding="utf-8")


def exit_with(failure: Failure) -> NoReturn:
    """End this process with the failure's exit code, and its message on stderr without a traceback; under torchrun it
    is also last in torchrun's report.

        try:
            lockstep.train(...)
        except lockstep.Failure as failure:
            lockstep.exit_with(failure)
    """
    tell_torchrun(failure)
    with suppress(OSError):  # the terminal may have been closed
        sys.stdout.flush()
        echo(f"{Path(sys.argv[0]).name}: {message_of(failure)}", file=sys.stderr)
    sys.exit(failure.exit_code)
