"""Get engines into a folder, without their compiled parts and without most of what they require:

    python tests/helpers/engines/packages.py FOLDER [vllm] [sglang]

`CUPYATTN_ENGINES=FOLDER make test-slow ARGS="-k real_engines"` then runs them, `make test-gpu` with
the same words on a GPU. Half a gigabyte is downloaded and 400 MB stay.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ENGINES = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
# What both need to start. The rest of their requirements is stood in for (`absent`).
REQUIRED = (
    "transformers==5.19.0 huggingface_hub tokenizers safetensors tqdm regex pydantic pydantic_core "
    "annotated-types typing-inspection msgspec cloudpickle cachetools cbor2 einops dill psutil "
    "nvidia-ml-py pyyaml pyzmq httpx2 httpcore2 truststore anyio h11 sniffio idna"
).split()


def fetch(folder: Path, engines: list[str]) -> None:
    """Download wheels and unpack their Python files; install what they need beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    install = "install -q --no-deps --no-compile --upgrade --target".split()
    subprocess.run([*pip, *install, str(folder), *REQUIRED], check=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        wanted = [ENGINES[x] for x in engines]
        subprocess.run([*pip, "download", "-q", "--no-deps", "-d", place, *wanted], check=True)
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                kept = [x for x in archive.namelist() if not x.endswith(".so")]
                archive.extractall(folder, kept)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), sys.argv[2:] or list(ENGINES))
