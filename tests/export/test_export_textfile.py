import os
import threading

import pytest

from oomwatch.export.textfile import remove_textfile, write_textfile


def test_a_reader_sees_one_page_or_the_other(tmp_path):
    """Whatever node_exporter reads while pages are written is a whole one."""
    path = tmp_path / "oomwatch.prom"
    pages = [b"a" * 100_000, b"b" * 120_000]
    write_textfile(str(path), pages[0])
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for page in pages:
                write_textfile(str(path), page)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            assert path.read_bytes() in pages
            assert [each.name for each in tmp_path.glob("*.prom")] == ["oomwatch.prom"]
    finally:
        stop.set()
        thread.join()
    assert os.listdir(tmp_path) == ["oomwatch.prom"]  # noqa: PTH208 - names


def test_another_user_may_read_it_whatever_the_mask(tmp_path):
    before = os.umask(0o077)
    try:
        write_textfile(str(tmp_path / "x.prom"), b"x 1\n")
    finally:
        os.umask(before)
    assert (tmp_path / "x.prom").stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    target = tmp_path / "x.prom"
    target.mkdir()  # cannot be put in place of a folder
    with pytest.raises(OSError, match="directory"):
        write_textfile(str(target), b"x 1\n")
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(FileNotFoundError):
        write_textfile(str(tmp_path / "nowhere" / "x.prom"), b"x 1\n")


def test_it_can_be_taken_away_twice(tmp_path):
    path = tmp_path / "x.prom"
    write_textfile(str(path), b"x 1\n")
    remove_textfile(str(path))
    remove_textfile(str(path))
    assert not path.exists()
