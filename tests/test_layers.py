"""Who may import whom, what an import touches, and what the wheel installs."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "triton_kernels": ["commhooks.", "torch.distributed", "tests", "benchmarks", "examples"],
    "commhooks": ["tests", "benchmarks", "examples"],
    "commhooks/algorithms": ["commhooks.hooks", "commhooks.executor", "commhooks.binding", "commhooks.registration"],
    "commhooks/comm.py": ["commhooks.", "torch.distributed"],
    "commhooks/simulate.py": ["commhooks.hooks", "commhooks.executor", "torch.distributed"],
}
# An algorithm awaits collectives; it never launches one.
COLLECTIVES = {"all_reduce", "all_gather", "all_to_all_single", "broadcast", "reduce_scatter", "barrier"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("part", FORBIDDEN)
def test_import_rules(part):
    files = [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).glob("**/*.py"))
    assert files
    for file in files:
        for name in imports(file):
            if part == "triton_kernels" and name.startswith("commhooks.triton_kernels"):
                continue  # the one name that it is imported under
            assert not any((name + ".").startswith(prefix.rstrip(".") + ".") for prefix in FORBIDDEN[part]), (
                f"{file.relative_to(ROOT)} imports {name}"
            )


@pytest.mark.parametrize("file", sorted((ROOT / "commhooks" / "algorithms").glob("*.py")), ids=lambda file: file.name)
def test_algorithms_launch_no_collective(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id == "dist" and node.attr in COLLECTIVES), f"line {node.lineno}"


def test_only_hooks_know_grad_buckets():
    for file in (ROOT / "commhooks").glob("**/*.py"):
        if file.name not in ("hooks.py", "binding.py"):
            assert "GradBucket" not in file.read_text(), file


def test_backend_that_is_none_is_refused():
    command = [sys.executable, "-c", "import commhooks"]
    environment = os.environ | {"COMMHOOKS_BACKEND": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "COMMHOOKS_BACKEND is 'cuda'; it must be one of reference, triton" in done.stderr


def test_lean_import():
    """`import commhooks` works where there is no triton and no GPU, and wakes neither."""
    code = "import sys, torch, commhooks; assert 'triton' not in sys.modules; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def test_wheel_contents(tmp_path):
    """The kernels travel inside the package: two other packages install a top-level triton_kernels."""
    source = tmp_path / "source"  # a copy: a build folder may hold what is no longer in the tree
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    environment = os.environ | {"PYTHONWARNINGS": "default"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("commhooks-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"commhooks"}
    assert "commhooks/py.typed" in names
    for folder in ("commhooks", "commhooks/algorithms", "commhooks/triton_kernels"):
        for file in (ROOT / folder).glob("*.py"):
            assert f"{folder}/{file.name}" in names
