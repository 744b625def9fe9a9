"""The wire can be read by anybody, and nothing that is not a message gets in."""

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import envelope, generation
from common.errors import ProtocolError
from fixtures import wire_samples


def test_every_message_has_the_recorded_bytes() -> None:
    assert wire_samples.recorded() == json.loads(wire_samples.GOLDEN.read_text())


def test_every_message_type_is_recorded() -> None:
    recorded = {type(message) for message in wire_samples.MESSAGES}
    assert recorded == set(envelope.Message.__args__)


@pytest.mark.parametrize("message", wire_samples.MESSAGES, ids=lambda m: type(m).__name__)
def test_decoding_gives_the_message_back(message: envelope.Message) -> None:
    assert envelope.decode(envelope.encode(message)) == message


@pytest.mark.parametrize("message", wire_samples.MESSAGES, ids=lambda m: type(m).__name__)
def test_another_msgpack_library_reads_a_plain_array(message: envelope.Message) -> None:
    version, body = envelope.encode(message)[0], envelope.encode(message)[1:]
    fields = msgpack.unpackb(body)
    assert version == envelope.VERSION
    assert isinstance(fields, list) and isinstance(fields[0], int)


@pytest.mark.parametrize("message", wire_samples.MESSAGES, ids=lambda m: type(m).__name__)
def test_every_cut_and_every_surplus_byte_is_refused(message: envelope.Message) -> None:
    whole = envelope.encode(message)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            envelope.decode(whole[:length])
    with pytest.raises(ProtocolError):
        envelope.decode(whole + b"\x00")


@pytest.mark.parametrize(
    "body",
    [
        [99],
        ["16", wire_samples.ID, 1, 0],
        [16, wire_samples.ID, 1],
        [16, wire_samples.ID, 1, 0, 0],
        [16, wire_samples.ID, -1, 0],
        [16, wire_samples.ID, 1.5, 0],
        [16, wire_samples.ID, True, 0],
        [16, wire_samples.ID[:15], 1, 0],
        [16, "0123456789abcdef", 1, 0],
        [17, wire_samples.ID, 1, "no such outcome", 0, 0, 0],
        [7, [], "label", "model", 0, ""],
        [7, [wire_samples.ID], "label", "model", 11, ""],
        {"tag": 16},
        16,
        None,
    ],
    ids=repr,
)
def test_unknown_tags_and_wrong_fields_are_refused(body: object) -> None:
    with pytest.raises(ProtocolError):
        envelope.decode(bytes([envelope.VERSION]) + msgpack.packb(body))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="version 2, this is version 1"):
        envelope.decode(b"\x02" + envelope.encode(envelope.Heartbeat())[1:])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for candidate in (data, bytes([envelope.VERSION]) + data):
        try:
            envelope.decode(candidate)
        except ProtocolError:
            pass


@given(st.binary(max_size=200))
def test_any_bytes_are_a_payload_or_a_protocol_error(data: bytes) -> None:
    for unpack in (generation.unpack_request, generation.unpack_pieces, generation.unpack_summary):
        try:
            unpack(data)
        except ProtocolError:
            pass


def test_deep_nesting_is_a_protocol_error() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        envelope.decode(bytes([envelope.VERSION]) + deep)
    with pytest.raises(ProtocolError):
        generation.unpack_request(deep)


def test_payloads_come_back_as_they_went() -> None:
    pieces = [generation.Piece(0, "Paris"), generation.Piece(1, "hm", [wire_samples.LOGPROB]), generation.Piece(2, "{", [], 0, "f")]
    assert generation.unpack_pieces(generation.pack_pieces(pieces)) == pieces
    request = generation.GenerationRequest([5], 7, generation.Sampling(seed=3, logit_bias={1: -2.5}), ["x"])
    assert generation.unpack_request(generation.pack_request(request)) == request
    assert generation.unpack_summary(b"") == generation.Summary()
