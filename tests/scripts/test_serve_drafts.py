"""Draft models as `serve` resolves them: a folder for each model that can use one."""

from pathlib import Path

import pytest

from common import settings
from common.errors import ConfigError
from common.models import ModelChoice
from scripts.serve_command import drafts
from worker.settings import WorkerSettings


def resolved(given: str, *models: ModelChoice) -> list[str]:
    return drafts(settings.load(WorkerSettings, {"MILLPOND_DRAFT_MODEL": given}), list(models))


def test_each_model_gets_its_own_or_the_common_one(tiny_model: Path, tiny_diffusion_model: Path) -> None:
    models = ModelChoice("a", str(tiny_model)), ModelChoice("b", str(tiny_model)), ModelChoice("d", str(tiny_diffusion_model))
    assert resolved("", *models) == []
    assert resolved(str(tiny_model), *models) == [f"a={tiny_model}", f"b={tiny_model}"]
    assert resolved(f"b={tiny_model}", *models) == [f"b={tiny_model}"]
    for given, words in (
        (f"c={tiny_model}", "no model is called 'c'; there are a, b, d"),
        (f"d={tiny_model}", "'d' is denoised in blocks"),
        ("a=/nowhere/x", "there is no folder /nowhere/x"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolved(given, *models)
