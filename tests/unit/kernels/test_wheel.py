"""What `scripts/wheel` makes: whole, installable without a compiler, and of the same bits."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import __version__
from outrider.core import env
from outrider.kernels import registry
from outrider.kernels.native.build import levels_here, library_name
from outrider.kernels.operators import Kernels
from unit.kernels.delta_cases import SHAPE, WIDE, some_text, whole_layer
from unit.kernels.implementations import DTYPES, randn
from unit.kernels.paged_cases import Heads, Sequenced, chain, make_pass

ROOT = Path(__file__).parents[3]
WHEEL = ROOT / "scripts" / "wheel.py"
LIBRARIES = "outrider/kernels/native/lib/"
# Of which only this one is compiled: half a minute.
LEVEL = levels_here()[0] if levels_here() else None


def make(folder: Path, *words: str) -> dict[str, Path]:
    """By what the name ends in."""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}  # noqa: TID251 - a child's
    command = [sys.executable, str(WHEEL), *words, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return {path.name.rpartition("-")[2]: path for path in folder.iterdir()}


def checkout() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.mark.wide
@pytest.mark.slow
def test_an_sdist_has_the_whole_checkout_and_the_pure_wheel_the_package(tmp_path: Path) -> None:
    tracked, made = checkout(), make(tmp_path, "--pure")
    with tarfile.open(made[f"{__version__}.tar.gz"]) as archive:
        names = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    added = {name for name in names - tracked if ".egg-info/" not in name}
    assert (tracked - names, added) == (set(), {"PKG-INFO", "setup.cfg"})
    with zipfile.ZipFile(made["any.whl"]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = wheel.read(f"outrider-{__version__}.dist-info/METADATA").decode()
        assert f"outrider-{__version__}.dist-info/licenses/LICENSE" in wheel.namelist()
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    # The embedded hybrid is only in the sdist.
    assert inside == {name for name in package if "/tiny/hybrid/" not in name}
    for line in ("License-Expression: MIT", "Keywords: ", "Classifier: Development Status"):
        assert line in about


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if LEVEL is None or not sys.platform.startswith("linux"):
        pytest.skip("a wheel with kernels is built on Linux")
    made = make(tmp_path_factory.mktemp("dist"), "--levels", LEVEL.name)
    (path,) = (path for path in made.values() if "manylinux" in path.name)
    return path


@pytest.mark.deep
def test_a_wheel_with_kernels_lists_every_file_and_says_which_system_it_needs(
    platform_wheel: Path,
) -> None:
    with zipfile.ZipFile(platform_wheel) as wheel:
        record = wheel.read(f"outrider-{__version__}.dist-info/RECORD").decode()
        listed = {line.split(",")[0]: line.split(",")[1:] for line in record.splitlines()}
        about = wheel.read(f"outrider-{__version__}.dist-info/WHEEL").decode()
        assert listed.keys() == set(wheel.namelist())
        for name, (digest, size) in listed.items():
            data = wheel.read(name)
            own = urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            if not name.endswith("/RECORD"):
                assert (digest, int(size)) == (f"sha256={own}", len(data))
        (library,) = (name for name in wheel.namelist() if name.startswith(LIBRARIES))
    tag = platform_wheel.stem.split("-", 2)[2]
    assert "Root-Is-Purelib: false" in about
    assert f"Tag: {tag}" in about
    assert LEVEL is not None
    assert library == LIBRARIES + library_name(LEVEL)


@pytest.fixture(scope="module")
def installed(platform_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and shares the other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    command = [str(folder / "bin" / "pip"), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, str(platform_wheel)], check=True, timeout=300)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "shared.pth").write_text("\n".join(others) + "\n")
    return folder / "bin"


@pytest.mark.deep
@pytest.mark.weights
def test_without_a_compiler_the_installed_wheel_runs_native_kernels(
    installed: Path, tmp_path: Path
) -> None:
    environment = {"PATH": str(installed), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}

    def outrider(*words: str) -> str:
        done = subprocess.run(
            [str(installed / "outrider"), *words],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
        )
        return done.stdout

    told = outrider("doctor", "--json")
    assert LEVEL is not None
    assert f"the wheel's, for CPUs of level {LEVEL.name}" in told
    assert '"compiler": "none"' in told
    assert outrider("generate", "Once upon a time", "--max-tokens", "16").strip()
    kept = [path.suffix for path in (tmp_path / "outrider").iterdir()]
    assert kept.count(".so") == 1


@pytest.fixture(scope="module")
def wheels_library(platform_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    with zipfile.ZipFile(platform_wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.startswith(LIBRARIES))
        return ctypes.CDLL(wheel.extract(name, tmp_path_factory.mktemp("library")))


@pytest.mark.deep
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wheels_library_has_the_bits_of_the_one_compiled_here(
    native_library: ctypes.CDLL, wheels_library: ctypes.CDLL, dtype: torch.dtype, scheme: str
) -> None:
    if env.compiler() is not None:
        pytest.skip("CXX may ask for other kernels than those of this level")
    own = "none" if scheme == "int4" else scheme
    both = [
        registry._measured(one, None, dtype, 2, own)  # pyright: ignore[reportPrivateUsage]
        for one in (native_library, wheels_library)
    ]
    if scheme == "int4":
        both = [
            registry._grouped(kernels, one, scheme)  # pyright: ignore[reportPrivateUsage]
            for kernels, one in zip(both, (native_library, wheels_library), strict=True)
        ]
    results = zip(*(computed(kernels, dtype) for kernels in both), strict=True)
    for (what, here), (_, brought) in results:
        assert torch.equal(here.view(torch.uint8), brought.view(torch.uint8)), what


def computed(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What each operator makes of random numbers."""
    for num_out, num_in in ((64, 96), (33, 257), (200, 1000)):
        packed = kernels.pack(randn(num_out, num_in, seed=1).to(dtype))
        for rows in (1, 2, 5, 9, 17, 64):
            out_NO = torch.zeros(rows, num_out)
            for accumulate in (False, True):
                kernels.linear(randn(rows, num_in, seed=rows), packed, out_NO, accumulate)
            yield f"linear {num_out} x {num_in}, {rows} rows", out_NO
    for size in (17, 64, 350, 1001):
        x_ND, out_ND = randn(9, size), torch.empty(9, size)
        kernels.rms_norm(x_ND, randn(size, seed=1), 1e-5, out_ND)
        yield f"rms_norm {size}", out_ND.clone()
        kernels.layer_norm(x_ND, randn(size, seed=1), randn(size, seed=2), 1e-5, out_ND)
        yield f"layer_norm {size}", out_ND.clone()
        kernels.gelu(x_ND, out_ND)
        yield f"gelu {size}", out_ND.clone()
        kernels.silu_mul(randn(9, 2 * size), out_ND)
        yield f"silu_mul {size}", out_ND
    for heads in (Heads(), Heads(2, 2, 80), Heads(5, 1, 6)):
        yield from computed_of_heads(kernels, heads, dtype)
    for shape in (SHAPE, WIDE):
        yield f"delta {shape}", whole_layer(kernels.delta, some_text(shape=shape))
    yield from drawn(kernels)


