"""The operation that made the first difference: two logs of operations, with one letter per digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rltemplate.rerun import zoom_report
from rltemplate.rerun.operations import Finding, LoggedOperation, Operation, how_made, made_by_other_code
from rltemplate.rerun.zoom_report import Zoom, report

Log = list[LoggedOperation]


def op(name: str, inputs: str, outputs: str, arguments: str = "t: f32[2]") -> LoggedOperation:
    source = [f"rltemplate/x.py:1 in f: {name}"]
    return LoggedOperation(f"aten.{name}", arguments, list(inputs), list(outputs), source, [])


def text_of(finding: Finding | None) -> str:
    return report(Zoom(None, None, None, 0, finding=finding))


def made(a: Log, b: Log, *limits: int) -> tuple[Any, ...]:
    found: Finding = how_made(a, b, limits or (len(a), len(b)), "step 1")
    name = None if found.operation is None else found.operation.name.removeprefix("aten.")
    return found.kind, name, found.agreeing


BEFORE = [op("t.default", "w", "v"), op("tanh.default", "x", "y")]


def test_the_first_operation_with_equal_inputs_and_other_results_is_the_cause() -> None:
    a = [*BEFORE, op("addmm.default", "vy", "p"), op("exp.default", "p", "q"), op("log.default", "y", "l")]
    b = [*BEFORE, op("addmm.default", "vy", "P"), op("exp.default", "P", "Q"), op("log.default", "y", "L")]
    assert made(a, b) == ("computed", "addmm.default", 2)
    # Not if it ran after the item was there.
    assert made(a, b, 2, 2) == ("outside", "exp.default", 2)
    assert made(a, a) == ("outside", None, 5)


def test_other_arguments_and_draws_are_told_apart() -> None:
    def pair(name: str, *arguments: str) -> tuple[Any, ...]:
        a, b = ([*BEFORE, op(name, "y", out, text)] for out, text in zip("zZ", arguments, strict=True))
        return made(a, b)

    assert pair("mul.Tensor", "t, 0.9", "t, 0.8") == ("arguments", "mul.Tensor", 2)
    assert pair("mul.Tensor", "t, 0.9", "t, 0.9") == ("computed", "mul.Tensor", 2)
    assert pair("randn.generator", "[2], g", "[2], g") == ("drawn", "randn.generator", 2)
    assert pair("normal_.default", "[2], g", "[3], g") == ("arguments", "normal_.default", 2)


def test_a_difference_that_was_there_before_is_not_blamed_on_who_saw_it() -> None:
    a = [*BEFORE, op("select.int", "m", "n"), op("add.Tensor", "n", "o")]
    b = [*BEFORE, op("select.int", "M", "N"), op("add.Tensor", "N", "O")]
    assert made(a, b) == ("outside", "add.Tensor", 2)


def test_memory_that_was_never_written_is_no_difference() -> None:
    a = [op("empty.memory_format", "", "g"), op("copy_.default", "gx", "x"), *BEFORE]
    b = [op("empty.memory_format", "", "G"), op("copy_.default", "Gx", "x"), *BEFORE]
    assert made(a, b) == ("outside", None, 4)
    assert made([op("zeros.default", "", "g")], [op("zeros.default", "", "G")])[0] == "computed"


def by_other_code(a: Log, b: Log, *limits: int) -> tuple[Any, ...]:
    """What a did, what b did, and how many operations before are in both; or nothing."""
    found = made_by_other_code(a, b, limits or (len(a), len(b)), "step 1")
    if found is None:
        return ()
    assert found.operation is not None
    names = [found.operation.name, found.other_name]
    if found.operation.arguments_a is None:
        names = [None, found.operation.name]
    return (*(name and name.removeprefix("aten.").partition(".")[0] for name in names), found.agreeing)


def test_other_code_is_found_where_it_first_makes_other_numbers() -> None:
    end = op("add.Tensor", "vr", "d")
    a = [*BEFORE, op("mul.Tensor", "vm", "u"), op("add.Tensor", "ur", "e")]
    b = [*BEFORE, end]
    assert by_other_code(a, b) == ("mul", "add", 2)
    assert by_other_code(b, a) == ("add", "mul", 2)
    # The same, behind lines that were only written in another way: k is another number on the way to v.
    other_way = [op("neg.default", "w", "k"), op("t.default", "k", "v"), op("tanh.default", "x", "y")]
    assert by_other_code([*other_way, *a[2:]], b) == ("mul", "add", 2)
    # Not if that comes to nothing at all, nor behind the item.
    assert by_other_code([*other_way, end], b) == ()
    assert by_other_code([*BEFORE, end, op("mul.Tensor", "dm", "u")], b, 3, 3) == ()


@pytest.mark.parametrize("taking", ["unbind.int", "select.int"])
def test_a_mask_that_was_dropped_is_found_where_it_was_applied(taking: str) -> None:
    """Its rows are ones and zeros, which both runs have; they stand in other places."""

    def log(made: str, mask: str, rows: str) -> Log:
        parts = [op(taking, mask, rows, f"t: {mask}")]
        if taking == "select.int":
            parts = [op(taking, mask, row, f"t, {place}") for place, row in enumerate(rows)]
        results = ["z" if row == "z" else str(place) for place, row in enumerate(rows)]
        sums = [op("mul.Tensor", f"{row}y", to) for row, to in zip(rows, results, strict=True)]
        end = op("add.Tensor", "".join(results), made)
        return [*BEFORE, op("zeros.default", "", "z"), op("mul.Tensor", "vm", mask), *parts, *sums, end]

    with_mask, without = log("r", "k", "ozo"), log("R", "K", "ooo")
    assert by_other_code(with_mask, without) == ("mul", "mul", 3)
    # Not if the rows stand where they stood.
    assert by_other_code(log("r", "k", "ozo"), log("r", "k", "ozo")) == ()


def test_other_code_need_not_have_anything_in_its_place() -> None:
    longer = [*BEFORE, op("sub.Tensor", "vy", "n")]
    assert by_other_code(longer, BEFORE) == ("sub", None, 2)
    assert by_other_code(BEFORE, longer) == (None, "sub", 2)
    for logs, words in [
        ((longer, BEFORE), "a went on with aten.sub.Tensor, b with nothing like it"),
        ((BEFORE, longer), "a went on with nothing like it, b with aten.sub.Tensor"),
    ]:
        finding = made_by_other_code(*logs, [len(log) for log in logs], "step 1")
        assert words in " ".join(text_of(finding).split())


def test_numbers_that_differed_before_are_not_blamed_on_code() -> None:
    a, b = ([*BEFORE, op("add.Tensor", f"y{m}", out)] for m, out in ("mo", "MO"))
    assert by_other_code(a, b) == ()
    # Nor is memory that nobody has written.
    a, b = ([op("empty.memory_format", "", m), *BEFORE] for m in "gG")
    assert by_other_code(a, b) == ()


def test_each_kind_of_finding_has_its_words() -> None:
    operation, texts = Operation("aten.mul", "x", "y", [], []), set()
    for kind in zoom_report._CAUSES:
        texts.add(text_of(Finding(kind, 3, operation, "aten.add", "step 1")))
        assert text_of(Finding(kind))
    assert len(texts) == len(zoom_report._CAUSES) == 8
    assert "made by aten.mul: equal inputs, other results" in "".join(texts)


def test_lines_of_both_are_shown_where_they_differ() -> None:
    a = op("mul.Tensor", "vm", "u")
    b = replace(op("add.Tensor", "vr", "d"), source=["rltemplate/y.py:2 in g: d"])
    text = text_of(made_by_other_code([*BEFORE, a], [*BEFORE, b], (3, 3), "step 1"))
    assert "    in a  rltemplate/x.py:1 in f: mul.Tensor\n    in b  rltemplate/y.py:2 in g: d" in text
    text = text_of(how_made([*BEFORE, a], [*BEFORE, replace(a, outputs=["U"])], (3, 3), "x"))
    assert text.count("    in  rltemplate/x.py:1 in f: mul.Tensor") == text.count("x.py") == 1


def test_other_operations_are_reported_where_they_begin() -> None:
    other = [*BEFORE, op("mm.default", "vy", "p"), op("add.Tensor", "p", "q")]
    a = [*BEFORE, op("addmm.default", "vy", "q")]
    found = how_made(a, other, (3, 4), "step 1")
    assert (found.kind, found.agreeing, found.other_name) == ("other operations", 2, "aten.mm.default")
    assert found.operation is not None
    assert found.operation.name == "aten.addmm.default"
    # One goes on where the other has the item already; afterwards they may do what they want.
    assert made(BEFORE, other, 2, 4) == ("other operations", "mm.default", 2)
    assert made(other, BEFORE, 4, 2) == ("other operations", "mm.default", 2)
    assert made(a, other, 2, 2) == ("outside", None, 2)
    # A cause before that is still the cause.
    changed = [BEFORE[0], op("tanh.default", "x", "Y"), *other[2:]]
    assert made(a, changed) == ("computed", "tanh.default", 1)
