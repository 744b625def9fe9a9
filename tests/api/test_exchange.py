"""The hashes by which a prompt finds the worker that has read its head."""

import itertools

from api.exchange import MOST_HASHES, prefix_hashes
from broker.prefixes import HASH_BYTES


def hashes(prompt: list[int]) -> list[bytes]:
    whole = prefix_hashes(prompt)
    return [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]


def test_prompts_share_the_hashes_of_what_they_share() -> None:
    head = list(range(1000))
    one, other = hashes([*head, *range(5000, 5300)]), hashes([*head, *range(7000, 9000)])
    common = sum(a == b for a, b in zip(one, other, strict=False))
    # 64 to 512 in steps of 64, then 640, 768, 896; 1024 is beyond what they share.
    assert common == 11 and one[:common] == hashes(head) == other[:common]
    assert not set(one[common:]) & set(other[common:])


def test_the_next_turn_of_a_conversation_shares_nearly_all_of_the_last_one() -> None:
    said = list(range(20_000))
    for length in (64, 100, 700, 5000, 19_000):
        last = hashes(said[:length])
        assert hashes([*said[:length], 1, 2, 3])[: len(last)] == last
        # The longest head that is hashed is hardly shorter than the prompt: cutting a quarter off loses a hash.
        assert length < 128 or len(hashes(said[: length * 3 // 4])) < len(last)


def test_what_is_too_short_to_matter_has_none_and_no_prompt_has_many() -> None:
    assert prefix_hashes([]) == prefix_hashes([5] * 63) == b""
    assert len(prefix_hashes([5] * 64)) == HASH_BYTES
    assert len(hashes([5] * 32768)) == 32
    assert len(prefix_hashes([5] * 3_000_000)) <= MOST_HASHES * HASH_BYTES <= 1024
    everything = hashes(list(range(8192)))
    assert len(set(everything)) == len(everything)


def test_every_token_counts() -> None:
    for at in itertools.chain(range(0, 64, 9), (63,)):
        changed = [0] * 64
        changed[at] = 1 << 20
        assert prefix_hashes(changed) != prefix_hashes([0] * 64)
