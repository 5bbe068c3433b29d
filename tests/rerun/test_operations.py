"""The operation that made the first difference: two logs of operations, with one letter per digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runlab.rerun.operations import LoggedOperation, cause_of
from runlab.rerun.zoom_report import Zoom, report

Log = list[LoggedOperation]


def op(name: str, inputs: str, outputs: str, arguments: str = "t: f32[2]") -> LoggedOperation:
    source = [f"runlab/x.py:1 in f: {name}"]
    return LoggedOperation(f"aten.{name}", arguments, list(inputs), list(outputs), source, [])


def made(a: Log, b: Log) -> tuple[Any, ...]:
    """The kind, the operations of a and b, and how many before agree."""
    cause = cause_of(a, b, "step 1")
    names = [each and each.operation.removeprefix("aten.").split(".")[0] for each in (cause.a, cause.b)]
    return cause.kind, *names, cause.agreeing


BEFORE = [op("t.default", "w", "v"), op("tanh.default", "x", "y")]
PRODUCT = op("mul.Tensor", "vm", "u")


def test_the_first_operation_with_equal_inputs_and_other_results_is_the_cause() -> None:
    a = [*BEFORE, op("addmm.default", "vy", "p"), op("exp.default", "p", "q"), op("log.default", "y", "l")]
    b = [*BEFORE, op("addmm.default", "vy", "P"), op("exp.default", "P", "Q"), op("log.default", "y", "L")]
    assert made(a, b) == ("computed", "addmm", "addmm", 2)
    assert made(a, a) == ("outside", None, None, 5)
    # Also behind one that only saw a difference, which is not blamed for it.
    first = [[op("neg.default", x, y)] for x, y in ("zZ", "oO")]
    assert made(first[0] + a, first[1] + b) == ("computed", "addmm", "addmm", 2)
    assert made([*BEFORE, *first[0]], [*BEFORE, *first[1], PRODUCT]) == ("outside", "neg", "neg", 2)


def test_tensors_of_other_shapes_are_told_apart_from_other_numbers() -> None:
    for texts, kind in (
        (("t: f32[8], 0", "t: f32[8, 3], 0"), "other tensors"),
        (("t: f32[8], 0.91", "t: f32[8], 0.93"), "outside"),
    ):
        a, b = ([*BEFORE, op("mul.Tensor", x, x.upper(), text)] for x, text in zip("vw", texts, strict=True))
        assert made(a, b) == (kind, "mul", "mul", 2)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("mul.Tensor", ("t, 0.9", "t, 0.8"), "arguments"),
        ("randn.generator", ("[2], g", "[2], g"), "drawn"),
        ("empty.memory_format", ("[2]", "[2]"), "outside"),  # memory that was never written
    ],
)
def test_other_arguments_and_draws_are_told_apart(name: str, arguments: tuple[str, str], kind: str) -> None:
    a, b = ([*BEFORE, op(name, "", out, text)] for out, text in zip("zZ", arguments, strict=True))
    assert made(a, b)[0] == kind


def test_other_operations_are_named_where_they_begin_with_the_lines_of_both() -> None:
    a, b = [*BEFORE, PRODUCT], [*BEFORE, op("mm.default", "vy", "p"), op("add.Tensor", "p", "u")]
    assert made(a, b) == ("other operations", "mul", "mm", 2)
    assert made(BEFORE, b) == ("other operations", None, "mm", 2)
    # A cause before that is still the cause.
    assert made(a, [BEFORE[0], op("tanh.default", "x", "Y"), *b[2:]]) == ("computed", "tanh", "tanh", 1)
    other = replace(op("add.Tensor", "vr", "d"), source=["runlab/y.py:2 in g: d"])
    text = report(Zoom("1" * 40, "2" * 40, None, 0, finding=cause_of([PRODUCT], [other], "step 1")))
    assert "    in a  runlab/x.py:1 in f: mul.Tensor\n    in b  runlab/y.py:2 in g: d" in text
