"""The pages of docs/: their commands are run, or say why not, and no link of the site is broken."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from conftest import NAME, ROOT, RecordedRun, git, program, record, run

from runlab.__main__ import main
from runlab.config.cli.preflight import preflight
from runlab.errors import ConfigError

DOCS = ROOT / "docs"
FENCE = re.compile(r"(?:^(<!-- .* -->)\n)?^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
REASON = re.compile(r"<!-- not run: \S.* -->")
SLOW = {"film", "report"}
READS = {"compare", "diff", "evaluate", "runs", "stats"}  # which need no process of their own


def commands(text: str) -> Iterator[str]:
    """The commands of a page that are to be run; ValueError for a block without a language or a reason."""
    for marked, language, block in FENCE.findall(text):
        if not language:
            raise ValueError(f"a block without a language: {block}")
        if language == "sh" and not marked:
            yield from filter(None, block.replace("\\\n", " ").splitlines())
        elif language == "sh" and not REASON.fullmatch(marked):
            raise ValueError(f"{marked} gives no reason: {block}")


def cases() -> Iterator[ParameterSet]:
    """Each command of each page."""
    for page in sorted(DOCS.rglob("*.md")):
        for command in commands(page.read_text()):
            slow = SLOW & {*command.split()}
            yield pytest.param(command, marks=[pytest.mark.long] * bool(slow), id=f"{page.stem}: {command}")


@pytest.fixture(scope="module")
def project(recorded_run: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which the runs RUN and OTHER of the pages lie."""
    copy = Path(shutil.copytree(recorded_run.project, tmp_path_factory.mktemp("docs") / "project"))
    (copy / ".venv").symlink_to(sys.prefix)
    for name in record(recorded_run.run_dir)["id"], "OTHER":
        shutil.copytree(recorded_run.run_dir, copy / "runs" / "ppo-CartPole" / name)
    return copy


RunCommand = Callable[[str], None]


@pytest.fixture
def run_command(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCommand:
    """Run a command of a page in a copy of the project; of training, the words are checked only."""
    monkeypatch.chdir(project)

    def call(command: str) -> None:
        command = re.sub(r"\bRUN\b", record(project / "runs" / "ppo-CartPole" / "OTHER")["id"], command)
        words = [
            word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=(?!--)", word)
        ]
        if words[:2] == ["make", "train"] and not words[-1].startswith("ARGS="):
            assert preflight(words[2:]).configs
        elif words[0] == "make" and words[1] in READS and "zoom=true" not in words:
            assert main(words[1:]) == 0, capsys.readouterr().err
        elif words[0] == "make" and words[1] != "help":
            flags = [flag for word in words if word.startswith("ARGS=") for flag in shlex.split(word[5:])]
            args = [word for word in words[2:] if not word.startswith("ARGS=")]
            run(project, *program(project, words[1]), *args, *flags, status=0)
        else:
            run(project, "sh", "-c", command, status=0)

    return call


def run_page(page: str, run_command: RunCommand) -> None:
    for command in commands(page):
        run_command(command)


@pytest.mark.parametrize("command", [*cases()])
def test_a_command_of_the_pages_runs(command: str, run_command: RunCommand) -> None:
    run_command(command)


@pytest.mark.parametrize(
    ("page", "message"),
    {
        "```sh\nmake runs\nmake nonsense\n```": "nonsense",
        "```sh\nmake train algo=pop\n```": "did you mean ppo",
        "```sh\nmake runs colour=red\n```": "colour",
        "```\nmake runs\n```": "without a language",
        "<!-- later -->\n```sh\nmake runs\n```": "gives no reason",
    }.items(),
)
def test_a_page_with_a_mistake_is_refused(page: str, message: str, run_command: RunCommand) -> None:
    with pytest.raises((AssertionError, ConfigError, ValueError), match=re.escape(message)):
        run_page(page, run_command)


def accidents(page: str) -> list[str]:
    """Lines of prose that Markdown reads as a list, a heading or a quotation, because of their first word.

    Numbers of a list begin with 1; everything else follows an empty line, or a line of its kind.
    """
    accidental, numbers, before = [], dict[int, int](), ""
    for line in re.sub(r"^( *)```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL).splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        numbers = {at: number for at, number in numbers.items() if at <= indent or not text}
        if item := re.match(r"(\d+)[.)](?: |$)", text):
            if int(item[1]) not in [1] * (not before) + [numbers[at] + 1 for at in numbers if at == indent]:
                accidental.append(line)
            numbers[indent] = int(item[1])
        kind = re.match(r"#{1,6} |>|[-+] |[-+=]+$", text)
        if kind and before and not before.startswith((kind[0], "<!--")):
            accidental.append(line)
        before = text
    return accidental


def test_no_line_of_a_page_becomes_a_list_or_a_heading_by_accident() -> None:
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "*.md").splitlines()
    assert len(listed) > 20
    accidental = {name: accidents((ROOT / name).read_text()) for name in listed}
    assert {name: lines for name, lines in accidental.items() if lines} == {}
    wrapped = "* Seeds end between 245 and\n  {} The fifth\n  ends at 3.\n"
    for start in ("276.", "3)", "-", "+", "# 4:", "> 5", "2.", "1."):
        assert accidents(wrapped.format(start)) == [f"  {start} The fifth"]
    for start in ("276,", "-3", "#4", "*2*", "(1.)"):
        assert accidents(wrapped.format(start)) == []
    assert accidents("Text\n\n1. a\n   b\n\n   ```yaml\n   # c\n   - d\n   ```\n\n2. b\n\n# c\n") == []


def test_items_of_the_trace_that_a_page_explains_are_fields_of_results() -> None:
    table = (DOCS / "comparing.md").read_text().partition("| first to differ |")[2].partition("\n\n")[0]
    names = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    folders = [ROOT / NAME / "algos", ROOT / NAME / "learning", ROOT / "runlab" / "envs"]
    source = "\n".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert {name for name in names if not re.search(rf"^    {name}: ", source, re.MULTILINE)} == set()
    assert len(names) > 10


def test_messages_that_a_page_explains_are_those_of_the_code() -> None:
    table = (DOCS / "troubleshooting.md").read_text().partition("| you see |")[2].partition("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    parts = [part.strip(" :") for text in quoted for part in re.split(r"=\w+|\.\.\.|\[|]|;", text)]
    sources = [ROOT / "scripts" / "setup.sh", *(ROOT / "runlab").rglob("*.py")]
    code = re.sub(r'"\s+f?"', "", "\n".join(path.read_text() for path in sources))
    assert [part for part in parts if part not in code] == []
    assert len(quoted) > 10


def test_the_site_is_built_without_a_broken_link_and_asks_no_other_machine(tmp_path: Path) -> None:
    for name in "mkdocs.yml", "docs", "scripts":
        run(tmp_path, "cp", "-r", str(ROOT / name), ".", status=0)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    run(tmp_path, *build, status=0, SOURCE_URL="https://example.org/source")
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc="?(https?:[^" >]+)|<link[^>]*href="?(https?:[^" >]+)"""
    )
    assert {addresses for text in pages.values() for addresses in loaded.findall(text)} == set()
    assert any("https://example.org/source/CONTRIBUTING.md" in text for text in pages.values())
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write("\n[gone](commands.md#nowhere)\n[gone](stories/gone.md)\n")
    done = run(tmp_path, *build, status=1)
    output = done.stdout + done.stderr
    for text in ("anchor '#nowhere'", "'stories/gone.md'", "Aborted with 2 warnings"):
        assert text in output, output
