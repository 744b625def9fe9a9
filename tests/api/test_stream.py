"""A streamed reply between its tickets and its response: what is written where, and in which order."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from api.broker_link import BrokerLink
from api.chunks import ChatFormat
from api.exchange import Exchange
from api.request_line import RequestLine
from api.stream import PART_PIECES, ReplyStream
from api.ticket import Ticket
from common.envelope import Done, Tokens
from common.generation import CONTENT, Piece, Summary, pack_pieces, pack_summary
from common.outcomes import Outcome


class Writer:
    """A response that remembers. full: the client does not keep up."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.full = False

    def takes_more(self) -> bool:
        return not self.full

    def write(self, part: bytes) -> None:
        self.written.append(part)


class Reply:
    """One stream whose worker has begun."""

    def __init__(self) -> None:
        self.exchange = Exchange(BrokerLink("ipc://nowhere", "api-1"), 1)
        self.ticket: Ticket = self.exchange.tickets[0]
        self.ticket.state, self.ticket.attempt = "started", 1
        self.form = ChatFormat("chatcmpl-1", 1, "m", "fp")
        self.writer = Writer()
        self.stream = ReplyStream(
            self.exchange, self.form, RequestLine("label"), self.writer, buffer=4, comment_s=60.0
        )

    def come(self, *texts: str) -> None:
        pieces = [Piece(CONTENT, text) for text in texts]
        self.ticket.tokens(Tokens(self.ticket.id, 1, self.ticket.next_seq), pack_pieces(pieces))

    def end(self) -> None:
        self.ticket.done(Done(self.ticket.id, 1, Outcome.STOP), pack_summary(Summary()))

    def bytes_of(self, *texts: str) -> bytes:
        return self.form.pieces(0, [Piece(CONTENT, text) for text in texts])


def run(work: Callable[[Reply], Awaitable[None]]) -> None:
    async def once() -> None:
        reply = Reply()
        assert (await anext(reply.stream)).startswith(b"data: ")
        await work(reply)
        await reply.stream.close()

    asyncio.run(once())


async def waiting(reply: Reply) -> "asyncio.Task[bytes]":
    """The application asks for the next part and there is none yet."""
    asked = asyncio.ensure_future(anext(reply.stream))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asked.done()
    return asked


def test_text_goes_to_the_response_without_waking_the_application() -> None:
    async def work(reply: Reply) -> None:
        asked = await waiting(reply)
        reply.come("a")
        reply.come("b", "c")
        assert reply.writer.written == [reply.bytes_of("a"), reply.bytes_of("b", "c")]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asked.done()
        reply.end()
        assert (await asked).endswith(b"data: [DONE]\n\n")
        with pytest.raises(StopAsyncIteration):
            await anext(reply.stream)
        assert len(reply.writer.written) == 2

    run(work)


def test_text_that_comes_while_the_application_is_busy_waits_for_it() -> None:
    async def work(reply: Reply) -> None:
        reply.come("a")
        reply.come("b")
        assert reply.writer.written == []
        assert await anext(reply.stream) == reply.bytes_of("a", "b")

    run(work)


def test_a_burst_of_more_than_a_part_keeps_its_order() -> None:
    texts = [f"{number} " for number in range(2 * PART_PIECES + 5)]

    async def work(reply: Reply) -> None:
        asked = await waiting(reply)
        reply.come(*texts)
        assert reply.writer.written == [reply.bytes_of(*texts[:PART_PIECES])]
        rest = await asked
        assert rest == reply.bytes_of(*texts[PART_PIECES : 2 * PART_PIECES])
        assert await anext(reply.stream) == reply.bytes_of(*texts[2 * PART_PIECES :])

    run(work)


def test_a_client_that_does_not_keep_up_is_written_to_by_the_application_and_bounded() -> None:
    async def work(reply: Reply) -> None:
        asked = await waiting(reply)
        reply.writer.full = True
        reply.come("a")
        assert reply.writer.written == []
        assert await asked == reply.bytes_of("a")
        # It holds the part and waits for the client.
        for text in "bcdefgh":
            reply.come(text)
        assert reply.ticket.overflowed and reply.ticket.state == "ended"

    run(work)


def test_what_goes_wrong_with_a_write_is_the_applications_to_hear() -> None:
    async def work(reply: Reply) -> None:
        asked = await waiting(reply)

        def failing(part: bytes) -> None:
            raise KeyError

        reply.writer.write = failing  # type: ignore[method-assign]
        reply.come("a")
        with pytest.raises(KeyError):
            await asked

    run(work)
