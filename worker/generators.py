"""What generates one reply at a time, block by block (pure: a protocol and its values; docs/engines.md shows how to add
one).

A generator holds one model, turns a prompt into blocks of tokens and decodes them. It knows nothing of requests, stop
strings, cancelling or other replies: worker/engines/serial runs it, and ends a reply early by closing the iterator.
Invariant: between two blocks nothing is computed, so a reply that is closed there costs nothing more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextGeneration:
    """How a reply ended by itself. reason: stop (a stop id came) or length. text: what the detokenizer still held."""

    reason: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that were committed together, in order: (id, the text that became known with it).

    The token that ended the reply is not among them; skipped special tokens are, with text "". end: only in the last
    block of a reply, whose tokens may be none.
    """

    tokens: Sequence[tuple[int, str]]
    end: TextGeneration | None = None


class TextGenerator(Protocol):
    """One model, one reply at a time. All calls come from one thread, the one that made it (MLX streams are
    thread-local)."""

    max_prompt_tokens: int
    """The longest prompt that leaves room for one token."""

    block: int
    """The most tokens of one block."""

    vocabulary: int
    """Token ids are below this."""

    thought_channel_marker_ids: tuple[Sequence[int], Sequence[int]]
    """What opens and what closes the model's thought channel, each a sequence of ids; empty ones: it has none."""

    abilities: Sequence[str]
    """What of worker/placement's needs it honours beyond the bare prompt: "seed", for one."""

    details: dict[str, str]
    """For logs and the pool's snapshot: weights, model."""

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        skip_special_token_ids: Sequence[int],
        seed: int | None,
    ) -> Iterator[Block]:
        """The reply's blocks; the first one reads the prompt. The last one has an `end`.

        max_tokens, at least 1, counts skipped tokens too, and ends a reply within a block. A stop id ends it at once, and
        the rest of its block is thrown away. The same prompt, settings and seed (not None) always give the same reply, and
        neither use nor change anybody else's random numbers. Closing the iterator ends the reply.
        """
