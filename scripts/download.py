"""Model folders from the Hugging Face hub, by mlx-lm's own downloader, in a process of its own.

mlx is never imported into `serve`: it would keep a device and threads in a process that only watches others.
"""

import subprocess
import sys
from pathlib import Path

from common.errors import ConfigError

# Run as `python -c`; its last line of stdout is the folder, or what was wrong.
_PROGRAM = """
import sys
from mlx_lm.utils import _download
try:
    print(_download(sys.argv[1]))
except Exception as error:
    print(type(error).__name__ + ": " + (str(error).splitlines() or [""])[0])
    sys.exit(1)
"""


def download(id: str) -> Path:
    """The local folder of a hub model. Progress goes to the terminal. Raises ConfigError."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, id], stdout=subprocess.PIPE, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no word from the downloader"])[-1]
    if done.returncode != 0:
        raise ConfigError(f"model {id!r} could not be fetched ({last}); give a folder, or check the id and the network")
    return Path(last)
