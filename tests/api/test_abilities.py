"""Sampling fields by what a model's lanes can do with them."""

import pytest

from api.abilities import AUTOREGRESSIVE, BLOCK_DIFFUSION, NEEDS, not_honoured, sampling
from api.responses import RequestError
from common.generation import Sampling

GIVEN = {"temperature": 0.0, "seed": 3, "logit_bias": {1: 2.0}}


def test_every_sampling_field_needs_something() -> None:
    assert set(NEEDS) == set(Sampling.__struct_fields__)


def test_what_a_request_gives_wins_over_the_defaults() -> None:
    drawn = sampling(GIVEN, Sampling(temperature=0.7, top_p=0.9), AUTOREGRESSIVE)
    assert drawn == Sampling(temperature=0.0, top_p=0.9, seed=3, logit_bias={1: 2.0})
    assert not_honoured(GIVEN, AUTOREGRESSIVE, strict=True) == ()


def test_what_no_lane_can_honour_is_neutral_and_named() -> None:
    assert sampling(GIVEN, Sampling(top_k=64, repetition_penalty=1.1), BLOCK_DIFFUSION) == Sampling(seed=3)
    assert not_honoured(GIVEN, BLOCK_DIFFUSION, strict=False) == ("temperature", "logit_bias")


def test_strict_refuses_the_first_of_them() -> None:
    with pytest.raises(RequestError) as caught:
        not_honoured(GIVEN, BLOCK_DIFFUSION, strict=True)
    assert (caught.value.status, caught.value.param) == (400, "temperature")
