"""What `serve` prints when a chat can be answered (pure)."""

from typing import Any


def banner(host: str, port: int, snapshot: dict[str, Any]) -> str:
    """URL, models, workers, slots, BLAS, and one curl line to copy."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    workers = [worker for worker in snapshot["workers"] if worker["state"] == "ready"]
    lines = ["", f"Millpond is ready at {url}"]
    for model in snapshot["models"]:
        mine = [worker for worker in workers if worker["model"] == model["name"]]
        if mine:
            blas = f", BLAS {mine[0]['blas']}" if mine[0]["blas"] else ""
            lines.append(
                f"  {model['name']}: {len(mine)} of {model['planned_workers']} workers ready, "
                f"{mine[0]['slots']} slots each{blas}"
            )
    name = workers[0]["model"] if workers else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0}}'
    lines += ["", f"  curl {url}/v1/chat/completions -d '{body}'", ""]
    return "\n".join(lines)
