"""Prepares the process before any test imports torch: one thread per process, since tests run in parallel.

While tests are imported nothing is garbage: to look for some would take six seconds of each worker.

Under nohup, or in the background of a script, a process starts with SIGHUP or SIGINT ignored, as would all processes
that tests start: they would ignore the signals that tests send.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from kit import commands, sampling, worlds

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have those of the process that starts them
    _STATE = tempfile.mkdtemp(prefix="lockstep-tests-")
    os.environ["LOCKSTEP_CACHE"] = os.path.join(_STATE, "cache")
    os.environ["XDG_STATE_HOME"] = _STATE  # tests don't touch the user's own
    atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # tests run in parallel, on machines that may be busy
settings.load_profile("suite")

_YOUNG_OBJECTS = 50_000  # between two collections; servers of tests (moto) have millions of objects, to look at in each

LONGEST_FIRST = (
    "test_faults.py", "test_proof.py", "test_end_to_end.py", "test_pipeline.py", "test_site.py",
    "test_hang_watch.py", "test_tensor.py", "test_ssh.py", "test_docs.py", "test_rollback.py",
    "test_same_run.py", "test_deepspeed.py", "test_invariant.py", "test_aws_follow.py", "test_features.py",
    "test_exporting.py", "test_table.py", "test_ownership.py", "test_zero_import.py", "test_object_stores.py",
    "test_local.py", "test_host_waits.py", "test_aws.py", "test_fsdp_precision.py", "test_recovery.py",
    "test_host_rounds.py", "test_memory_snapshots.py",
)  # fmt: skip
"""Files that take twenty seconds or more. A file's tests run on one worker, so these must not be the last to begin."""


@pytest.fixture(scope="module", autouse=True)
def _failed_tests_leave_no_command() -> Iterator[None]:
    """Give the processors back that a command of a failed test would take from all tests after it."""
    yield
    commands.kill_started()


def pytest_configure(config: pytest.Config) -> None:
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if "fork_server" in worker:
        worlds.share_fork_server(worker["fork_server"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker the fork server of this process: one imports what ranks need, not each worker's own."""
    node.workerinput["fork_server"] = worlds.fork_server()


@pytest.hookimpl(tryfirst=True)  # before drills are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampling.mark_drilled(items, "tests/")
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)
    gc.enable()
