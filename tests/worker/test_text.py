"""Tokens to text: equal to the tokenizer's own decoding over any tokens, never a piece of a character."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from common.errors import ConfigError
from worker.engines.text import Texts


def streamed(texts: Texts, tokens: list[int]) -> list[str]:
    stream = texts.stream()
    return [*(stream.add(token) for token in tokens), stream.finish()]


def random_tokens(vocabulary: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    # Low ids are single bytes, so that half of the draws from there makes broken and whole characters often.
    return [
        chooser.randrange(vocabulary if chooser.random() < 0.5 else min(300, vocabulary))
        for _ in range(chooser.randrange(1, 30))
    ]


def test_byte_level_text_equals_decode_for_any_tokens(tiny_model: Path) -> None:
    texts = Texts(tiny_model)
    tokenizer = texts.tokenizer
    for seed in range(1500):
        # Two past the vocabulary: models have more rows than their tokenizer has tokens.
        tokens = random_tokens(tokenizer.get_vocab_size() + 2, seed)
        assert "".join(streamed(texts, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_sentencepiece_text_equals_decode_for_tokens_of_sound_text(tiny_sentencepiece_model: Path) -> None:
    texts = Texts(tiny_sentencepiece_model)
    tokenizer = texts.tokenizer
    alphabet = ["hello", " ", "the", "é", "日", "🙂", "☃", "\n", "\x00", "👩‍👩‍👧", "<|im_start|>", "  "]
    for seed in range(500):
        chooser = random.Random(seed)
        text = "".join(chooser.choice(alphabet) for _ in range(12))
        tokens = tokenizer.encode(text).ids
        pieces = streamed(texts, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_bytes_that_are_no_character_come_out_as_one_mark_each(tiny_sentencepiece_model: Path) -> None:
    texts = Texts(tiny_sentencepiece_model)
    byte = [texts.tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)]
    hello = texts.tokenizer.token_to_id("▁hello")
    for values in ([0xFF], [0xE2, 0x98], [0xC3], [0xF0, 0x9F, 0x99], [0x80, 0x80], [0xE2, 0xFF]):
        tokens = [hello, *(byte[value] for value in values), hello]
        assert "".join(streamed(texts, tokens)) == texts.tokenizer.decode(tokens)
        assert "".join(streamed(texts, tokens[:-1])) == texts.tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize("family", ["tiny_model", "tiny_sentencepiece_model"])
def test_each_character_leaves_with_the_token_that_completes_it(family: str, request: pytest.FixtureRequest) -> None:
    texts = Texts(request.getfixturevalue(family))
    text = "☃é日a"
    tokens = texts.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(texts, tokens)
    assert "".join(pieces).strip() == text
    assert pieces[-1] == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_lone_space_is_not_held_back(tiny_model: Path) -> None:
    texts = Texts(tiny_model)
    (space,) = texts.tokenizer.encode(" ").ids
    assert texts.stream().add(space) == " "


def test_another_decoder_is_streamed_by_the_library(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "wor": 3, "##ld": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = Texts(tmp_path)
    assert "".join(streamed(texts, [1, 2, 3, 4, 1])) == "hello world hel" == tokenizer.decode([1, 2, 3, 4, 1])
    assert texts.raw(3) == b"wor"


def test_bytes_of_a_token_are_its_own(tiny_model: Path) -> None:
    texts = Texts(tiny_model)
    tokens = texts.tokenizer.encode("snow☃man é").ids
    assert b"".join(texts.raw(token) for token in tokens).decode() == "snow☃man é"
    assert texts.raw(texts.tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"


def test_a_tokenizer_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        Texts(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        Texts(tmp_path)
