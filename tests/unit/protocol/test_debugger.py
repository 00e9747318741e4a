"""DOVETAIL_DEBUG: a process waits for a debugger, and says where."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from dovetail.protocol.process.debugger import DEBUG, asked_port, wait_for_debugger
from helpers.free_ports import free_port
from helpers.patience import PATIENCE


def test_it_names_processes_and_their_ports():
    assert asked_port("trainer-0", "") is None
    assert asked_port("trainer-0", "trainer-01") is None
    assert asked_port("trainer-0", "coordinator, trainer-0") == 5678
    assert asked_port("trainer-0", "coordinator,trainer-0:6000") == 6000
    with pytest.raises(ValueError, match="write a process and a port, for example trainer-0:5678"):
        asked_port("trainer-0", "trainer-0:soon")


def test_other_processes_go_on_at_once():
    wait_for_debugger("trainer-1", lambda *_, **__: pytest.fail("it waits"), {DEBUG: "trainer-0"})


class Client:
    """The few messages of the debug adapter protocol that attach a debugger."""

    def __init__(self, port: int) -> None:
        self._file = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).makefile("rwb")
        self._sent = 0

    def send(self, command: str, **arguments: object) -> None:
        self._sent += 1
        body = json.dumps({"seq": self._sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._file.flush()

    def wait_for(self, kind: str, name: str) -> dict:
        while True:
            length = int(self._file.readline().split(b":")[1])
            self._file.readline()
            message = json.loads(self._file.read(length))
            if message["type"] == kind and message.get("event" if kind == "event" else "command") == name:
                return message


@pytest.mark.slow
def test_a_debugger_attaches_and_stops_at_a_breakpoint():
    code = (
        "from dovetail.protocol.process.debugger import wait_for_debugger\n"
        "import sys\n"
        "wait_for_debugger('trainer-0', lambda event, **fields: print(event, *fields.values(), flush=True))\n"
        "breakpoint()\n"
        "print('went on')\n"
    )
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, DEBUG: f"trainer-0:{port}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(300, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"debugger.waiting 127.0.0.1:{port}\n"
        client = Client(port)
        client.send("initialize", adapterID="test")
        client.send("attach", justMyCode=False)
        client.wait_for("event", "initialized")
        client.send("configurationDone")
        assert process.stdout.readline() == "debugger.attached\n"
        stopped = client.wait_for("event", "stopped")
        assert stopped["body"]["reason"] == "breakpoint"
        client.send("continue", threadId=stopped["body"]["threadId"])
        assert process.stdout.readline() == "went on\n"
        assert process.wait(PATIENCE) == 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()
