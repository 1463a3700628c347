"""Checks of the whole code base: lint, format, types, imports between folders, and unused names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

from tidemill.compose.cli import COMMANDS

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
COMMAND_MODULES = [f"compose.{module}" for _, modules, _ in COMMANDS.values() for module in modules.split()]
"""The modules that the command line imports when a command is called, and for its help."""
Trees = Mapping[str, ast.Module]
"""The parsed modules, by dotted name. A package's name ends in `.__init__`."""


@cache
def parsed() -> Trees:
    """Parse the whole source. Not done at import, since every process of a parallel run imports this module."""
    found: dict[str, ast.Module] = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = ".".join(("tidemill", *path.relative_to(ROOT).with_suffix("").parts))
        found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield all imports of a module, also those in functions; for `from a import b`, both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide which folder is meant"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str:
    """Return the most specific layer of a module. The module's name begins with its folder."""
    return max((layer for layer in MAY_IMPORT if f"{module}.".startswith(f"{layer}.")), key=len, default=module)


def forbidden(layer: str, tree: ast.Module) -> set[str]:
    """Return the layers that a module of `layer` imports but must not import."""
    ours = {layer_of(name.removeprefix("tidemill.")) for name in imports(tree) if name.startswith("tidemill.")}
    return ours - MAY_IMPORT[layer] - {layer}


def folder_of(module: str) -> str:
    """Return the folder of a module: `tidemill.a.b.c` and `tidemill.a.b.__init__` are in `a/b`."""
    return "/".join(module.split(".")[1:-1])


def circles(trees: Trees) -> set[tuple[str, ...]]:
    """Return groups of folders that import each other, directly or indirectly. A sub-folder counts as a folder."""
    modules = {name.removesuffix(".__init__"): folder_of(name) for name in trees}
    edges: dict[str, set[str]] = {folder: set() for folder in modules.values()}
    for name, tree in trees.items():
        edges[folder_of(name)] |= {modules[found] for found in imports(tree) if found in modules} - {folder_of(name)}
    reached = {folder: reach(edges, folder) for folder in edges}
    groups = ({other for other in found if folder in reached[other]} for folder, found in reached.items())
    return {tuple(sorted(group)) for group in groups if group}


def reach(edges: Mapping[str, Set[str]], start: str) -> set[str]:
    """Return the folders that a folder imports, directly or indirectly; itself only if it is in a circle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def twice(trees: Trees) -> set[str]:
    """Return the class names that have several definitions."""
    names = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the public functions, classes and values of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [] if node.decorator_list and not isinstance(node, ast.ClassDef) else [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def unused(trees: Trees, named_elsewhere: Set[str] = frozenset()) -> set[str]:
    """Return the public names, as `folder/module.py:name`, that are not read anywhere in the source.

    A name is read if the same name occurs as a variable, an attribute, an imported name or a word in a short string.
    A decorated function counts as used by its decorator.
    """
    read = set(named_elsewhere)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                read.add(node.id)
            elif isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                read.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.update(re.findall(r"\w+", node.value) if len(node.value) < 100 and "\n" not in node.value else ())
    return {
        f"{folder_of(module)}/{module.rsplit('.', 1)[1]}.py:{name}"
        for module, tree in trees.items()
        for name in public_names(tree)
        if name not in read
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
    # compose/main is listed twice: the namespace `tidemill` itself has a __main__.py.
    assert set(listed) == {name.rpartition(".")[0] for name in parsed()} | {"tidemill"}


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_import_rules(layer: str):
    trees = {name: tree for name, tree in parsed().items() if layer_of(name.removeprefix("tidemill.")) == layer}
    assert trees
    assert not {name: found for name, tree in trees.items() if (found := forbidden(layer, tree))}


@pytest.mark.parametrize(
    ("layer", "source", "found"),
    [
        ("producers", "from tidemill.trainer.step import x", {"trainer"}),
        ("trainer", "import tidemill.producers.outbox", {"producers"}),
        ("trainer", "from tidemill.kernels import delta", set()),
        ("trainer", "from tidemill.kernels.weights import anchor", set()),
        ("kernels.weights", "from tidemill.schemas import records, codec\nimport tidemill.kernels.delta", set()),
        ("kernels", "from tidemill.schemas.records import Manifest", {"schemas"}),
        ("kernels", "from tidemill.kernels.weights import anchor", {"kernels.weights"}),
        ("kernels", "from tidemill.kernels import weights", {"kernels.weights"}),
        ("kernels.weights", "import tidemill.consumers.replica.role", {"consumers"}),
        ("producers", "from tidemill.kernels.weights import anchor", {"kernels.weights"}),
    ],
)
def test_a_broken_import_rule_is_found(layer: str, source: str, found: set[str]):
    assert forbidden(layer, ast.parse(source)) == found


@pytest.mark.parametrize(
    ("absent", "modules"),
    [
        (
            ("torch", "transformers", "vllm", "faust", "chdb"),
            (*COMMAND_MODULES, "producers.rollout.worker", "producers.tasks.feeder", "producers.edge.router"),
        ),
        (("torch",), ("kernels.weights.publish",)),
        (("torch", "numpy"), ("producers.environments.serving",)),
    ],
)
def test_what_starts_often_does_not_load_what_takes_long(absent: tuple[str, ...], modules: tuple[str, ...]):
    program = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    program += "".join(f"import tidemill.{module}\n" for module in modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_topics_are_named_in_the_catalogue_alone():
    from tidemill.schemas.catalogue import Topic

    dotted = {topic.value for topic in Topic if "." in topic.value}
    for module, tree in parsed().items():
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        named = {s for s in strings if isinstance(s, str) and s.removeprefix("tidemill.") in dotted}
        assert not named or module == "tidemill.schemas.catalogue", f"{module}: {named}"


def test_no_folders_import_each_other():
    assert circles(parsed()) == set()


def test_a_circle_of_folders_is_found():
    made = {
        "tidemill.t.a": "import tidemill.t.s.b",
        "tidemill.t.s.b": "from tidemill.u import c",
        "tidemill.u.c": "def f():\n    from tidemill.t import d",
        "tidemill.t.d": "",
        "tidemill.v.e": "from tidemill.t import a",
    }
    assert circles({name: ast.parse(source) for name, source in made.items()}) == {("t", "t/s", "u")}
    del made["tidemill.u.c"]
    assert circles({name: ast.parse(source) for name, source in made.items()}) == set()


def test_no_two_classes_have_the_same_name():
    assert twice(parsed()) == set()


def test_two_classes_with_the_same_name_are_found():
    one, other = ast.parse("class A: ...\nclass B: ..."), ast.parse("def f():\n    class A: ...")
    assert twice({"tidemill.t.a": one, "tidemill.u.b": other}) == {"A"}


def test_no_public_name_is_unused():
    entry_points = set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text("utf-8")))
    assert unused(parsed(), entry_points) == set()


def test_an_unused_public_name_is_found():
    one = ast.parse(
        "A = 1\n_B = 2\ndef f(): return A\ndef g(): ...\n@command\ndef h(): ...\nclass C: ...\nclass D: ..."
    )
    other = ast.parse("from tidemill.t.a import f\nx = tidemill.t.a.C")
    assert unused({"tidemill.t.a": one, "tidemill.u.b": other}, {"D"}) == {"t/a.py:g", "u/b.py:x"}
