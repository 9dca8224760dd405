"""DeepSpeed, imported once for all worlds: it takes seconds, which every rank would spend again."""

from __future__ import annotations

import contextlib
import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed  # noqa: F401
