"""The measurements on small written modules, where each figure is known."""

from __future__ import annotations

from pathlib import Path

from tests.structure import measure
from tests.structure.call_path import shortest_chain
from tests.structure.duplicates import find_duplicates
from tests.structure.source_tree import Module, cycles, functions, import_graph, parameter_count


def module(name: str, source: str, *, package: bool = False) -> Module:
    path = name.replace(".", "/") + ("/__init__.py" if package else ".py")
    return Module(f"megatron_gspo.{name}", f"megatron_gspo/{path}", source)


def test_lines_of_code_are_without_comments_blank_lines_and_docstrings():
    begin = '"""Doc\nstring."""\n\n# comment\nx = (\n    1,  # why\n)\n\n'
    text = module("a", begin + 'def f():\n    """Doc."""\n    return x\n')
    assert text.length == 11
    assert text.code_lines == [5, 6, 7, 9, 11]


def test_a_method_s_self_is_no_parameter():
    source = "class A:\n def f(self, a, *b, c=1, **d): ...\n @staticmethod\n def g(a): ...\ndef h(a, /, b): ...\n"
    counts = {name: parameter_count(node, method) for name, node, method in functions(module("a", source))}
    assert counts == {"A.f": 4, "A.g": 1, "h": 2}


def test_a_cycle_of_late_imports_is_one_only_if_they_count():
    modules = [module("a", "from megatron_gspo.b import f"), module("b", "def f():\n from megatron_gspo.a import g")]
    assert cycles(import_graph(modules, late=False)) == []
    assert cycles(import_graph(modules, late=True)) == [["megatron_gspo.a", "megatron_gspo.b"]]


def test_a_relative_import_of_a_package_is_resolved():
    modules = [module("p", "from .a import f", package=True), module("p.a", "from . import b"), module("p.b", "")]
    assert import_graph(modules, late=False)["megatron_gspo.p"] == {"megatron_gspo.p.a"}
    assert import_graph(modules, late=False)["megatron_gspo.p.a"] == {"megatron_gspo.p.b"}


def test_the_chain_follows_calls_methods_and_functions_that_are_passed_on():
    modules = [
        module("train", "from megatron_gspo.a import Loop\ndef main():\n Loop().run()\ndef unused():\n pass\n"),
        module("a", "from functools import partial\nfrom megatron_gspo.p import loss\nclass Loop:\n"
               " def run(self):\n  self.step()\n def step(self):\n  call(partial(loss, 1))\ndef call(f):\n f()\n"),
        module("p", "from .b import loss", package=True),
        module("p.b", "def loss(x):\n return x\n"),
    ]  # fmt: skip
    chain = shortest_chain(modules, "megatron_gspo.train.main", "megatron_gspo.p.b.loss")
    assert [name.rpartition(".")[2] for name in chain] == ["main", "run", "step", "loss"]
    assert shortest_chain(modules, "megatron_gspo.train.unused", "megatron_gspo.p.b.loss") == []


def test_six_equal_lines_are_a_duplicate_and_five_are_not():
    six = "".join(f"x{number} = {number}\n" for number in range(6))
    inside = "".join(f"    {line}\n" for line in six.splitlines())
    [found] = find_duplicates([module("a", f"import os\n{six}"), module("b", f"def f():\n    # why\n{inside}")])
    assert (found.first, found.second, found.lines) == ("megatron_gspo/a.py:2", "megatron_gspo/b.py:3", 6)
    five = six.partition("\n")[2]
    assert find_duplicates([module("a", five), module("b", five)]) == []


def test_a_longer_duplicate_is_counted_once():
    text = "".join(f"x{number} = {number}\n" for number in range(20))
    assert [found.lines for found in find_duplicates([module("a", text), module("b", text)])] == [20]


def test_a_module_s_test_has_its_name_in_the_mirrored_folder():
    modules = [module("a.one", ""), module("a.two", ""), module("b.three", "")]
    paths = ("tests/a/test_one.py", "tests/a/test_two_limits.py", "tests/test_three.py")
    tests = [Module("", path, "") for path in paths]
    assert measure.untested(modules, tests) == ["megatron_gspo/b/three.py"]
    assert measure.untested(modules, tests, mirrored=False) == []


def test_the_bars_and_rules_of_a_table_are_no_words():
    table = "# Title\n\n| key | meaning |\n| --- | --- |\n| `a_b` | 2 x 3, or more |\n"
    assert measure.count_words(table) == 1 + 2 + 1 + 5


def test_a_file_name_in_two_folders_is_found():
    modules = [module("a.one", ""), module("b.one", ""), module("a", "", package=True), module("b", "", package=True)]
    assert measure.repeated_names(modules) == ["one.py: megatron_gspo/a, megatron_gspo/b"]


def test_an_import_against_the_layers_is_found(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_layers.py").write_text('LAYERS = (\n    "data",\n    "loop",\n)\n')
    up, down = "from megatron_gspo.loop import two", "import megatron_gspo.data.one"
    modules = [module("data.one", up), module("loop.two", down)]
    [found] = measure.layer_violations(tmp_path, modules)
    assert found == "megatron_gspo/data/one.py:1 imports megatron_gspo.loop.two"
