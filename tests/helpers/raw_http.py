"""HTTP as a stranger may write it: heads and bodies byte for byte, without a client that would mend them."""

import socket


def talk(port, head, body=b"", wait_s=5.0):
    """Send bytes as they are; status and the rest of the reply."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        reply = receive(connection)
    return int(reply.split()[1]), reply.partition(b"\r\n\r\n")[2]


def receive(connection):
    """One reply, head and body, which may arrive in several pieces; less if the server closes the connection."""
    reply = b""
    while part := connection.recv(65536):
        reply += part
        if b"\r\n\r\n" in reply and len(reply.partition(b"\r\n\r\n")[2]) >= _length(reply):
            break
    return reply


def _length(reply):
    head = reply.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length:")[2].split()[0]) if b"content-length:" in head else 10**9


def head(port, key, method, path, **change):
    """A right one for a body of two bytes, but for what is changed; None leaves a field out."""
    fields = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Content-Length": "2",
        **change,
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in fields.items() if v is not None)]
    return "\r\n".join(lines) + "\r\n"


def until_hung_up(port, data):
    """What the server says to these bytes, after which nothing more is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(1000):
            reply += part
    return reply


def begin_and_stall(port, data):
    """The first bytes of what the server says to a call that does not go on."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(1000)


# (status, change of a right head) that servers with routes for POST refuse.
WRONG_HEADS = (
    (403, {"Host": "evil.example"}),
    (403, {"Host": "127.0.0.1:1"}),
    (403, {"Host": None}),
    (403, {"Origin": "http://127.0.0.1"}),
    (403, {"Origin": "null"}),
    (415, {"Content-Type": None}),
    (415, {"Content-Type": "text/plain"}),
    (415, {"Content-Type": "multipart/form-data"}),
    (411, {"Content-Length": None}),
    (411, {"Content-Length": "-1"}),
    (411, {"Content-Length": "1e9"}),
    (411, {"Transfer-Encoding": "chunked"}),
    (413, {"Content-Length": "100001"}),
    (413, {"Content-Length": "9" * 15}),
    (411, {"Content-Length": "9" * 40}),
    (405, {"method": "GET"}),
    (405, {"method": "DELETE"}),
)
# Bodies that are no JSON object, or none that ends.
WRONG_BODIES = (b"", b"x", b"[]", b"null", b"{", b"[" * 50_000, b'{"a":' * 10_000, b"\xff\xfe")
