"""Freed memory goes back to the kernel, which the C library alone would keep in each thread."""

import platform
import subprocess
import sys

import pytest

PROGRAM = r"""
import ctypes, sys, threading
if sys.argv[1] == "back":
    from oomwatch.agent.allocator import give_memory_back
    give_memory_back()
libc = ctypes.CDLL(None, use_errno=True)
libc.malloc.restype = ctypes.c_void_p
heaps = set()

together = threading.Barrier(4)

def work():
    together.wait()
    # Blocks below the threshold of mmap come from the heap of the thread: 64 MiB apart.
    for _ in range(64):
        heaps.add(libc.malloc(50_000) >> 26)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(heaps))
"""


def heaps(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has heaps of threads")
def test_threads_share_one_heap() -> None:
    assert heaps("back") < heaps("as it is")


def test_what_is_there_at_the_start_is_passed_over() -> None:
    program = (
        "import gc, oomwatch.agent.allocator as a; a.spare_the_collector(); "
        "print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < gc.get_freeze_count() / 10)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["True", "True"]
