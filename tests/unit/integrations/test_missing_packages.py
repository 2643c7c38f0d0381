"""What integrations say where the package that they are for is not there, or is another release."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from cupyattn.core.packages import needs
from cupyattn.errors import CupyAttnError, MissingPackageError


class _Absent:
    """A finder that hides a package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["minisgl", "sglang", "transformers", "vllm"])
def test_registering_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module(f"cupyattn.integrations.{name}")
    for known in [x for x in sys.modules if x.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setattr(sys, "meta_path", [_Absent(name), *sys.meta_path])
    with pytest.raises(MissingPackageError, match=f"needs {name}, which is not installed") as error:
        integration.register()
    assert isinstance(error.value, (CupyAttnError, ModuleNotFoundError))


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("torch", "import cupyattn.integrations.torch"),
        (
            "jax",
            "import numpy as np\nfrom cupyattn.integrations import jax\n"
            "x = np.zeros((1, 2, 2, 16), np.float16)\njax.dot_product_attention(x, x, x)",
        ),
    ],
)
def test_using_one_without_its_framework(package: str, code: str) -> None:
    blocked = f"import sys; sys.modules[{package!r}] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 1
    wanted = f"MissingPackageError: cupyattn.integrations.{package}: needs {package}, which is not"
    assert wanted in done.stderr


def test_another_release_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    @needs("json")
    def imports_what_is_not_there() -> None:
        from json import no_such_name  # type: ignore[attr-defined]  # noqa: F401

    with pytest.raises(MissingPackageError, match="does not know this release of json"):
        imports_what_is_not_there()

    @needs("json")
    def imports_of_others() -> None:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError) as error:
        imports_of_others()
    assert not isinstance(error.value, MissingPackageError)
