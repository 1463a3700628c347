"""Environments by name: entry points, families, `module:object`; a failed load has a reason and affects no other."""

import asyncio
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from tidemill.producers.environments import find
from tidemill.producers.environments.base import Environment, EnvironmentOptions, TaskError, TaskQuery
from tidemill.producers.environments.find import (
    GROUP,
    EnvironmentListing,
    EnvironmentType,
    UnknownEnvironment,
    environment_type,
    is_foreign,
    listed,
    options_json,
)

MODULE = '''
"""An environment of a company."""
from tidemill.producers.environments.base import Environment, EnvironmentOptions
from tidemill.producers.environments.find import EnvironmentAdapter, EnvironmentListing
from tidemill.producers.environments.find import EnvironmentType, UnknownEnvironment

class SupportOptions(EnvironmentOptions):
    tickets: int = 3
    """Tickets of a task."""

class Support(Environment):
    """Answer tickets.

    At length."""
    options_model = SupportOptions
    isolation = "loop"
    def tasks(self, query): return iter(())
    async def play(self, task, policy): raise NotImplementedError

class Unfinished(Environment):
    def tasks(self, query): return iter(())

class Firms(EnvironmentAdapter):
    def members(self):
        yield EnvironmentListing("small", "A small one.")
        yield EnvironmentListing("big", "", "too big")
    def member(self, name):
        if name != "small":
            raise UnknownEnvironment(f"firms:{name} is not offered: too big")
        return EnvironmentType("firms:small", "A small one.", SupportOptions, "loop", False, Support)

class Absent(EnvironmentAdapter):
    def members(self):
        raise ImportError("no module named firms")
    def member(self, name):
        import no_such_library

support = Support(SupportOptions(tickets=5))
number = 7
'''


@pytest.fixture(autouse=True)
def company(tmp_path, monkeypatch):
    """Modules of a company, and the entry points that `install` names."""
    (tmp_path / "company_env.py").write_text(MODULE)
    (tmp_path / "company_broken.py").write_text("raise ZeroDivisionError('at import')")
    (tmp_path / "company_typo.py").write_text("def f(:\n")
    (tmp_path / "company_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "company_needs.py").write_text("import no_such_library")
    (tmp_path / "company_slip.py").write_text("None.upper()")
    monkeypatch.syspath_prepend(tmp_path)
    installed = []
    monkeypatch.setattr(find, "entry_points", lambda group: [point for point in installed if point.group == group])

    def install(**named):
        installed.extend(EntryPoint(name, value, GROUP) for name, value in named.items())
        find._entry_points.cache_clear()

    install()
    yield install
    find._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.startswith("company_")]:
        del sys.modules[name]


def refused(name):
    with pytest.raises(UnknownEnvironment) as raised:
        environment_type(name)
    return str(raised.value)


def test_an_entry_point_is_an_environment_as_a_class_or_an_instance(company):
    company(support="company_env:Support")
    kind = environment_type("support")
    assert (kind.name, kind.about, kind.isolation, kind.network) == ("support", "Answer tickets.", "loop", False)
    assert kind.open({"tickets": "4"}).options.tickets == 4
    assert options_json(kind.open({"tickets": 4}).options) == '{"tickets":4}' and options_json(kind.options({})) == "{}"
    company(one="company_env:support")
    assert environment_type("one").open({}).options.tickets == 5


def test_a_class_or_instance_of_any_module_is_an_environment():
    assert environment_type("company_env:Support").open({}).options.tickets == 3
    instance = environment_type("company_env:support")
    assert instance.open({}).options.tickets == 5 and instance.open({}) is instance.open({})
    with pytest.raises(
        TaskError, match=r"company_env:support: tickets: Extra inputs are not permitted; its options are none"
    ):
        instance.open({"tickets": 1})


def test_options_are_checked_by_name_and_type():
    kind = environment_type("company_env:Support")
    with pytest.raises(TaskError, match=r"company_env:Support: ticket: Extra inputs .*; its options are tickets"):
        kind.open({"ticket": 1})
    with pytest.raises(TaskError, match="tickets: Input should be a valid integer"):
        kind.open({"tickets": "many"})


def test_a_family_has_members(company):
    company(firms="company_env:Firms")
    assert environment_type("firms:small").open({}).options.tickets == 3
    assert refused("firms:big") == "firms:big is not offered: too big"
    for name in ("firms", "firms:"):
        assert refused(name) == f"{name} is a family: name a member, firms:NAME (`tidemill env list firms`)"


def test_a_family_without_its_library_names_the_extra(company):
    company(absent="company_env:Absent")
    assert refused("absent:x").startswith("absent:x: No module named 'no_such_library'; install tidemill[environments]")


