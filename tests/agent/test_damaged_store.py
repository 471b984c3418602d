"""An agent whose store holds rows that make no sense, or are of another version."""

from __future__ import annotations

import socket
import time

from sqlalchemy import update

from oomwatch.records import OutboxRow, Silence, StoredIncident, Trigger
from oomwatch.store import schema
from oomwatch.store.batch import Recorder
from oomwatch.store.control import changed
from oomwatch.store.database import open_writer
from oomwatch.store.lanes import Batch
from oomwatch.store.location import parse_store
from oomwatch.store.silences import save_silence

NOW = time.time()
SILENCE = Silence("sil-1", NOW, NOW + 3600, "maintenance", engine="chat")
RECEIVER = '[[notify.webhook]]\nname = "hook"\nurl = "http://127.0.0.1:9/"\n'


def incident(identity, *, diagnosis=None, kind="log_failure"):
    trigger = Trigger(kind, NOW, "chat", text="it ran out")
    return StoredIncident(
        identity, f"{identity}/failure", "open", NOW, engine_id="chat", host=socket.gethostname(),
        diagnosis=diagnosis, triggers=(trigger,),
    )  # fmt: skip


def test_it_starts_and_goes_on_writing(new_agent):
    agent = new_agent()
    agent.config.write_text(agent.config.read_text() + RECEIVER)
    agent.start().stop()  # makes the store
    store = open_writer(parse_store(str(agent.store)))
    with store.begin():
        rows = [incident("inc-1", diagnosis={"incidents": [5]}), incident("inc-2", kind="newer")]
        message = OutboxRow("msg-1", "hook", "opened", "held", NOW, NOW, "inc-1", notice={"a": 1})
        Recorder(socket.gethostname()).write(store, Batch(incidents=rows, outbox=[message]))
        store.execute(
            update(schema.incident).where(schema.incident.c.id == "inc-2").values(diagnosis="{")
        )
        store.execute(update(schema.outbox).values(notice="{"))
        for number, matchers in enumerate(("", '{"team": "x"}')):
            save_silence(store, Silence(f"sil-odd-{number}", NOW, NOW + 3600, ""))
            of_it = schema.silence.c.id == f"sil-odd-{number}"
            store.execute(update(schema.silence).where(of_it).values(matchers=matchers))
        changed(store)
    agent.start()
    assert "Traceback" not in agent.said()
    assert {"inc-1", "inc-2"} <= {one.id for one in agent.incidents()}
    with store.begin():
        save_silence(store, SILENCE)
        store.execute(update(schema.outbox).values(state="retry"))
        changed(store)
    agent.wait_for(lambda: "people have said: 1 silence(s)" in agent.said(), "it has looked")
    store.close()
    seen = len(agent.samples().hosts)
    agent.wait_for(lambda: len(agent.samples().hosts) > seen, "it writes on")
    assert "Traceback" not in agent.said()
