"""Before any test imports torch: one thread a process, since tests run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
