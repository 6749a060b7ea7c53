"""The check of what the plugin hooks, against stand-ins for SGLang's functions."""

from typing import Any, NamedTuple

from kvburst.sglang_plugin.targets import VERSIONS, Target, problems, version_problem


class Engine:
    def submit(self, transfers: list[int], *, layers: int, start: object = None) -> None: ...


class Transfer(NamedTuple):
    host: int
    draft: bool = False


SUBMIT = Target("engine.Engine.submit", "self, transfers, *, layers, start=")
TRANSFER = Target("engine.Transfer", "host, draft=")
THERE = {SUBMIT.path: Engine.submit, TRANSFER.path: Transfer}


def resolve(path: str) -> Any:
    if path not in THERE:
        raise AttributeError(f"no {path}")
    return THERE[path]


def test_targets_as_expected_are_no_problem() -> None:
    assert problems([SUBMIT, TRANSFER], resolve) == []


def test_a_renamed_target_is_named() -> None:
    (problem,) = problems([SUBMIT, Target("engine.Engine.send", "self")], resolve)
    assert problem == "engine.Engine.send is not there (no engine.Engine.send)"


def test_a_changed_signature_is_named_with_both() -> None:
    (problem,) = problems([Target(SUBMIT.path, "self, transfers, *, layers"), TRANSFER], resolve)
    assert problem == (
        "engine.Engine.submit takes (self, transfers, *, layers, start=),"
        " expected (self, transfers, *, layers)"
    )


def test_a_module_that_is_not_there_is_named() -> None:
    (problem,) = problems([Target("no_such_package.module.f", "x")])
    assert problem.startswith("no_such_package.module.f is not there")


def test_another_version_is_refused() -> None:
    assert version_problem(VERSIONS[0]) is None
    problem = version_problem("0.5.24")
    assert problem is not None
    assert "0.5.24" in problem
    assert VERSIONS[0] in problem
