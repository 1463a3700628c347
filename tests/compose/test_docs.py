"""The commands, options, settings, queries, topics, classes and files that README.md and docs/ name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import CliRunner, Result

from tidemill.compose.cli import app
from tidemill.compose.config import TidemillSettings
from tidemill.schemas.catalogue import Topic

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "kernels", "producers", "streams", "trainer", "consumers", "compose")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app)
SETTINGS = TidemillSettings.model_fields


def spans(text: str) -> Iterator[str]:
    """Yield the lines of code blocks without a language, and the code in running text."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    yield from (line for block in blocks for line in block.splitlines())
    running = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running))


def commands(text: str) -> list[str]:
    """Return the calls of `tidemill` on a page, without shell syntax and notes for the reader."""
    calls = (re.match(r"(?:\.venv/bin/)?tidemill ([a-z-].*)", span) for span in spans(text))
    return [re.split(r" +#", call[1])[0].strip() for call in calls if call]


def fault(command: str) -> str:
    """Return why a call of `tidemill` is invalid, or an empty text. `up|down` means one call for each."""
    words = shlex.split(command.replace(" [", " ").replace("]", ""))
    found: list[tuple[Any, list[str]]] = [(COMMANDS, words)]
    while found:
        command_or_group, words = found.pop()
        inner = getattr(command_or_group, "commands", {})
        if inner and words and not words[0].startswith("-"):
            for name in words[0].split("|"):
                if name not in inner:
                    return f"no command {name!r}"
                found.append((inner[name], words[1:]))
            continue
        known = {name for parameter in command_or_group.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in {*known, "--help"}]
        if unknown:
            return f"no option {', '.join(unknown)}"
        for setting in (words[place + 1] for place, word in enumerate(words) if word == "--set"):
            if not setting.isupper() and not is_setting(setting.partition("=")[0]):
                return f"no setting {setting}"
    return ""


def is_setting(name: str) -> bool:
    """Whether a dotted name is a key of the configuration, or of a section of a section."""
    model = TidemillSettings
    # Every role with a server has an `http` section.
    for part in (f"gateway.{name}" if name.startswith("http.") else name).split("."):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return False
        model = fields[part].annotation
    return True


def defined() -> set[str]:
    """Return every class of the source, and each of its attributes and methods as `Class.name`."""
    names: set[str] = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            if not isinstance(node, ast.ClassDef):
                continue
            names.add(node.name)
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", part)]
                for target in targets:
                    names.add(f"{node.name}.{getattr(target, 'id', getattr(target, 'name', ''))}")
    return names


def leaves(command: Any, *name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands, each with its name."""
    for part, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, *name, part)
    if not hasattr(command, "commands"):
        yield " ".join(name), command


EVERY_COMMAND = dict(leaves(COMMANDS))
ROLES = {"feed", "rollout", "route", "gateway", "documents", "stream", "train", "serve", "sink"}
"""Commands whose only relevant option is `--config`: they have no example, and print nothing."""
ONE_FORM = {"view", "gate run", "dead-letters show", "dead-letters transform"}
"""Commands that run until they are stopped, and commands that print only JSON."""


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(COMMANDS, list(arguments))


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_command_explains_itself(name: str):
    shown = asked(*name.split(), "--help")
    assert shown.exit_code == 0 and "Usage" in shown.output
    assert ("Example" in shown.output) == (name not in ROLES)
    flags = {flag: part for part in EVERY_COMMAND[name].params for flag in {"--json", "--csv"}.intersection(part.opts)}
    assert ("--json" in flags) == (name not in ROLES | ONE_FORM)
    assert len(flags) < 2 or all(part.callback for part in flags.values()), "each looks for the other one"


@pytest.mark.parametrize("flags", [["--json", "--csv"], ["--csv", "--json"]], ids=" ".join)
def test_the_two_forms_exclude_each_other(flags: list[str]):
    refused = asked("query", *flags)
    assert refused.exit_code == 2 and "give one of --json and --csv" in refused.output


def test_every_page_exists():
    assert {page.name for page in PAGES} >= {"README.md", "extend.md", "glossary.md", "limits.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_its_options_exist(page: Path):
    faults = {command: found for command in commands(page.read_text("utf-8")) if (found := fault(command))}
    assert not faults


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("weights log --last 3", ""),
        ("weights lgo", "no command 'lgo'"),
        ("gate run|status|vetoo", "no command 'vetoo'"),
        ("weights log --lsat 3", "no option --lsat"),
        ("train --set trainer.online.enabled=true", ""),
        ("train --set trainer.online.enable=true", "no setting trainer.online.enable=true"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, found: str):
    assert fault(command) == found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_exists(page: Path):
    named = {
        span for span in spans(page.read_text("utf-8")) if re.fullmatch(rf"({'|'.join(FOLDERS)}|tests|docs)/\S*", span)
    }
    linked = set(re.findall(r"\w\]\((?!http)([\w./-]+)", page.read_text("utf-8")))
    assert not [path for path in named if not list(ROOT.glob(path.rstrip("/")))]
    assert not [path for path in linked if not (page.parent / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page: Path):
    named = {
        span
        for span in spans(page.read_text("utf-8"))
        if re.fullmatch(rf"({'|'.join(SETTINGS)}|http)(\.[a-z_]+)+", span)
    }
    topics = {topic.value for topic in Topic}
    assert not sorted(name for name in named - topics if not is_setting(name) and not name.endswith((".md", ".py")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_exists(page: Path):
    named = {span for span in spans(page.read_text("utf-8")) if re.fullmatch(r"tidemill(\.\w+)+", span)}
    named -= {"tidemill.toml", "tidemill.environments"}  # a file, and a group of entry points
    places = {name: ROOT.joinpath(*name.split(".")[1:]) for name in named}
    assert not [name for name, place in places.items() if not place.is_dir() and not place.with_suffix(".py").exists()]


def test_each_term_of_the_glossary_has_its_name_in_the_code():
    rows = re.findall(
        r"^\| (?!term|---)(.+?) \| (.+) \| (.+?) \|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE
    )
    terms, classes, topics = [term for term, *_ in rows], defined(), {topic.value for topic in Topic}
    assert len(terms) > 60 and len(set(terms)) == len(terms)
    for term, meaning, names in rows:
        assert meaning.endswith("."), term
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", names), term
        for name in re.findall(r"`([^`]+)`", names):
            if "/" in name:
                assert (ROOT / name).exists(), name
            elif name not in topics and name not in classes and not is_setting(name):
                assert not fault(name.removeprefix("tidemill ")), f"{term}: {name}"
