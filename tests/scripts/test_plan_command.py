"""`millpond plan`: the table and its JSON, on machines that are not there."""

import dataclasses
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from scripts import millpond, plan_command
from tests.worker.test_plan import FACTS, GIB
from worker import device, sizing
from worker.cache_layout import CacheLayout
from worker.device import Machine
from worker.shares import Device, Kind, Wish, place
from worker.sizing import Survey


def survey(*wishes: Wish, kind: Kind = Kind()) -> Survey:
    budgets = (40 * GIB, 20 * GIB)
    devices = [Device(index, "H", size) for index, size in enumerate(budgets)]
    machine = Machine(device.CUDA, ("H", "H"), (50 * GIB, 25 * GIB))
    return Survey(machine, budgets, place(devices, wishes, kind))


WINDOWED = dataclasses.replace(FACTS, cache=CacheLayout(2000, ((1024, 10_000),), row=512), estimated=True)


def test_a_row_per_device_and_model_with_guesses_marked() -> None:
    lines = plan_command.table(survey(Wish("a", FACTS, 1), Wish("windowed", WINDOWED), kind=Kind(one_each=True)))
    text = "\n".join(lines)
    assert "cuda 1: H, 25.0 GiB, of which 20.0 GiB may be used" in text
    rows = [line.split() for line in lines if line[:1] in "01" and line[1:2] == " "]
    assert [(row[0], row[1]) for row in rows] == [("0", "a"), ("0", "windowed"), ("1", "a"), ("1", "windowed")]
    head = next(line for line in lines if line.startswith("device"))
    for column in ("weights", "KV per token", "overhead", "fit", "slots", "KV tokens", "limited by"):
        assert column in head
    by = {(row[0], row[1]): " ".join(row) for row in rows}
    # Not estimated: weights and caches of a known model; what it needs beside them always is.
    assert "600.0 MiB 22.5 KiB ~512.0 MiB" in by["0", "a"] and by["0", "a"].count("~") == 1
    assert "~600.0 MiB ~23.4 KiB" in by["0", "windowed"]
    assert " - " in by["1", "a"] or " - " in by["0", "a"]
    assert "windowed: 19.5 KiB of a token's KV only in its row's last 1024 tokens" in text
    assert "windowed: 1.0 KiB a row, however long it is" in text
    assert max(map(len, lines)) < 160


def test_the_json_says_the_same_in_bytes() -> None:
    made = plan_command.as_json(survey(Wish("a", FACTS), Wish("b", WINDOWED, share=0.25)))
    assert json.loads(json.dumps(made)) == made
    a, b = made["devices"][0]["models"]
    assert a["kv_bytes_per_token"] == 23_040 and a["weight_bytes"] == 600 * 2**20 and a["estimated"] == ["overhead_bytes"]
    assert b["kv"] == {
        "token_bytes": 4000, "windows": [{"tokens": 1024, "token_bytes": 20_000}], "row_bytes": 1024
    }  # fmt: skip
    assert "kv_tokens" in b["estimated"] and b["share_bytes"] <= 10 * GIB
    assert {a["workers"], a["workers_that_fit"] > 5} == {1, True}


def test_amounts() -> None:
    assert [plan_command.amount(size) for size in (0, 1023, 1024, 3 << 20, 5 << 29)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "2.5 GiB"
    ]  # fmt: skip


def machine(monkeypatch: pytest.MonkeyPatch, found: Machine) -> None:
    monkeypatch.setattr(sizing.device, "probe", lambda: {
        "backend": found.backend,
        "devices": [{"name": name, "memory": memory} for name, memory in zip(found.names, found.memory, strict=True)],
    })  # fmt: skip


def test_the_command_asks_the_machine_and_prints(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, Machine(device.CUDA, ("H", "H"), (10 * GIB, 10 * GIB)))
    flags = ["--model", f"a={tiny_model}", "--model", f"b={tiny_model}", "--share", "b=0.25", "--memory-budget", "0.5"]
    assert millpond.main(["plan", *flags, "--json", "--context", "512"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [one["budget_bytes"] for one in made["devices"]] == [5 * GIB] * 2
    for one in made["devices"]:
        assert [(m["model"], m["workers"], m["context"]) for m in one["models"]] == [("a", 1, 512), ("b", 1, 512)]
        assert one["models"][1]["share_bytes"] == 5 * GIB // 4
    assert millpond.main(["plan", *flags]) == 0
    assert "limited by" in capsys.readouterr().out


def test_what_does_not_fit_or_is_not_there_is_status_2(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, Machine(device.METAL, ("M",), (16 * GIB,)))
    flags = ["plan", "--model", f"a={tiny_model}"]
    assert millpond.main([*flags, "--memory-budget", "1GiB", "--workers", "3"]) == 2
    assert "worker 2 of 3 of model 'a' needs" in capsys.readouterr().err
    assert millpond.main([*flags, "--share", "b=0.5"]) == 2
    assert "MILLPOND_SHARE: no model is called 'b'; there are a" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="MILLPOND_SHARE='a': allowed is"):
        plan_command.settings.load(plan_command.WorkerSettings, {"MILLPOND_SHARE": "a"})
