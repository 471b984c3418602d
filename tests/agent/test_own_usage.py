import threading

from oomwatch.agent.own_usage import OwnUsageMeter


def test_it_sees_this_very_process() -> None:
    meter = OwnUsageMeter()
    before = meter.read()
    assert before.rss_bytes > 5 << 20
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    held = open("/proc/self/stat", encoding="ascii")  # noqa: PTH123, SIM115 - counted below
    sum(range(3_000_000))
    now = meter.read()
    held.close()
    release.set()
    thread.join()
    assert now.threads == before.threads + 1
    assert now.descriptors == before.descriptors + 1
    assert now.cpu_ratio > 0
    assert "of a core" in str(now)
