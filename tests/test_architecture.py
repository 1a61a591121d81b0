"""The direction of imports (docs/architecture.md), and what no file may do; checked on the parsed source."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tpips_reward", "metric_training", "rl_recipes")
FORBIDDEN = {
    "tpips_reward": {"metric_training", "rl_recipes"},
    "metric_training": {"rl_recipes"},
    "rl_recipes": {"metric_training"},
}


@dataclass(frozen=True)
class Imported:
    """A dotted name that a module imports ("tpips_reward.scenes.render"), and where."""

    name: str
    line: int


def imported_names(tree: ast.Module, module: str, is_package: bool = False) -> list[Imported]:
    """Every dotted name that `module` imports: statements anywhere in the file, relative ones resolved, and
    `import_module` or `__import__` of a literal."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Imported(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            found += [Imported(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(Imported(node.args[0].value, node.lineno))
    return found


def is_private(part: str) -> bool:
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def arrow_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module` imports against the arrows, of the released `tpips` package, or of another package's privates."""
    package = module.split(".")[0]
    tree = ast.parse(source)
    problems = []
    for item in imported_names(tree, module, is_package):
        parts = item.name.split(".")
        if parts[0] == "tpips":
            problems.append(f"line {item.line}: imports {item.name}; the released package is not used here")
        if parts[0] in FORBIDDEN.get(package, set()):
            problems.append(f"line {item.line}: {package} imports {item.name}")
        if parts[0] in PACKAGES and package in PACKAGES and parts[0] != package and any(map(is_private, parts)):
            problems.append(f"line {item.line}: imports the private {item.name}")
    return problems + private_attributes(tree, package)


def private_attributes(tree: ast.Module, package: str) -> list[str]:
    """Uses such as `scenes._pattern` of a name that was imported from another of our packages."""
    ours = {}
    for node in ast.walk(tree):
        names = node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for alias in names:
            origin = (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else alias.name
            if origin.split(".")[0] in PACKAGES and origin.split(".")[0] != package:
                ours[alias.asname or alias.name.split(".")[0]] = origin
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in ours:
                problems.append(f"line {node.lineno}: uses the private {ast.unparse(node)}")
    return problems


def unsafe_calls(source: str) -> list[str]:
    """Loading that could run somebody else's code: pickle, torch.load without weights_only=True, trust_remote_code."""
    tree = ast.parse(source)
    problems = [
        f"line {item.line}: imports {item.name}"
        for item in imported_names(tree, "x")
        if item.name.split(".")[0] in ("dill", "cloudpickle", "joblib")
        or item.name in ("pickle.load", "pickle.loads", "pickle.Unpickler")
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if ast.unparse(node.func) in ("pickle.load", "pickle.loads", "pickle.Unpickler"):  # its errors may be caught
            problems.append(f"line {node.lineno}: {ast.unparse(node.func)}")
        if ast.unparse(node.func) == "torch.load" and not is_true(keywords.get("weights_only")):
            problems.append(f"line {node.lineno}: torch.load without weights_only=True")
        if is_true(keywords.get("trust_remote_code")):
            problems.append(f"line {node.lineno}: trust_remote_code=True")
    return problems


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> tuple[str, bool]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def declared_packages() -> set[str]:
    """Distributions that pyproject.toml names, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return {re.split(r"[\[<>=; ]", one)[0].lower().replace("_", "-") for one in wanted}


def test_what_is_imported_is_declared():
    known, distributions = {*sys.stdlib_module_names, *PACKAGES, "flash_attn"}, packages_distributions()  # built by hand
    declared, problems = declared_packages(), []
    for path in (path for package in PACKAGES for path in sources(package)):
        names = {item.name.split(".")[0] for item in imported_names(ast.parse(path.read_text(encoding="utf-8")), *module_name(path))}
        for name in sorted(names - known):
            if not declared & {one.lower().replace("_", "-") for one in distributions.get(name, [name])}:
                problems.append(f"{path.relative_to(ROOT)} imports {name}, which pyproject.toml does not name")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package):
    files = sources(package)
    assert files, f"no sources found under {ROOT / package}"
    problems = []
    for path in files:
        module, is_package = module_name(path)
        source = path.read_text(encoding="utf-8")
        problems += [f"{path.relative_to(ROOT)}, {p}" for p in arrow_violations(source, module, is_package)]
    assert not problems, "\n".join(problems)


def test_tests_do_not_use_the_released_package():
    files = sources("tests")
    assert files
    problems = [
        f"{path.relative_to(ROOT)}, {p}"
        for path in files
        for p in arrow_violations(path.read_text(encoding="utf-8"), "tests.x")
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_nothing_loads_pickles_or_remote_code(folder):
    problems = [
        f"{path.relative_to(ROOT)}, {p}"
        for path in sources(folder)
        for p in unsafe_calls(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


BAD_IMPORTS = [
    ("tpips_reward.metric", "import rl_recipes", "tpips_reward imports rl_recipes"),
    (
        "tpips_reward.metric",
        "from metric_training.losses import vote_loss",
        "tpips_reward imports metric_training.losses",
    ),
    (
        "tpips_reward.metric",
        "def f():\n    from rl_recipes import runs",
        "line 2: tpips_reward imports rl_recipes.runs",
    ),
    ("tpips_reward.metric", "import importlib\nimportlib.import_module('rl_recipes.runs')", "imports rl_recipes.runs"),
    ("tpips_reward.metric", "__import__('metric_training')", "imports metric_training"),
    ("metric_training.train", "import rl_recipes.runs as runs", "metric_training imports rl_recipes.runs"),
    ("rl_recipes.runs", "import metric_training", "rl_recipes imports metric_training"),
    ("rl_recipes.runs", "from tpips_reward.scenes.edits import _options", "private tpips_reward.scenes.edits._options"),
    ("rl_recipes.runs", "from tpips_reward import _hidden", "private tpips_reward._hidden"),
    ("metric_training.train", "import tpips_reward._core.parts", "private tpips_reward._core.parts"),
    ("metric_training.train", "from tpips_reward import scenes\nscenes._pattern('dots')", "private scenes._pattern"),
    ("metric_training.train", "import tpips_reward as t\nt.scenes._pattern", "private t.scenes._pattern"),
    ("metric_training.train", "import tpips_reward.scenes\ntpips_reward.scenes._pattern", "uses the private"),
    ("rl_recipes.runs", "import tpips", "the released package"),
    ("tpips_reward.metric", "from tpips.models import load", "the released package"),
    ("tests.x", "def f():\n    import tpips", "the released package"),
]


@pytest.mark.parametrize(("module", "source", "message"), BAD_IMPORTS)
def test_the_checker_finds_a_forbidden_import(module, source, message):
    assert any(message in problem for problem in arrow_violations(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rl_recipes.runs", "from tpips_reward.scenes import render\nrender.__doc__"),
        ("rl_recipes.runs", "from rl_recipes.config import _nearest\nfrom rl_recipes import config\nconfig._nearest"),
        ("metric_training.train", "from __future__ import annotations\nfrom tpips_reward import __version__"),
        ("tpips_reward.scenes.edits", "from tpips_reward.scenes.scene import _secret\nfrom .scene import _other"),
        ("tests.x", "from tpips_reward.scenes.edits import _options"),
        ("tpips_reward.metric", "import tpipsx, torch._dynamo"),
    ],
)
def test_the_checker_allows_what_is_allowed(module, source):
    assert arrow_violations(source, module) == []


@pytest.mark.parametrize(
    ("module", "is_package", "source", "name"),
    [
        ("a.b.c", False, "from .d import e", "a.b.d.e"),
        ("a.b.c", False, "from ..d import e", "a.d.e"),
        ("a.b.c", False, "from . import e", "a.b.e"),
        ("a.b", True, "from .d import e", "a.b.d.e"),
        ("a.b", True, "from ..d import e", "a.d.e"),
    ],
)
def test_relative_imports_are_resolved(module, is_package, source, name):
    assert [item.name for item in imported_names(ast.parse(source), module, is_package)] == [name]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import pickle\npickle.loads(data)", 1),
        ("from pickle import Unpickler", 1),
        ("from pickle import UnpicklingError", 0),
        ("from joblib import load", 1),
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=False)", 1),
        ("torch.load(path, map_location='cpu', weights_only=True)", 0),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", 1),
        ("AutoModel.from_pretrained(x, trust_remote_code=False)", 0),
    ],
)
def test_the_checker_finds_unsafe_loading(source, count):
    assert len(unsafe_calls(source)) == count
