"""`_core.pyi` says what the module has, and nothing else."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvburst import _core

# What pybind11 gives every class, and Python every module and exception.
IMPLIED = {"__module__", "__doc__", "__weakref__", "__init__"}

Signature = tuple[list[str], list[str], list[str]]
"""Names of the parameters, of those that are keyword-only, of those that have a default."""


@dataclass(frozen=True)
class StubClass:
    bases: list[str]
    attributes: set[str]
    methods: dict[str, list[Signature]]


def stub() -> ast.Module:
    assert _core.__file__ is not None
    return ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())


def signature(function: ast.FunctionDef) -> Signature:
    given = function.args
    positional = [each.arg for each in given.posonlyargs + given.args]
    keyword = [each.arg for each in given.kwonlyargs]
    optional = positional[len(positional) - len(given.defaults) :] if given.defaults else []
    optional += [
        name
        for name, default in zip(keyword, given.kw_defaults, strict=True)
        if default is not None
    ]
    return positional + keyword, keyword, optional


def read_class(node: ast.ClassDef) -> StubClass:
    attributes: set[str] = set()
    methods: dict[str, list[Signature]] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            attributes.add(ast.unparse(item.target))
        elif isinstance(item, ast.FunctionDef):
            if any(ast.unparse(decorator) == "property" for decorator in item.decorator_list):
                attributes.add(item.name)
            else:
                methods.setdefault(item.name, []).append(signature(item))
    return StubClass([ast.unparse(base) for base in node.bases], attributes, methods)


STUB = stub()
CLASSES = {node.name: read_class(node) for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {
    node.name: [signature(node)] for node in STUB.body if isinstance(node, ast.FunctionDef)
}
CONSTANTS = {ast.unparse(node.target) for node in STUB.body if isinstance(node, ast.AnnAssign)}


def signatures_in(docstring: str, name: str) -> Iterator[Signature]:
    """What pybind11 writes at the head of a docstring: one line, or one for each overload."""
    for line in docstring.splitlines():
        found = re.match(rf"(?:\d+\. )?{name}(\(.*\) -> .*)$", line)
        if found:
            # A default that is an object has no Python form.
            source = re.sub(r"<[^<>]* object at 0x[0-9a-f]+>", "...", found[1])
            head = re.sub(r"kvburst::(\w+)", r"\1", source)
            (function,) = ast.parse(f"def {name}{head}: ...").body
            assert isinstance(function, ast.FunctionDef)
            yield signature(function)


def test_stub_names_everything_that_the_module_has_and_nothing_else() -> None:
    public = {name for name in dir(_core) if not name.startswith("_")} | {"__version__"}
    assert set(CLASSES) | set(FUNCTIONS) | CONSTANTS == public


@pytest.mark.parametrize("name", CLASSES)
def test_class_has_the_bases_attributes_and_methods_of_its_stub(name: str) -> None:
    real, described = getattr(_core, name), CLASSES[name]
    bases = [base.__name__ for base in real.__bases__]
    assert (bases if bases not in (["object"], ["pybind11_object"]) else []) == described.bases

    has = {
        member for member in vars(real) if member not in IMPLIED and not member.startswith("_pyb")
    }
    attributes = {member for member in has if inspect.isdatadescriptor(vars(real)[member])}
    assert described.attributes == attributes
    assert set(described.methods) - {"__init__"} == has - attributes


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_the_parameters_of_their_stub(name: str) -> None:
    real, described = getattr(_core, name), CLASSES[name]
    if "__init__" not in described.methods and not issubclass(real, Exception):
        with pytest.raises(TypeError, match="No constructor defined"):
            real()
    for method, expected in described.methods.items():
        if method == "__exit__":  # takes anything
            continue
        assert list(signatures_in(getattr(real, method).__doc__, method)) == expected, method


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_parameters_of_their_stub(name: str) -> None:
    assert list(signatures_in(getattr(_core, name).__doc__, name)) == FUNCTIONS[name]
