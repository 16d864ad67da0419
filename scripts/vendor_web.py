"""Brings the libraries of the browser's pages from the npm registry into server/web/vendor.

Usage: python scripts/vendor_web.py (needs npm, and network). The files are those of the published
packages; only what they import is renamed to the file beside them. manifest.json says of each
where it came from and both hashes; tests/unit/server/test_web.py compares them.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "src" / "outrider" / "server" / "web" / "vendor"
HIGHLIGHT = "@highlightjs/cdn-assets@11.12.0"
LANGUAGES = ["bash", "cpp", "go", "javascript", "json", "python", "rust", "xml"]
# Ours: the package with its version, and its file.
FILES = {
    "preact.js": ("preact@11.2.0", "dist/preact.mjs"),
    "hooks.js": ("preact@11.2.0", "hooks/dist/hooks.mjs"),
    "htm.js": ("htm@3.1.1", "dist/htm.mjs"),
    "signals-core.js": ("@preact/signals-core@1.14.5", "dist/signals-core.mjs"),
    "signals.js": ("@preact/signals@2.11.4", "dist/signals.mjs"),
    "marked.js": ("marked@18.2.1", "lib/marked.esm.js"),
    "highlight.js": (HIGHLIGHT, "es/core.min.js"),
    **{f"highlight-{name}.js": (HIGHLIGHT, f"es/languages/{name}.min.js") for name in LANGUAGES},
}
OF_PREACT = ("preact.js", "hooks.js", "htm.js", "signals-core.js", "signals.js")
IMPORTS = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}


def main() -> None:
    VENDOR.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict[str, str]] = {}
    licences: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ours, (package, path) in FILES.items():
            archive = fetched(package, Path(folder))
            text = member(archive, path)
            changed = changed_for_browsers(ours, text)
            (VENDOR / ours).write_text(changed, encoding="utf-8")
            manifest[ours] = {
                "package": package,
                "file": path,
                "sha256_published": digest(text),
                "sha256": digest(changed),
            }
            licences[package] = member(archive, "LICENSE")
    (VENDOR / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    parts = [f"{package}\n\n{text.strip()}\n" for package, text in licences.items()]
    (VENDOR / "LICENSES.txt").write_text("\n\n".join(parts), encoding="utf-8")


def fetched(package: str, folder: Path) -> Path:
    said = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    return folder / said.stdout.strip().splitlines()[-1]


def member(archive: Path, path: str) -> str:
    with tarfile.open(archive) as packed:
        stream = packed.extractfile(f"package/{path}")
        if stream is None:
            raise SystemExit(f"{archive.name} has no {path}")
        return stream.read().decode("utf-8")


def changed_for_browsers(name: str, text: str) -> str:
    text = re.sub(r"\n?//# sourceMappingURL=.*", "", text)
    if name in OF_PREACT:
        text = re.sub(r'from"([^"]+)"', lambda found: f'from"{IMPORTS[found[1]]}"', text)
    return text.rstrip() + "\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


if __name__ == "__main__":
    main()
