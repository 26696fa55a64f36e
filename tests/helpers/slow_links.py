"""A link between a trainer and its sampler servers that delays every part, holds it back, or cuts the connection."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

from gspo.sampling import registered


class SlowLink:
    """Stands between a registered server and whoever reads its registration from now on.

    delay_s  of each part of up to 4 KiB, in both directions; cuts: so many times the connection ends in
    the middle of a reply, of every fourth part of one
    silent_s  once, after 40 parts, it carries nothing for so long
    """

    def __init__(self, folder: Path, index: int, *, delay_s: float, cuts: int = 0, silent_s: float = 0.0) -> None:
        address = registered(folder, index)
        assert address is not None
        self._port = int(address.url.rpartition(":")[2])
        # The same port of another address of this machine: the Host field then keeps its length.
        self._listener = socket.create_server(("127.0.0.2", self._port))
        self._delay_s, self._cuts, self._silent_s = delay_s, cuts, silent_s
        self._lock = threading.Lock()
        self.num_parts = self.num_cut = self._num_replies = 0
        threading.Thread(target=self._accept, daemon=True).start()
        file = folder / f"sampler_{index}.json"
        tmp = file.with_suffix(".link")
        tmp.write_text(json.dumps({**address._asdict(), "url": f"http://127.0.0.2:{self._port}"}))
        tmp.replace(file)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                with self._lock:
                    self.num_parts += 1
                    self._num_replies += not is_request
                    is_cut = not is_request and self.num_cut < self._cuts and self._num_replies % 4 == 0
                    self.num_cut += is_cut
                    silent_s, self._silent_s = (self._silent_s, 0.0) if self.num_parts > 40 else (0.0, self._silent_s)
                time.sleep(self._delay_s + silent_s)
                if is_cut:
                    sink.sendall(part[: len(part) // 2])
                    break
                if is_request:
                    part = part.replace(b"127.0.0.2:%d" % self._port, b"127.0.0.1:%d" % self._port)
                sink.sendall(part)
        for end in (sink, source):  # wakes the other direction
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction closes the other socket
