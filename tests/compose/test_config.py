"""One configuration from file, environment and flags, in that order; unknown keys are refused."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tidemill.compose import options
from tidemill.compose.config import TidemillSettings, load_settings, merge, parse_assignments
from tidemill.schemas.log.access import SecurityError


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text, "utf-8")
    return path


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = file_with(tmp_path, '[run]\nrun_id = "file"\nseed = 1\nmax_steps = 1\n')
    monkeypatch.setenv("TIDEMILL_RUN__SEED", "2")
    monkeypatch.setenv("TIDEMILL_RUN__MAX_STEPS", "2")
    settings = load_settings(path, {"run": {"max_steps": "3"}})
    assert (settings.run.run_id, settings.run.seed, settings.run.max_steps) == ("file", 2, 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[run]\nunknown = 1\n", "run.unknown"),
        ("[unknown]\nx = 1\n", "unknown"),
        ("[run]\nseed = -1\n", "run.seed"),
        ('[kafka]\npartitions = "many"\n', "kafka.partitions"),
        ("[kafka]\npartitions = true\n", "kafka.partitions"),
        ("[kafka]\nstall_timeout_s = false\n", "kafka.stall_timeout_s"),
        ("[trainer.optimizer]\nlearning_rate = inf\n", "trainer.optimizer.learning_rate"),
        ("[run\n", "settings.toml"),
    ],
)
def test_the_wrong_setting_is_named(tmp_path: Path, text: str, named: str):
    with pytest.raises(ValueError, match=rf"(?s)configuration .*{re.escape(named)}"):
        load_settings(file_with(tmp_path, text))


def test_a_file_that_is_absent_or_not_utf8_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        load_settings(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes('[run]\nrun_id = "café"\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"configuration file .*latin\.toml: .*utf-8"):
        load_settings(tmp_path / "latin.toml")


def test_an_unknown_section_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEMILL_GATEWAY_PORT", "tcp://10.0.0.1:8090")  # as Kubernetes sets it for a service
    load_settings()
    monkeypatch.setenv("TIDEMILL_TRANIER__THREADS", "4")
    with pytest.raises(ValueError, match="TIDEMILL_TRANIER__THREADS: there is no section 'tranier'"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value", "closest"),
    [
        ("TIDEMILL_KAFKA_BOOTSTRAP", "kafka:9092", "TIDEMILL_KAFKA__BOOTSTRAP"),
        ("tidemill_run_id", "tuesday", "TIDEMILL_RUN__RUN_ID"),
        ("TIDEMILL_GATEWAY_PORT", "8090", "TIDEMILL_GATEWAY__PORT"),
        ("TIDEMILL_BOOTSTRAP", "kafka:9092", "TIDEMILL_KAFKA__BOOTSTRAP"),
        ("tidemill_topic_prefix", "other.", "TIDEMILL_KAFKA__TOPIC_PREFIX"),
    ],
)
def test_a_variable_without_the_delimiter_after_a_section_is_refused(
    variable: str, value: str, closest: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TIDEMILL_KERNELS", "cpu")  # no setting
    monkeypatch.setenv("TIDEMILL_GATEWAY_SERVICE_PORT_HTTP", "8090")  # as Kubernetes sets them for a service
    monkeypatch.setenv("TIDEMILL_GATEWAY_PORT_8090_TCP_ADDR", "10.0.0.1")
    load_settings()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}: no setting has this name; the closest is {closest}$"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "text"), [("TIDEMILL_KAFKA__CLIENT_OPTIONS", '{"a"'), ("TIDEMILL_KAFKA", "plain")]
)
def test_a_table_in_the_environment_that_is_no_json_is_named(variable: str, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEMILL_GATEWAY_PORT", "tcp://10.0.0.1:8090")
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"environment variable {variable}: a list or a table is written as JSON"):
        load_settings()


@pytest.mark.parametrize("text", ["", "x", "x=1", "a.=1", ".b=1", "a..b=1"])
def test_assignments_of_another_form_are_refused(text: str):
    with pytest.raises(ValueError, match="SECTION"):
        parse_assignments([text])


@pytest.mark.parametrize("key", ["rollout.replicas", "router.pools.stable", "router.pools.canary"])
def test_the_address_of_a_replica_names_its_protocol(key: str):
    load_settings(flags=parse_assignments([f'{key}=["http://replica:8000"]']))
    with pytest.raises(ValueError, match=rf"{key}\.0: .*https"):
        load_settings(flags=parse_assignments([f'{key}=["replica:8000"]']))


def test_a_list_is_set_as_json():
    tree = parse_assignments(['run.environments=[{"name": "ledger"}, {"name": "ledger", "label": "other"}]'])
    assert [entry.title for entry in load_settings(flags=tree).run.environments] == ["ledger", "other"]
    with pytest.raises(ValueError, match=r"run\.environments: the value begins like JSON, but cannot be read as JSON"):
        parse_assignments(["run.environments=[ledger"])


@given(st.dictionaries(st.text(max_size=3), st.integers()), st.dictionaries(st.text(max_size=3), st.integers()))
def test_merging_keeps_every_key_and_the_later_value(first: dict[str, int], second: dict[str, int]):
    assert merge({"s": dict(first)}, {"s": second}) == {"s": {**first, **second}}


def test_batch_invariance_is_set_for_replicas_and_trainer_at_once_or_for_one():
    both = load_settings(flags={"numerics": {"batch_invariant": True}})
    assert both.trainer.batch_invariant and both.replica.batch_invariant
    one = load_settings(flags={"replica": {"batch_invariant": True}})
    assert one.replica.batch_invariant and not one.trainer.batch_invariant
    assert both.trainer.arithmetic_hash() != one.trainer.arithmetic_hash()


def sections() -> list[type[BaseModel]]:
    return [type(value) for value in load_settings().__dict__.values()]


def test_every_field_is_documented_and_unknown_keys_are_refused_everywhere():
    for section in [TidemillSettings, *sections()]:
        assert section.model_config.get("extra") == "forbid", section
        documented = set[str]()
        # Fields may be of a base class.
        for kind in (kind for kind in section.__mro__ if kind.__module__.startswith("tidemill.")):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(definition, ast.ClassDef)
            documented |= {
                field.target.id
                for field, after in pairwise(definition.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            }  # fmt: skip
        assert not section.model_fields.keys() - documented, f"{section.__name__}: fields without a docstring"


def test_options_that_no_client_takes_are_named_also_for_the_local_stack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "local_bootstrap", lambda _: "127.0.0.1:9")
    with pytest.raises(SecurityError, match=r"kafka\.client_options cannot be used.*no\.such\.option"):
        options.with_local_log(TidemillSettings(kafka={"client_options": {"no.such.option": "1"}}))
