"""Writes the project's images as docker archives, from a machine's own system, where none can be built.

An image has one layer: names of users, the linker's cache, links and empty mount points.  Pods mount the machine's /usr
and /opt.  For the standard library alone, as it also runs where nothing is installed.

    gpu_images.py requirements                               what the package needs, NAME==VERSION, one a line
    gpu_images.py images FOLDER APP TREES MINIO VERSION      archives in FOLDER; TREES is a file with mount points
"""

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

# What `submit`, `pod`, the stages and the sandbox's servers import, beyond PyTorch, transformers and numpy.
ROOTS = (
    "pydantic", "hydra-core", "obstore", "minio", "typer", "rich", "pygments", "jinja2", "httpx", "kubernetes",
    "fastapi", "uvicorn", "prometheus-client", "pyarrow",
)  # fmt: skip
ETC = ("etc/ld.so.cache", "etc/ld.so.conf", "etc/ld.so.conf.d", "etc/alternatives", "etc/localtime")
USERS = "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\nagent:x:65532:65532:agent:/tmp:/bin/sh\n"
GROUPS = "root:x:0:\nnogroup:x:65534:\nagent:x:65532:\n"
FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin:/usr/local/nvidia/bin"


def requirements() -> list[str]:
    """Returns the packages that ``ROOTS`` require here, with versions."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    todo = list(ROOTS)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = package.version
        wanted = [Requirement(line) for line in package.requires or []]
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _folder(layer: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    layer.addfile(entry)


def _text(layer: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), 0o644
    layer.addfile(entry, io.BytesIO(text.encode()))


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def system(layer: tarfile.TarFile, mounted: list[str]) -> None:
    """Adds what a root has on this machine beside the folders that pods mount."""
    for name in sorted(
        {"tmp", "etc/ssl/certs", "proc", "sys", "dev", "run", "var", *(path.strip("/") for path in mounted)}
    ):
        for parent in reversed(Path(name).parents[:-1]):
            _folder(layer, str(parent))
        _folder(layer, name, 0o1777 if name == "tmp" else 0o755)
    for path in sorted(Path("/").iterdir()):
        if path.is_symlink() and str(path.readlink()).lstrip("/").startswith("usr/"):
            layer.add(path, path.name, filter=_owned_by_root)
    _text(layer, "etc/passwd", USERS)
    _text(layer, "etc/group", GROUPS)
    for name in ETC:
        if os.path.lexists(f"/{name}"):
            layer.add(f"/{name}", name, filter=_owned_by_root)


def archive(path: Path, names: list[str], layer: Path, config: Mapping[str, Any]) -> None:
    """Writes a docker archive of one layer."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    about = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    text = json.dumps(about)
    name = hashlib.sha256(text.encode()).hexdigest()
    with tarfile.open(path, "w") as made:
        made.add(layer, f"{digest}.tar")
        _text(made, f"{name}.json", text)
        _text(
            made,
            "manifest.json",
            json.dumps([{"Config": f"{name}.json", "RepoTags": names, "Layers": [f"{digest}.tar"]}]),
        )


def images(folder: Path, app: Path, mounted: list[str], minio: Path, version: str) -> None:
    """Writes the archives: one for the stages and the sandbox's servers, which differ in nothing here, and MinIO's."""
    folder.mkdir(parents=True)
    layer = folder / "layer"
    common = {"User": "65532:65532", "WorkingDir": "/tmp"}
    variables = [f"PATH=/app/bin:{FOLDERS}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1", "LANG=C.UTF-8"]
    start = {"Entrypoint": ["python3", "-m", "cuda_agent.cli"], "Cmd": ["--help"]}
    with tarfile.open(layer, "w") as made:
        system(made, mounted)
        made.add(app, "app", filter=_owned_by_root)
        (public,) = app.glob("lib/*/site-packages/certifi/cacert.pem")  # without any, the store's client does not start
        made.add(public, "etc/ssl/certs/ca-certificates.crt", filter=_owned_by_root)
    names = [f"localhost/cuda-agent:{version}", f"localhost/cuda-agent-sandbox:{version}"]
    archive(folder / "cuda-agent.tar", names, layer, common | {"Env": variables} | start)
    with tarfile.open(layer, "w") as made:
        system(made, ["/usr", "/data"])
        for parent in ("usr/local", "usr/local/bin"):
            _folder(made, parent)
        made.add(minio, "usr/local/bin/minio", filter=_owned_by_root)
    start = {"Entrypoint": ["minio"], "Cmd": ["server", "/data"]}
    variables = [f"PATH={FOLDERS}", "MINIO_UPDATE=off"]
    archive(folder / "minio.tar", [f"localhost/cuda-agent-minio:{version}"], layer, common | {"Env": variables} | start)
    layer.unlink()


if __name__ == "__main__":
    if sys.argv[1] == "requirements":
        print("\n".join(requirements()))
    else:
        place, own, trees, server, number = sys.argv[2:]
        images(Path(place), Path(own), Path(trees).read_text().split(), Path(server), number)
