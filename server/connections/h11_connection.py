"""A connection whose requests are parsed by h11, which runs wherever Python does."""

import h11
from offramp.server.connections.connection import Patient
from uvicorn.protocols.http.h11_impl import H11Protocol


class H11Connection(Patient, H11Protocol):
    """One request at a time: what lies behind it stays unparsed until it is answered."""

    @property
    def head_begun(self) -> bool:
        return bool(self.conn.trailing_data[0])

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self.head_arrived()
