"""What an engine asks of the memory of a process on a CPU."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: another's allocator has holes of its own, which are filled first.
PROGRAM = """
import re
from pathlib import Path

import torch

from penstock.model.cpu.host_memory import keep_freed_memory, prepare_large_pages

MIB = 1 << 20


def advised_bytes(start, size):
    found = 0
    for area in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, end = (int(number, 16) for number in area.split(" ", 1)[0].split("-"))
        flags = re.search(r"^VmFlags:(.*)$", area, re.MULTILINE)
        if flags is not None and "hg" in flags[1].split():
            found += max(0, min(end, start + size) - max(first, start))
    return found


assert keep_freed_memory() and prepare_large_pages(96 * MIB)
weights = [torch.empty(6 * MIB, dtype=torch.uint8) for _ in range(12)]
print(sum(advised_bytes(weight.data_ptr(), weight.nbytes) for weight in weights) / (72 * MIB))
"""


# Seen from outside: what asks for them may be wrong.
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this C library or system has no large pages to be asked for",
)
def test_tensors_allocated_next_lie_in_large_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) >= 0.8


KEPT = """
import mmap
from pathlib import Path

import torch

from penstock.model.cpu.host_memory import give_back_freed_memory, keep_freed_memory


def resident():
    print(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20)


assert keep_freed_memory()
weights = [torch.ones(1 << 20) for _ in range(64)]
resident()
del weights
resident()
give_back_freed_memory()
resident()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone keeps freed memory when it is asked to")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=300, check=True)
    used, kept, left = (int(line) for line in done.stdout.split())
    # Of 256 MiB.
    assert kept > used - 16 and left < used - 240
