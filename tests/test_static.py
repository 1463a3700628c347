"""The code base as a whole: lint, format, types and the import rules of the design."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schemas", "kernels", "producers", "streams", "trainer", "consumers", "compose")
MAY_IMPORT = {
    "schemas": set(),
    "kernels": set(),
    "kernels.weights": {"schemas", "kernels"},
    "producers": {"schemas"},
    "streams": {"schemas"},
    "trainer": {"schemas", "kernels", "kernels.weights"},
    "consumers": {"schemas", "kernels", "kernels.weights"},
    "compose": {"schemas", "kernels", "kernels.weights", "producers", "streams", "trainer", "consumers"},
}


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")


def test_types_are_checked():
    run("mypy", "-p", "tidemill")


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    modules = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    packages = {"tidemill." + ".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    # compose/main is there twice: the namespace itself has a __main__.py.
    assert set(listed) == packages | {"tidemill"}


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which folder is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str:
    """The most specific layer that a module, named from its folder on, belongs to."""
    return max((layer for layer in MAY_IMPORT if f"{module}.".startswith(f"{layer}.")), key=len, default=module)


def forbidden(layer: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[layer] | {layer}
    ours = [layer_of(name.removeprefix("tidemill.")) for name in imports_of(source) if name.startswith("tidemill.")]
    return [name for name in ours if name not in allowed]


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_import_rules(layer: str):
    paths = (path.relative_to(ROOT) for path in (ROOT / layer.replace(".", "/")).rglob("*.py"))
    files = [path for path in paths if layer_of(".".join(path.with_suffix("").parts)) == layer]
    assert files
    broken = {str(path): found for path in files if (found := forbidden(layer, (ROOT / path).read_text("utf-8")))}
    assert not broken


def test_the_import_rule_can_fail():
    assert forbidden("producers", "from tidemill.trainer.step import x") == ["trainer"]
    assert forbidden("trainer", "import tidemill.producers.outbox") == ["producers"]
    assert forbidden("trainer", "from tidemill.kernels import delta") == []
    assert forbidden("trainer", "from tidemill.kernels.weights import anchor") == []
    assert (
        forbidden("kernels.weights", "from tidemill.schemas import records, codec\nimport tidemill.kernels.delta") == []
    )
    assert forbidden("kernels", "from tidemill.schemas.records import Manifest") == ["schemas"]
    assert forbidden("kernels", "from tidemill.kernels.weights import anchor") == ["kernels.weights"]
    assert forbidden("kernels.weights", "import tidemill.consumers.replica.role") == ["consumers"]
    assert forbidden("producers", "from tidemill.kernels.weights import anchor") == ["kernels.weights"]


def test_the_producer_side_and_the_command_line_need_no_torch():
    blocked = "import sys\nfor name in ('torch', 'transformers', 'vllm', 'faust', 'chdb'): sys.modules[name] = None\n"
    modules = "tidemill.compose.cli, tidemill.producers.rollout.worker, tidemill.producers.tasks.feeder"
    modules += ", tidemill.producers.edge.router"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}import {modules}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_topics_are_named_in_the_catalogue_alone():
    from tidemill.schemas.catalogue import Topic

    dotted = {topic.value for topic in Topic if "." in topic.value}
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        strings = {n.value for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant)}
        named = {s for s in strings if isinstance(s, str) and s.removeprefix("tidemill.") in dotted}
        assert not named or path.name == "catalogue.py", f"{path}: {named}"
