"""Docker archives of a machine's own system: what containerd reads in them.  Needs no cluster."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from gpu_images import images, requirements


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    site = folder / "app" / "lib" / "python3.12" / "site-packages" / "certifi"
    site.mkdir(parents=True)
    (site / "cacert.pem").write_text("certificates")
    (folder / "minio").write_bytes(b"a program")
    images(folder / "made", folder / "app", ["/usr", "/opt", "/usr/local/nvidia"], folder / "minio", "1.2.3")
    return folder / "made"


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, tarfile.TarInfo]]:
    """Returns the manifest, the configuration and the layer's entries.  Checks the digest of the layer."""
    with tarfile.open(path) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        (manifest,) = json.loads(read("manifest.json"))
        config = json.loads(read(manifest["Config"]))
        (layer,) = manifest["Layers"]
        content = read(layer)
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(content).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        return manifest, config, {entry.name: entry for entry in files}


def test_stages_and_sandboxes_share_an_image_that_holds_no_system(made: Path) -> None:
    manifest, config, entries = opened(made / "cuda-agent.tar")
    assert manifest["RepoTags"] == ["localhost/cuda-agent:1.2.3", "localhost/cuda-agent-sandbox:1.2.3"]
    assert config["config"]["User"] == "65532:65532"
    assert "PATH=/app/bin:" in config["config"]["Env"][0]
    assert entries["tmp"].mode == 0o1777
    assert {name for name in entries if name.startswith(("usr/", "opt/"))} == {"usr/local", "usr/local/nvidia"}
    assert entries["etc/ssl/certs/ca-certificates.crt"].size
    assert {(entry.uid, entry.gid) for entry in entries.values()} == {(0, 0)}


def test_links_of_a_merged_usr_are_the_machines_own(made: Path) -> None:
    _, _, entries = opened(made / "cuda-agent.tar")
    for name in ("bin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            assert entries[name].issym() and entries[name].linkname == str(Path(f"/{name}").readlink())


def test_minio_is_a_program_alone(made: Path) -> None:
    manifest, config, entries = opened(made / "minio.tar")
    assert manifest["RepoTags"] == ["localhost/cuda-agent-minio:1.2.3"] and config["config"]["Entrypoint"] == ["minio"]
    assert entries["usr/local/bin/minio"].isfile() and not [name for name in entries if name.startswith("app")]


def test_requirements_name_the_store_and_kubernetes_and_leave_pytorch_to_the_machine() -> None:
    names = {line.split("==")[0] for line in requirements()}
    assert {"obstore", "kubernetes", "pydantic-core", "antlr4-python3-runtime", "certifi", "pyarrow"} <= names
    assert not names & {"torch", "transformers", "numpy", "tokenizers", "triton"}