def computed_of_heads(
    kernels: Kernels, heads: Heads, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    texts = [chain(130, 5), Sequenced(7, (-1, 0, 0, 1))]
    case = make_pass(texts, heads=heads, dtype=dtype)
    qkv_NE, k_GSD, v_GSD = case.qkv_NE.clone(), case.k_GSD.clone(), case.v_GSD.clone()
    weights = randn(2, heads.head_dim, seed=3)
    sizes = (heads.num_kv_heads, 1e-6)
    kernels.head_norm(qkv_NE, weights[0], weights[1], *sizes)
    yield f"head_norm {heads}", qkv_NE.clone()
    cos_TH, sin_TH = randn(2, 200, heads.head_dim // 2, seed=4)
    kernels.rope_append(qkv_NE, cos_TH, sin_TH, case.plan, k_GSD, v_GSD)
    yield from ((f"rope {heads}", qkv_NE.clone()), (f"keys {heads}", k_GSD.clone()))
    out_NO = torch.empty(len(case.keys), heads.num_heads * heads.head_dim)
    kernels.attention(qkv_NE, k_GSD, v_GSD, case.plan, 0.125, out_NO)
    yield f"attention {heads}", out_NO


def drawn(kernels: Kernels) -> Iterator[tuple[str, Tensor]]:
    sampling = kernels.sampling
    for size in (5, 513, 50_257):
        logits_NV, probs_NV = 4 * randn(3, size), torch.empty(3, size)
        yield f"argmax {size}", torch.tensor(kernels.argmax(logits_NV))
        sampling.softmax(logits_NV, 0.7, probs_NV)
        yield f"softmax {size}", probs_NV.clone()
        left_V, left = sampling.leftover(probs_NV[0], probs_NV[1].contiguous(), 0.9)
        yield f"leftover {size}", left_V.clone()
        yield f"its sum {size}", torch.tensor([left], dtype=torch.float64)
        picks = [sampling.pick(probs_NV[0], uniform / 97) for uniform in range(97)]
        yield f"pick {size}", torch.tensor(picks)
        sampling.top_k(logits_NV, 5, logits_NV)
        yield f"top_k {size}", logits_NV
        sampling.keep_likely(probs_NV, 0.8, 0.01)
        yield f"keep_likely {size}", probs_NV