def test_invalid_names_are_refused(company):
    company(support="company_env:Support")
    names = ("", ":", "x", "a b:c", "company_env:", ":Support", "company_env:Support:x", "../x:y", "support:x", "a:1")
    for name in names:
        assert refused(name) == f"unknown environment {name!r}: there are support, and any `package.module:object`"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("company_env:Nothing", "company_env:Nothing: module company_env has no Nothing"),
        ("company_env:number", "company_env:number is a int, not an Environment or an instance of one"),
        ("company_env:SupportOptions", "is a SupportOptions, not an Environment"),
        ("company_env:Firms", "is a Firms, not an Environment"),
        ("company_env:Unfinished", "company_env:Unfinished does not define play"),
        ("company_none:x", "module company_none does not import: ModuleNotFoundError("),
        ("company_broken:x", "module company_broken does not import: ZeroDivisionError('at import')"),
        ("company_typo:x", "module company_typo does not import: SyntaxError("),
        ("company_exit:x", "module company_exit does not import: SystemExit(3)"),
        ("company_slip:x", "module company_slip does not import: AttributeError("),
    ],
)
def test_an_object_that_cannot_be_loaded_has_a_reason(name, complaint):
    assert complaint in refused(name)
    assert environment_type("company_env:Support").open({})


def test_an_entry_point_that_cannot_be_loaded_has_a_reason(company):
    company(broken="company_broken:x", number="company_env:number", gone="company_env:Gone")
    assert refused("broken") == "broken: company_broken:x does not import: ZeroDivisionError('at import')"
    assert refused("number") == "number is a int, not an Environment or an instance of one"
    assert "gone: company_env:Gone does not import: AttributeError" in refused("gone")


def test_two_environments_with_one_name_are_refused(company):
    company(support="company_env:Support")
    company(support="company_env:support")
    complaint = (
        "two environments are named 'support': company_env:Support and company_env:support; uninstall one of them"
    )
    assert refused("support") == complaint
    with pytest.raises(UnknownEnvironment, match="two environments are named"):
        list(listed())


def test_an_environment_that_is_installed_twice_is_one(company):
    company(support="company_env:Support")
    company(support="company_env:Support")
    assert environment_type("support").open({})


def test_a_name_is_foreign_unless_it_is_installed(company):
    company(firms="company_env:Firms")
    assert is_foreign("company_env:Support") and is_foreign("a.b.c:d")
    assert not is_foreign("firms:small") and not is_foreign("firms") and not is_foreign("a.b.c")


def test_an_installed_name_takes_precedence_over_a_module(company):
    company(company_env="company_env:Firms")
    assert environment_type("company_env:small").name == "firms:small"
    assert "is not offered" in refused("company_env:Support")


def test_the_list_continues_after_entries_that_cannot_be_loaded(company):
    company(
        support="company_env:Support",
        firms="company_env:Firms",
        absent="company_env:Absent",
        broken="company_broken:x",
        needs="company_needs:x",
        ends="company_exit:x",
        number="company_env:number",
    )
    found = {each.name: each for each in listed()}
    assert list(found) == ["absent", "broken", "ends", "firms:small", "firms:big", "needs", "number", "support"]
    assert found["support"] == EnvironmentListing("support", "Answer tickets.")
    assert found["firms:small"] == EnvironmentListing("firms:small", "A small one.")
    assert found["firms:big"] == EnvironmentListing("firms:big", "", "too big")
    assert found["absent"].problem == "no module named firms; install tidemill[environments]"
    assert found["needs"].problem.endswith("; install tidemill[environments]")
    assert found["broken"].problem == "broken: company_broken:x does not import: ZeroDivisionError('at import')"
    assert found["ends"].problem == "ends: company_exit:x does not import: SystemExit(3)"
    assert found["number"].problem == "number is a int, not an Environment or an instance of one"
    assert [each.name for each in listed("firms")] == ["firms:small", "firms:big"] and not list(listed("none"))


@pytest.mark.parametrize(("name", "family"), [("reasoning_gym", "ReasoningGym"), ("textarena", "TextArena")])
def test_an_adapter_without_its_library_names_it(company, monkeypatch, name, family):
    company(**{name: f"tidemill.producers.environments.{name}:{family}"})
    for module in {name, *(each for each in sys.modules if each.startswith(f"{name}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    (only,) = listed()
    assert only.name == name and only.problem.endswith("install tidemill[environments]")
    assert "install tidemill[environments]" in refused(f"{name}:x")


def test_options_of_a_task_are_those_that_were_given():
    class Options(EnvironmentOptions):
        b: int = 1
        a: tuple[str, ...] = ()

    assert options_json(Options()) == "{}"
    assert options_json(Options(b=1, a=("x",))) == '{"a":["x"],"b":1}'


def test_the_installed_adapters_are_found_and_listed():
    """Runs in its own process, with the entry points of this installation."""
    script = (
        "from tidemill.producers.environments.find import environment_type, listed\n"
        "names = {each.name for each in listed() if not each.problem}\n"
        "assert {'ledger', 'reasoning_gym:gcd', 'textarena:Sudoku-v0', 'openenv:http://HOST:PORT'} <= names, names\n"
        "assert environment_type('reasoning_gym:chain_sum').name == 'reasoning_gym:chain_sum'\n"
        "assert environment_type('openenv:http://localhost:80').name == 'openenv:http://localhost:80'\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=300)


def test_a_conversation_that_an_environment_cannot_rescore_scores_as_not_finished():
    environment = environment_type("company_env:support").open({})
    assert isinstance(environment, Environment) and list(environment.tasks(TaskQuery(0))) == []
    score = asyncio.run(environment.cut_off(None, []))
    assert (
        score.total == 0.0
        and score.success is False
        and isinstance(environment_type("company_env:Support"), EnvironmentType)
    )
