"""What is said of the scheduler's steps: in the log, and on a profiler's timeline."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvburst.sglang_plugin.ranges import new_ranges
from kvburst.sglang_plugin.steps import StepTimer


def test_steps_are_logged_every_so_many(caplog: pytest.LogCaptureFixture) -> None:
    timer = StepTimer(3)
    with caplog.at_level(logging.INFO, "kvburst"):
        for microseconds in (1, 2, 6, 10):
            timer.took(microseconds * 1000)
        assert caplog.messages == [
            "check_hicache_events: 3.0 us a step, 6.0 us the longest of 3 steps"
        ]
        for microseconds in (10, 10):
            timer.took(microseconds * 1000)
    assert caplog.messages[1:] == [
        "check_hicache_events: 10.0 us a step, 10.0 us the longest of 3 steps"
    ]


def test_steps_are_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    timer = StepTimer(0)
    with caplog.at_level(logging.INFO, "kvburst"):
        timer.took(1000)
    assert caplog.messages == []


@pytest.fixture
def annotated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that an nvtx package is told of, as if one were installed."""
    told: list[str] = []

    @contextmanager
    def annotate(name: str, *, domain: str) -> Iterator[None]:
        told.append(f"{domain}: {name}")
        yield
        told.append("end")

    spec = importlib.util.spec_from_loader("nvtx", loader=None)
    monkeypatch.setattr("kvburst.sglang_plugin.ranges.find_spec", lambda name: spec)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))  # type: ignore[misc]
    return told


def test_ranges_are_on_the_timeline_where_nvtx_and_cuda_are_there(
    annotated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with new_ranges()("submit a load"):
        assert annotated == ["kvburst: submit a load"]
    assert annotated == ["kvburst: submit a load", "end"]


def test_without_cuda_there_are_no_ranges(
    annotated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with new_ranges()("submit a load"):
        pass
    assert annotated == []
