"""README, docs and examples do what they say: their code runs, their commands parse.

Rules for a page. Its ```python blocks share one namespace and run in order, with short training.
A python block that begins with `# examples/<file>` is an excerpt of that example, which runs on its
own. A ```yaml block that begins with `# <file>` is written to that file. In ```bash blocks the
lines that begin with `marl` or `make` are checked as far as that costs nothing.
"""

import itertools
import re
import shlex
import sys
import unicodedata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import marl
from marl import cli, config, experiment, export

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# README and the first example compile a JaxMARL environment; pages run what the others show
SLOW = (
    "README.md",
    "per_agent_learning_rates.py",
    "own_environment.py",
    "own_learner.py",
    "speaker_listener_bounds.py",
)
SMALL = {"num_envs": 4, "rollout_length": 8, "eval_episodes": 4}


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def with_code(pages, *languages):
    return [page for page in pages if any(blocks(page, language) for language in languages)]


def parameters(paths):
    """One test per file, slow where it compiles something large."""
    return [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in SLOW else [])
        for path in paths
    ]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory from which examples can be imported, and short training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    real = marl.train

    def short(env, team, total_steps, **options):
        del total_steps
        options = {k: v for k, v in options.items() if not k.endswith("_interval")} | SMALL
        return real(env, team, 2 * 4 * 8, progress=False, **options)

    monkeypatch.setattr(marl, "train", short)
    return tmp_path


@pytest.mark.parametrize("page", parameters(with_code(PAGES, "python")))
def test_python_on_a_page_runs(page, workplace, monkeypatch):
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for number, code in enumerate(blocks(page, "python")):
        if not code.startswith("# examples/"):
            exec(compile(code, f"{page.name}, python block {number}", "exec"), module.__dict__)


@pytest.mark.parametrize("page", with_code(PAGES, "python"), ids=lambda page: page.name)
def test_excerpts_are_those_of_the_examples(page):
    for code in blocks(page, "python"):
        if code.startswith("# examples/"):
            name, _, excerpt = code.removeprefix("# ").partition("\n")
            assert excerpt.strip() in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("example", parameters(EXAMPLES))
def test_examples_run(example, workplace, monkeypatch):
    monkeypatch.setitem(sys.modules, example.stem, module := ModuleType(example.stem))
    code = compile(example.read_text(encoding="utf-8"), str(example), "exec")
    exec(code, module.__dict__)
    arguments = ["toy/cooperative", "8"] if example.stem == "random_policy" else []
    module.main(*arguments)


@pytest.mark.parametrize("page", with_code(PAGES, "bash", "yaml"), ids=lambda page: page.name)
def test_commands_on_a_page_are_commands(page, workplace, monkeypatch, capsys):
    pretend_to_run(monkeypatch)
    for text in blocks(page, "yaml"):
        name = re.match(r"# (\S+\.yaml)\n", text)
        assert name, f"a yaml block begins with its file's name:\n{text}"
        Path(name[1]).write_text(text, encoding="utf-8")
        config.load(name[1])
    for line in command_lines(page):
        command, *arguments = shlex.split(line, comments=True)
        if command == "marl" and arguments != ["--version"]:
            assert cli.main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
        elif command == "make":
            targets = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(re.search(rf"^{t}:", targets, re.MULTILINE) for t in arguments), line


def command_lines(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"^(\w+=\S+ )+", "", line.strip())  # VARIABLE=value before the command


def pretend_to_run(monkeypatch):
    """Commands go as far as describing what would be trained, which compiles nothing."""
    run = SimpleNamespace(interrupted=False, evaluations=[{}], evaluate=lambda *a, **kw: {})
    written = SimpleNamespace(iterdir=list)

    def describe_only(loaded, out, progress):
        assert experiment.describe(loaded)
        return run

    monkeypatch.setattr(experiment, "train", describe_only)
    monkeypatch.setattr(experiment, "resume", lambda directory, settings, progress: run)
    monkeypatch.setattr(experiment, "load", lambda *arguments, **kwargs: run)
    monkeypatch.setattr(export, "export", lambda *arguments: written)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    found = [link for link in re.findall(r"\]\(([^)\s]+)", prose(page)) if "://" not in link]
    assert [link for link in found if not leads_somewhere(page, link)] == []


def leads_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not anchor:
        return target.exists()
    return target.suffix == ".md" and target.is_file() and anchor in anchors(target)


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def anchors(page):
    """Those of headings that GitHub and MkDocs agree about."""
    texts = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        for heading in re.findall(r"^#+ +(.+?)[ #]*$", prose(page), re.MULTILINE)
    ]
    return numbered(map(github_slug, texts), "-") & numbered(map(mkdocs_slug, texts), "_")


def github_slug(text):
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def mkdocs_slug(text):
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def numbered(slugs, joint):
    """Each of them once: the second of its kind gets a number."""
    found = set()
    for slug in slugs:
        others = (f"{slug}{joint}{number}" for number in itertools.count(1))
        found.add(next(name for name in itertools.chain([slug], others) if name not in found))
    return found


def test_links_to_headings_that_are_not_there_are_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("# One page\n\n```bash\n# a comment\n```\n\n## `Here`, and [there](x)'s\n")
    other.write_text("# Twice\n\n## Twice\n\n### A / b\n")
    (tmp_path / "code.py").touch()
    good = "#one-page #here-and-theres other.md other.md#twice page.md#one-page code.py ."
    bad = (
        "#a-comment #Here #twice other.md#one-page other.md#thrice code.py#one gone.md gone.md#one"
    )
    # with a number and around a slash their rules differ
    bad += " other.md#twice-1 other.md#twice_1 other.md#a-b other.md#a--b"
    assert [link for link in good.split() if not leads_somewhere(page, link)] == []
    assert [link for link in bad.split() if leads_somewhere(page, link)] == []
