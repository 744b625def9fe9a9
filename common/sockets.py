"""The only place that makes ZeroMQ sockets and knows their options.

Every ROUTER is mandatory and every send is DONTWAIT, because a default ROUTER drops silently for unknown and for full peers
(libzmq issue 2037). Peers take a fresh random routing id per socket and IMMEDIATE, so that nothing is queued for a broker
that is not there. Contexts must be made after fork: pyzmq's are not usable across it (pyzmq issue 1307).
"""

import secrets

import zmq

from common.errors import ProtocolError

# A fuse, not a bound: slots and places bound the work. 10,000 frames of a wedged peer are a few MB.
HIGH_WATER_MARK = 10_000
# The largest payload is a prompt of token ids (5 bytes each at most): 64 MiB of text is refused far earlier by the API.
MAX_MESSAGE_BYTES = 64 * 2**20
PEER_LINGER_MS = 500

# pyzmq's own methods spend most of their time on enum arithmetic and per-frame look-ups: 6.2 µs a message to send and
# 5.4 to receive, where the backend's calls beneath them take 0.7 and 1.3 (docs/benchmarks.md).
_Raw = zmq.backend.Socket
_send, _recv, _get = _Raw.send, _Raw.recv, _Raw.get
_NOW = int(zmq.DONTWAIT)
_NOW_AND_MORE = int(zmq.DONTWAIT) | int(zmq.SNDMORE)
_MORE_COMES = int(zmq.RCVMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

WouldBlock = zmq.Again
Unreachable = zmq.ZMQError  # EHOSTUNREACH from a mandatory ROUTER; WouldBlock is a subclass, so catch that one first


def context() -> zmq.Context:
    """A context of this process's own, with one I/O thread (each thread does about a million small messages a second)."""
    return zmq.Context()


def router(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A bound broker socket. Raises zmq.ZMQError when the endpoint cannot be bound."""
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = 1
    _bound_size(socket)
    socket.bind(endpoint)
    return socket


def dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A peer's socket, connecting in the background, under a fresh routing id."""
    socket = context.socket(zmq.DEALER)
    socket.linger = PEER_LINGER_MS
    socket.immediate = 1
    # The first byte must not be zero: libzmq keeps such ids for itself.
    socket.routing_id = b"m" + secrets.token_bytes(15)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 200
    _bound_size(socket)
    socket.connect(endpoint)
    return socket


def _bound_size(socket: zmq.Socket) -> None:
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES


def send(socket: zmq.Socket, frames: list[bytes]) -> None:
    """Hand over all frames or none. Raises WouldBlock (no room, or no connection) or Unreachable (ROUTER: no such peer)."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        # Only the first part can fail: it decides whether the peer takes the message.
        _send(socket, frame, _NOW_AND_MORE if index < last else _NOW)


def relay(socket: zmq.Socket, peer: bytes, envelope: bytes, payload: bytes) -> None:
    """send() of a message to a peer of a ROUTER, for what is sent most often."""
    _send(socket, peer, _NOW_AND_MORE)
    _send(socket, envelope, _NOW_AND_MORE)
    _send(socket, payload, _NOW)


def receive(socket: zmq.Socket) -> list[bytes] | None:
    """The next message's frames, or None when there is none now."""
    try:
        frames = [_recv(socket, _NOW)]
    except zmq.Again:
        return None
    # The other parts of a message are there when its first one is.
    while _get(socket, _MORE_COMES):
        frames.append(_recv(socket, _NOW))
    return frames


def envelope_and_payload(frames: list[bytes]) -> tuple[bytes, bytes]:
    """The two frames of a message. Raises ProtocolError for any other number."""
    if len(frames) != 2:
        raise ProtocolError(f"{len(frames)} frames where two are a message")
    return frames[0], frames[1]


def readable(socket: zmq.Socket) -> bool:
    """Whether a message waits. Reading this also clears the descriptor's edge: drain after every True."""
    return bool(_get(socket, _EVENTS) & _READABLE)
