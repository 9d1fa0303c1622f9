"""Failing plug-ins are named on use and do not affect others."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from harness.base import paths
from harness.base.errors import UserError
from harness.plugins import registry

MODULE = """
class Searcher:
    def ask(self, n):
        return []

    def tell(self, observation):
        pass

class Broken(Searcher):
    def __init__(self, size=1):
        self.size = size + len(None)

class Choosy(Searcher):
    def __init__(self, size=1):
        if size < 1:
            raise ValueError(f"size is at least 1, but got {size}")
        self.size = size

class KeywordFree(Searcher):
    def __init__(self, first, /):
        self.first = first

class Other:
    pass

def function():
    return Searcher()

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of plug-ins and give its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def refused(*arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        registry.create_plugin(*arguments)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('no licence')", "cannot be loaded: RuntimeError: no licence"),
        ("def broken(:", "cannot be loaded: SyntaxError: "),
        ("import not_installed_anywhere", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("", "cannot be loaded: AttributeError: module 'plug_bad' has no attribute 'Thing'"),
    ],
)
def test_import_errors_name_the_plugin(module, text, expected):
    name = module("plug_bad", text)
    assert expected in refused("searcher", f"{name}:Thing", {})


def test_missing_modules_differ_from_modules_with_missing_imports(module):
    where = "modules are looked up among installed packages"
    assert where in refused("searcher", "plug_nowhere:Thing", {})
    assert where not in refused("searcher", f"{module('plug_bad', 'import not_installed_anywhere')}:Thing", {})


def test_part_of_another_program_is_refused_with_what_to_do():
    """Of a results folder of `qdq.autotune`, whose objects other commands cannot load, even if they are trusted."""
    said = refused("evaluator", "__main__:gone", {})
    assert "part of a Python program" in said
    assert "module:gone" in said


def test_wrong_parameters_differ_from_failing_constructors(module):
    name = module("plug_some", MODULE)
    assert "has no parameter 'sizes'; did you mean 'size'" in refused("searcher", f"{name}:Choosy", {"sizes": 1})
    assert refused("searcher", f"{name}:Choosy", {"size": 0}).endswith("size is at least 1, but got 0")
    assert "failed in its constructor: TypeError: object of type 'NoneType'" in refused(
        "searcher", f"{name}:Broken", {}
    )
    assert "needs the parameter 'space'" in refused("searcher", "random", {"seed": 1})
    assert "positional-only" in refused("searcher", f"{name}:KeywordFree", {"first": 1})


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("NUMBER", "is no class, but int"),
        ("function", "is no class, but function"),
        ("Other", "has no ask(), but needs ask() and tell()"),
    ],
)
def test_module_attribute_must_be_class_of_contract(module, attribute, expected):
    assert expected in refused("searcher", f"{module('plug_some', MODULE)}:{attribute}", {})


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("searcher", "os:system"),
        ("benchmarker", "subprocess:Popen"),
        ("evaluator", "os:system"),
        ("preprocessing", "builtins:exec"),
        ("decoder", "subprocess:run"),
        ("decoder", "os:system"),
        ("function", "os:system"),
    ],
)
def test_no_other_callable_is_a_plug_in_even_if_plug_ins_are_trusted(kind, use):
    with pytest.raises(UserError, match=f"{kind} '{use}'"):
        registry.load_plugin(kind, use)


def test_a_module_is_not_imported_unless_it_is_trusted(module, monkeypatch):
    name = module("plug_evil", "raise SystemExit('it ran')")
    monkeypatch.delenv(paths.TRUST_VARIABLE)
    assert "--trust-plugins" in refused("searcher", f"{name}:Thing", {})
    assert name not in sys.modules
    assert registry.load_plugin("searcher", "random").__name__ == "RandomSearcher"


@pytest.mark.parametrize(
    ("use", "params", "named"),
    [
        ("onnxruntime_web", {"node": "./evil.sh"}, "node"),
        ("onnxruntime_web", {"chromium": "folder/evil"}, "chromium"),
        ("onnxruntime_web", {"module_dir": "."}, "module_dir"),
        ("trtexec", {"path": "/tmp/evil"}, "path"),
        ("trtexec", {"plugins": ["evil.so"]}, "plugins"),
        ("trtexec", {"extra": ["--staticPlugins=evil.so"]}, "extra"),
        ("tensorrt", {"plugins": ["evil.so"]}, "plugins"),
        ("tensorrt", {"timing_cache_file": "../.bashrc"}, "timing_cache_file"),
    ],
)
def test_a_parameter_that_names_code_needs_trust(use, params, named, monkeypatch):
    monkeypatch.delenv(paths.TRUST_VARIABLE)
    assert f"benchmarker {use!r}: {named} would run code of {params[named]!r}" in refused("benchmarker", use, params)
    monkeypatch.setenv(paths.TRUST_VARIABLE, "1")
    registry.check_params("benchmarker", use, params)


@pytest.mark.parametrize(
    ("params", "place"),
    [
        ({"profiles": {"x": {"min": 3}}}, "profiles.x: the keys min"),
        ({"profiles": {"x": 3}}, "profiles.x: "),
        ({"plugins": ["a.so", 3]}, "plugins.1: "),
    ],
)
def test_a_wrong_value_inside_a_parameter_is_named_by_its_place(params, place):
    assert f"benchmarker 'tensorrt': {place}" in refused("benchmarker", "tensorrt", params)


def test_programs_on_path_need_no_trust(monkeypatch):
    monkeypatch.delenv(paths.TRUST_VARIABLE)
    registry.check_params("benchmarker", "onnxruntime_web", {"node": "node20", "chromium": "chromium"})
    registry.check_params("benchmarker", "trtexec", {"path": "trtexec"})


def test_names_of_two_distributions_are_rejected_only_on_use(monkeypatch):
    mine, theirs = (EntryPoint(name="twin", value=f"{module}:X", group="qdq.searchers") for module in ("a", "b"))
    monkeypatch.setattr(registry, "entry_points", lambda: EntryPoints([mine, theirs]))
    assert [plugin.name for plugin in registry.installed_plugins("searcher")] == ["twin", "twin"]
    assert "searcher 'twin' is offered by" in refused("searcher", "twin", {})
