"""The claims of the README and docs/ that a test can check."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tidemill.consumers.sink.query import named_queries
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.catalogue import CATALOGUE, DAY_MS, FOREVER_MS

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE, EXTEND, OPERATE, RESEARCH = (
    (ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in ("architecture", "extend", "operate", "research")
)
FOLDERS = ("schemas", "kernels", "producers", "streams", "trainer", "consumers", "compose")
QUERIES = dict(
    re.findall(r"^\| `(\w+)` \| (.+?) \|$", RESEARCH.split("## Named queries")[1].split("## ")[0], re.MULTILINE)
)
BENCHES = sorted(
    path.name for path in (ROOT / "tests/bench").glob("*.py") if "ArgumentParser" in path.read_text("utf-8")
)
LISTENERS = {
    "producers/edge/router.py": "router",
    "producers/edge/gateway.py": "gateway",
    "producers/rollout/endpoint.py": "a local port of the worker",
    "consumers/sink/http_api.py": "sink",
    "consumers/view/app.py": "the page",
    "consumers/replica/role.py": "the replicas' HTTP",
}


def test_the_readme_is_one_page_that_says_where_to_go_next():
    assert len(README.splitlines()) <= 120
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == set(re.findall(r"\[docs/(\w+\.md)\]", README))


def test_every_query_is_listed_with_the_question_that_it_answers():
    assert named_queries() == QUERIES


def test_every_topic_is_listed_with_its_key_and_its_retention():
    rows = re.findall(r"^\| `([a-z.-]+)` \| (\w+) \| .+ \| (.+) \|$", ARCHITECTURE, re.MULTILINE)
    kept = {FOREVER_MS: "for ever"}
    assert {topic: (key, time) for topic, key, time in rows} == {
        spec.topic.value: (spec.key, kept.get(spec.retention_ms, f"{spec.retention_ms // DAY_MS} days"))
        for spec in CATALOGUE.values()
    }


def test_every_role_names_topics_of_the_catalogue():
    roles = re.findall(r"^\| [a-z ]+ \| `(tidemill [a-z ]+)` \| (.+) \| (.+) \| .+ \|$", ARCHITECTURE, re.MULTILINE)
    assert len(roles) == 12
    named = {name for _, *columns in roles for column in columns for name in re.findall(r"`([^`]+)`", column)}
    assert named <= {topic.value for topic in CATALOGUE}
    written = {name for *_, writes in roles for name in re.findall(r"`([^`]+)`", writes)}
    by_commands = set(re.findall(r"`([a-z.-]+)`", ARCHITECTURE.split("Other commands write too")[1].split("\n\n")[0]))
    assert {topic.value for topic in CATALOGUE} - by_commands <= written


def test_the_publisher_accepts_the_pages_example():
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", EXTEND, re.DOTALL) if "WeightPublisher" in block)
    exec(code.split("\nwith ")[0], {})  # the imports and the settings
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    for name in ("open", "publish"):
        own = [None] if name == "publish" else []
        found = [call for call in calls if getattr(call.func, "attr", "") == name]
        assert found
        for call in found:
            given = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(getattr(WeightPublisher, name)).bind(*own, *call.args, **given)


def test_every_extra_is_listed():
    listed = re.findall(r"^\| `?(\w+)`? \| .+ \|$", OPERATE.split("| extra |")[1].split("\n\n")[0], re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(listed) == {*extras, "none"} - {"all", "dev"}


def test_every_benchmark_is_named():
    named = set(re.findall(r"`(\w+\.py)`", OPERATE.split("## Measure it")[1]))
    assert named == set(BENCHES)


SCRIPTS = {
    "broken.py": "import tests.bench.synthetic\n",
    "without_vllm.py": """
import sys
assert "vllm" not in sys.modules
sys.modules["vllm"] = None
import tidemill.consumers.weights.builder, tidemill.consumers.weights.chain
""",
}
"""A script that cannot start, and one that imports what the commands `tidemill weights` use."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the output of each benchmark's `--help` and of `SCRIPTS`, run from another directory."""
    out = tmp_path_factory.mktemp("said")
    for name, source in SCRIPTS.items():
        (out / name).write_text(source, "utf-8")
    scripts = [*(str(out / name) for name in SCRIPTS), *(str(ROOT / "tests/bench" / script) for script in BENCHES)]
    program = ROOT / "tests/compose/forked_help.py"
    # On the path of the caller, the root would hide that a script does not find `tests` by itself.
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(entry).resolve() != ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, kept))}
    subprocess.run([sys.executable, str(program), str(out), *scripts], cwd=out, env=environment, check=True)
    return out


@pytest.mark.parametrize("script", BENCHES)
def test_every_bench_explains_itself_from_any_directory(script: str, said: Path):
    done = json.loads((said / f"{script}.json").read_text("utf-8"))
    assert done["status"] == 0 and done["out"].startswith(f"usage: {script}"), done["errors"]


def test_a_script_that_does_not_start_is_seen(said: Path):
    done = json.loads((said / "broken.py.json").read_text("utf-8"))
    assert done["status"] == 1 and "No module named 'tests'" in done["errors"]


def test_the_commands_for_weights_need_no_engine(said: Path):
    done = json.loads((said / "without_vllm.py.json").read_text("utf-8"))
    assert done["status"] == 0, done["errors"]


def test_every_listening_module_is_named():
    claim = " ".join(ARCHITECTURE.split("**The log is the truth.**")[1].split("- **")[0].split())
    found, listening = (
        set(),
        {"bind", "create_server", "start_server", "start_http_server", "TCPSite", "start_unix_server"},
    )
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        if not any(name in text for name in listening):
            continue
        calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        if listening & {getattr(call, "attr", getattr(call, "id", "")) for call in calls}:
            found.add(str(path.relative_to(ROOT)))
    # Except the module that binds for all of them, and the one that looks for free ports.
    assert found - {"schemas/http_connections.py", "compose/stack/process.py"} == set(LISTENERS)
    assert all(name in claim for name in LISTENERS.values())
