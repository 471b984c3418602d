from oomwatch.export.peaks import Peaks


def test_a_peak_is_told_to_each_who_asks_and_once():
    peaks: Peaks[str] = Peaks()
    for at, used in enumerate((1.0, 9.0, 2.0, 3.0)):
        peaks.add(float(at), {"gpu0": used})
    assert peaks.since_last("a", 3.5) == {"gpu0": 9.0}
    assert peaks.since_last("b", 3.6) == {"gpu0": 9.0}
    peaks.add(4.0, {"gpu0": 4.0})
    peaks.add(5.0, {"gpu0": 1.5})
    assert peaks.since_last("a", 5.5) == {"gpu0": 4.0}
    assert peaks.since_last("a", 5.6) == {"gpu0": 1.5}  # nothing new: as it was last
    assert peaks.since_last("b", 5.7) == {"gpu0": 4.0}


def test_what_is_gone_has_no_peak():
    peaks: Peaks[str] = Peaks()
    peaks.add(0.0, {"gpu0": 1.0, "gpu1": 5.0})
    peaks.add(1.0, {"gpu0": 2.0})
    assert peaks.since_last("a", 2.0) == {"gpu0": 2.0}


def test_it_remembers_five_minutes_and_few_who_ask():
    peaks: Peaks[str] = Peaks()
    assert peaks.since_last("a", 0.0) == {}
    peaks.add(1.0, {"gpu0": 99.0})
    for second in range(2, 400):
        peaks.add(float(second), {"gpu0": 1.0})
        peaks.since_last(f"stranger {second}", float(second))
    assert peaks.since_last("a", 400.0) == {"gpu0": 1.0}
    assert len(peaks._asked) <= 16
    assert len(peaks._seen) <= 302
