"""What connection.py relies on, and uvicorn and h11 do not promise."""

from __future__ import annotations

import inspect

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected


def test_a_protocol_is_made_as_before() -> None:
    parameters = inspect.signature(H11Protocol).parameters
    assert list(parameters) == ["config", "server_state", "app_state", "_loop"]
    assert issubclass(ClientDisconnected, OSError)


def test_its_methods_and_what_they_read() -> None:
    made, answers = (inspect.getsource(one) for one in (H11Protocol.__init__, H11Protocol))
    for name in ("app", "loop", "conn", "flow", "transport", "connections", "cycle"):
        assert f"self.{name}" in made
    assert "app = self.app" in answers
    assert "self.connections.add(self)" in inspect.getsource(H11Protocol.connection_made)
    assert list(inspect.signature(H11Protocol.send_400_response).parameters) == ["self", "msg"]
    assert inspect.iscoroutinefunction(FlowControl.drain)


def test_a_cycle_is_silent_after_a_client_is_gone() -> None:
    send = inspect.getsource(RequestResponseCycle.send)
    assert "if self.disconnected:\n            return" in send
    run = inspect.getsource(RequestResponseCycle.run_asgi)
    assert "not self.response_complete and not self.disconnected" in run


def test_signals_are_sent_again() -> None:
    """So the handlers before uvicorn's have to be ours."""
    assert "signal.raise_signal" in inspect.getsource(uvicorn.Server.capture_signals)
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == [
        "self",
        "sig",
        "frame",
    ]


def test_h11_counts_bytes_that_it_does_not_see() -> None:
    class Three:
        def __len__(self) -> int:
            return 3

    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[("Content-Length", "3")]))
    three = Three()
    assert connection.send_with_data_passthrough(h11.Data(data=three)) == [three]  # type: ignore[arg-type, comparison-overlap]
    assert connection.send(h11.EndOfMessage()) == b""
