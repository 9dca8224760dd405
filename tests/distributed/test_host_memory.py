from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys, torch
from lockstep.distributed.memory import keep_freed_memory
torch.set_num_threads(1)
print(keep_freed_memory() if sys.argv[1] == "keep" else None)

def work():
    blocks = [torch.ones(1 << 20) for _ in range(8)]  # 4 MiB each

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True, env=environment
    )
    said, faults = done.stdout.split()
    return said, int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_had_again_without_page_faults():
    said, kept = _faults("keep")
    assert said == "True"
    left = _faults("leave")[1]
    if left == 0:  # how many that are is the kernel's: it may give huge pages
        pytest.skip("here the system gives memory back without page faults")
    assert 4 * kept < left


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_the_environment_says_of_malloc_stands():
    assert _faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
