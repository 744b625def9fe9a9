"""Text of generated token ids, as it becomes known.

Owns the decoding of ids to text and bytes, with the tokenizers library and the standard library alone. Must never
know an engine or mlx. Invariant: the pieces of a stream concatenated are tokenizer.decode(ids,
skip_special_tokens=True), and no piece ends inside a character.

mlx-lm's own detokenizers are not used: they drop the first token's leading space, write byte 0x00 as another letter,
hold a lone space back until the next token and write special tokens into the text.
"""

import codecs
import json
import re
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from common.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TextStream(Protocol):
    """The text of one reply."""

    def add(self, token: int) -> str:
        """The text that became known with this token."""

    def finish(self) -> str:
        """What was still held back: the start of a character that will not be completed."""


class Texts:
    """What the tokens of one model mean. Made once, gives each reply its own stream."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder's tokenizer.json cannot be read."""
        path = folder / "tokenizer.json"
        try:
            # Read once as text: the library does not show a decoder's parts.
            content = path.read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(content)
            decoder = json.loads(content).get("decoder")
        except Exception as error:  # the library raises bare Exception
            reason = "it is missing" if isinstance(error, FileNotFoundError) else type(error).__name__
            raise ConfigError(f"cannot read {path}: {reason}; fetch the model again") from None
        self.special = frozenset(
            token for token, added in self.tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._bytes: dict[int, bytes] = {}
        self._kind, self._strips_first_space = _decoder_kind(decoder)

    def stream(self) -> TextStream:
        """A stream for one reply."""
        if self._kind == "bytes":
            return _ByteLevel(self)
        if self._kind == "pieces":
            return _Pieces(self, self._strips_first_space)
        return _Generic(self.tokenizer)

    def is_special(self, token: int) -> bool:
        """Whether the token is markup that never becomes text."""
        return token in self.special

    def raw(self, token: int) -> bytes:
        """The token's bytes in running text; special tokens as they are written."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def piece(self, token: int) -> str:
        """The token as the vocabulary spells it; "" for an id that it does not know."""
        return self.tokenizer.id_to_token(token) or ""

    def _find_bytes(self, token: int) -> bytes:
        piece = self.piece(token)
        if self._kind == "bytes":
            try:
                return bytes(_BYTE_OF[letter] for letter in piece)
            except KeyError:
                # An added token spelled in plain letters.
                return piece.encode()
        if self._kind == "pieces":
            byte = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()


class _ByteLevel:
    """Tokens are bytes and nothing else is done to them (GPT-2 and most models since)."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        # Gives a broken sequence out as U+FFFD as soon as it is broken, and holds only what may still become a
        # character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        if self._texts.is_special(token):
            return ""
        return self._decoder.decode(self._texts.raw(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Pieces:
    """SentencePiece spelling: words with a visible space, and byte tokens where a character is not in the vocabulary.

    A run of byte tokens that is no UTF-8 comes out as one U+FFFD a byte. (decode() does so for the whole run, also
    for the sound characters before the fault; those have left by then.)
    """

    def __init__(self, texts: Texts, strips_first_space: bool) -> None:
        self._texts = texts
        self._strip = strips_first_space
        self._held = b""

    def add(self, token: int) -> str:
        if self._texts.is_special(token):
            return ""
        if _BYTE_TOKEN.fullmatch(self._texts.piece(token)):
            return self._out(self._add_byte(self._texts.raw(token)))
        return self._out(self.finish() + self._texts.raw(token).decode())

    def finish(self) -> str:
        lost, self._held = "\ufffd" * len(self._held), b""
        return lost

    def _add_byte(self, byte: bytes) -> str:
        self._held += byte
        try:
            text = self._held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            # The byte does not continue what was held; it may begin something itself.
            lost, self._held = "\ufffd" * (len(self._held) - 1), b""
            return lost + self._add_byte(byte) if lost else "\ufffd"
        self._held = b""
        return text

    def _out(self, text: str) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text.removeprefix(" ")


class _Generic:
    """Any other decoder, by the library's own streaming; what it leaves out comes at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = ""

    def add(self, token: int) -> str:
        self._ids.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # the library raises bare Exception where a decoder changes what it said before
            text = ""
        self._given += text
        return text

    def finish(self) -> str:
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self._given) :] if whole.startswith(self._given) else ""


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _letters_of_bytes()


def _decoder_kind(decoder: object) -> tuple[str, bool]:
    """(bytes, pieces or other; whether the reply's first space is dropped), from tokenizer.json's decoder."""
    parts = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts or []]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    replaced = bool(parts) and parts[0] == {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    if replaced and kinds[1:] == ["ByteFallback", "Fuse"]:
        return "pieces", False
    if replaced and kinds[1:] == ["ByteFallback", "Fuse", "Strip"]:
        strip = parts[3]
        if (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0):
            return "pieces", True
    return "other", False
