"""One agent at a time writes a host's records to a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oomwatch.store.lease import Lease, StoreInUseError, take_lease
from oomwatch.store.location import parse_store

HOLDER = """
import sys, time
from oomwatch.store.lease import take_lease
from oomwatch.store.location import parse_store
lease = take_lease(parse_store(sys.argv[1]), "host-a")
print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of either kind, which nothing has opened yet."""
    if request.param == "sqlite":
        return str(tmp_path / "folder" / "oomwatch.db")
    return request.getfixturevalue("postgres_store")


def test_a_second_one_is_refused_until_the_first_is_killed(address):
    words = [sys.executable, "-c", HOLDER, address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(StoreInUseError, match=rf"another agent \(pid {holder.pid}\) uses this"):
            take_lease(parse_store(address), "host-a")
        holder.send_signal(signal.SIGKILL)
    take_lease(parse_store(address), "host-a").close()


def test_it_is_taken_once_the_server_is_there(server_to_come):
    lease = Lease(parse_store(server_to_come.url), "host-a")
    assert not lease.take()
    waiting = threading.Thread(target=lease.take_later, args=(threading.Event(),))
    waiting.start()
    server_to_come.come()
    waiting.join(30)
    assert not waiting.is_alive()
    with pytest.raises(StoreInUseError):
        Lease(parse_store(server_to_come.url), "host-a").take()
    lease.close()


def test_it_can_be_given_back_and_taken_again(address):
    first = take_lease(parse_store(address), "host-a")
    first.close()
    first.close()
    with take_lease(parse_store(address), "host-a"):
        pass


def test_hosts_share_a_server(postgres_store):
    url = parse_store(postgres_store)
    with take_lease(url, "host-a"), take_lease(url, "host-b"):
        pass


def test_another_name_of_the_same_file_is_the_same_store(tmp_path):
    (tmp_path / "link.db").symlink_to("oomwatch.db")
    with (
        take_lease(parse_store(str(tmp_path / "oomwatch.db")), "host-a"),
        pytest.raises(StoreInUseError, match=f"pid {os.getpid()}"),
    ):
        take_lease(parse_store(str(tmp_path / "link.db")), "host-a")


def test_a_link_that_somebody_laid_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "oomwatch.db.lock").symlink_to("precious")
    with take_lease(parse_store(str(tmp_path / "oomwatch.db")), "host-a"):
        assert (tmp_path / "precious").read_text() == "mine"
