"""What all tests share: the tiny model, built once a session, and the demo model, fetched once ever."""

import os
from pathlib import Path

import pytest

# The recipes are imported where they are used: numpy and tokenizers would slow the start of tests that need neither.


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model, with a byte-level tokenizer."""
    from fixtures.tiny_model import build

    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a SentencePiece-style tokenizer."""
    from fixtures.tiny_model import build

    return build(tmp_path_factory.mktemp("models") / "tiny-spm", family="sentencepiece")


@pytest.fixture(scope="session")
def tiny_diffusion_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny diffusion model; tests that load it are marked `lanes`."""
    from fixtures.tiny_diffusion import build

    return build(tmp_path_factory.mktemp("models") / "tiny-diffusion")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model; tests that use it are marked `demo`."""
    from scripts.demo_model import fetch

    home = os.environ.get("MILLPOND_HOME") or "~/.cache/millpond"
    return fetch(Path(home).expanduser())
