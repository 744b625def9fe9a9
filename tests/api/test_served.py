"""What is read from a model folder, and how a request's sampling joins its defaults."""

import json
from pathlib import Path

import pytest

from api import served
from api.abilities import AUTOREGRESSIVE, BLOCK_DIFFUSION
from api.resources.replies import header_text, ignored_header
from api.routes import find, normal_path
from api.served import context_length, read_model, sampling_defaults
from api.settings import ApiSettings
from common.errors import ConfigError
from common.generation import Sampling
from common.models import ModelChoice
from common.settings import load
from fixtures import tiny_diffusion


def test_a_model_folder_is_read(tiny_model: Path) -> None:
    model = read_model(ModelChoice("tiny", str(tiny_model)))
    assert (model.name, model.context, model.defaults) == ("tiny", 4096, Sampling())
    assert len(model.fingerprint) == 16 and model.created > 0
    assert model.prompt_limit(32768) == 4095 and model.prompt_limit(10) == 10


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"text_config": {"max_position_embeddings": 256}, "max_position_embeddings": 512}, 256),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": True}, 4096),
        ({}, 4096),
    ],
)
def test_the_context_is_the_configs(config: dict[str, object], context: int) -> None:
    assert context_length(config) == context


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, Sampling()),
        ({"temperature": 0.2, "top_p": 0.9, "top_k": 20}, Sampling(temperature=0.2, top_p=0.9, top_k=20)),
        ({"do_sample": False, "temperature": 0.7}, Sampling(temperature=0.0)),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, Sampling(min_p=0.1, repetition_penalty=1.1)),
        ({"temperature": "hot", "top_p": 7, "top_k": None, "repetition_penalty": 0}, Sampling()),
    ],
)
def test_sampling_defaults_are_generation_configs(config: dict[str, object], defaults: Sampling) -> None:
    assert sampling_defaults(config) == defaults


def test_a_diffusion_model_is_taken_for_one_before_any_worker_says_so(tiny_model: Path, tmp_path: Path) -> None:
    diffusion = tiny_diffusion.build(tmp_path / "diffusion")
    assert read_model(ModelChoice("d", str(diffusion))).assumed == BLOCK_DIFFUSION
    assert read_model(ModelChoice("t", str(tiny_model))).assumed == AUTOREGRESSIVE


def test_a_model_is_known_by_its_folders_name_and_without_its_owner(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(tiny_model)
    choices = [ModelChoice("org/pond", str(tiny_model)), ModelChoice("sea", str(tmp_path / "other"))]
    models = {choice.name: read_model(choice) for choice in choices}
    named = {name: served.find(models, name) for name in ("org/pond", "pond", "tiny", "sea", "other", "", "org")}
    assert {name: model and model.name for name, model in named.items()} == {
        **{"org/pond": "org/pond", "pond": "org/pond", "tiny": "org/pond"},
        **{"sea": "sea", "other": "sea", "": None, "org": None},
    }
    models["his/pond"] = read_model(ModelChoice("his/pond", str(tiny_model)))
    assert served.find(models, "pond") is None, "two could be meant"


def test_a_bad_folder_is_a_config_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_model(ModelChoice("x", str(tmp_path / "none")))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        read_model(ModelChoice("x", str(tmp_path)))
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match="chat template"):
        read_model(ModelChoice("x", str(tmp_path)))


def test_paths_and_their_routes() -> None:
    assert normal_path("/") == "/" and normal_path("/a/") == "/a" and normal_path("/a//") == "/a/"
    found = find("/v1/models/org/name")
    assert found is not None and found.allowed == "GET, HEAD"
    assert find("/v1/models/") is None and find("/v1/models") is not None and find("/x") is None


def test_header_values_are_printable_ascii() -> None:
    assert header_text("demo-0 (a)") == "demo-0%20(a)".replace("%20", " ")
    assert header_text("é\r\nx: y") == "%C3%A9%0D%0Ax: y"
    assert ignored_header(("a", "b c", "é,")) == "a, b%20c, %C3%A9%2C"
    assert ignored_header(tuple(f"field{i}" for i in range(1000))).endswith(" more")
    assert len(ignored_header(tuple("x" * 900 for _ in range(9)))) < 2000
    assert ignored_header(("x" * 5000, "y")) == "x" * 64 + ", y"


def test_settings_are_read_from_the_environment() -> None:
    settings = load(ApiSettings, {"MILLPOND_MODEL": "a=x,b=y", "MILLPOND_MAX_BODY_BYTES": "1MiB"})
    assert [model.name for model in settings.model] == ["a", "b"]
    assert settings.max_body_bytes == 2**20 and settings.port == 8080
    with pytest.raises(ConfigError, match="MILLPOND_PORT"):
        load(ApiSettings, {"MILLPOND_PORT": "70000"})
