"""Stores artifacts.  An artifact is an output folder of a stage (one step of the workflow).

A store holds objects (bytes under a key).  A stored folder consists of one object for each file and one object for the
folder's tree, which lists the files.  The tree is canonical JSON: {"files": {path: {"sha256", "size"}}}.  These objects
have keys of the form ``cas/<sha256>``, where the sha256 is that of the object's bytes.  The sha256 of the tree is the
folder's digest.

A store is in a local folder, in memory or in S3.  The library obstore reads and writes it.

Every write of an object is atomic.  A folder's tree is written after its files, so a folder exists only once it is
complete.  Reading a folder or a file (``get_folder``, ``tree``, ``get_file``) verifies digests and removes damaged
objects; ``get`` verifies nothing.  Empty folders and permissions are not stored.  A link to a file is stored as a copy
of the file; links to folders are not stored.  A store in a local folder does not call fsync.  S3 credentials come only
from AWS's environment variables, which hold a pair of keys or name a pod's IAM role.  The environment variable
CUDA_AGENT_CA_FILE names a file of certificates (PEM) that are trusted beside the public ones."""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as obstore_errors

from cuda_agent.errors import EXIT_CONFIG, EXIT_RETRY, UserError

CHUNK = 4 << 20  # bytes
_AT_ONCE = 128  # requests side by side
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class StoreError(UserError):
    """A failure of the store."""

    exit_code = EXIT_RETRY


class StoreUnavailable(StoreError):
    """The store has a wrong address or cannot be reached.  If the address is right, the failed operation can be
    repeated once the store works again."""


class StoreDenied(StoreUnavailable):
    """The store denies access: the credentials are missing, wrong, or not for this operation.  To repeat the operation
    is no use."""

    exit_code = EXIT_CONFIG


class StoreFull(StoreError):
    """The store is full, or a write exceeds a quota or a limit on file sizes.  No partial object is visible."""


class StoreDamaged(StoreError):
    """An object is missing or damaged, or the tree of a stored folder names a file outside of the folder.  A damaged
    object does not match its digest; it is removed from the store."""


def open_store(uri: str | Path) -> "Store":
    """Opens a store.

    Args:
        uri: A folder (made if absent), ``memory://`` (a new empty store in this process, for tests) or
            ``s3://bucket/prefix``.

    Raises:
        StoreUnavailable: The address is wrong, or the store cannot be opened."""
    text = str(uri)
    if text.startswith("memory:"):
        return Store(obstore.store.MemoryStore(), "memory://")
    if text.startswith("s3:"):
        return Store(_s3(text), text.rstrip("/"))
    if re.match(r"[a-z0-9]+://", text) and not text.startswith("file://"):
        raise StoreUnavailable(f"Store {text}: expected a folder, memory:// or s3://bucket/prefix.")
    folder = Path(absolute_uri(text))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        backend = obstore.store.LocalStore(folder)
    except (OSError, obstore_errors.BaseError) as error:
        raise StoreUnavailable(f"The store {folder} cannot be opened: {_first_line(error)}") from error
    return Store(backend, str(folder))


def absolute_uri(uri: str) -> str:
    """Returns the address ``uri`` of a store in a form that does not depend on the working directory.  The path of a
    local folder becomes absolute; other addresses do not change."""
    folder = local_folder(uri)
    return uri if folder is None else str(folder)


def local_folder(uri: str) -> Path | None:
    """Returns the folder of the store at ``uri``, or None for a store in memory or in S3."""
    if re.match(r"(memory|s3):", uri):
        return None
    return Path(uri.removeprefix("file://")).expanduser().absolute()


class Store:
    """A store of objects and folders.  An object's key is a slash-separated path.  Failures raise a ``StoreError``."""

    def __init__(self, backend: Any, uri: str) -> None:
        self._backend = backend
        self.uri = uri

    def put(self, key: str, data: bytes | Path) -> None:
        """Writes ``data``, or the content of the file at ``data``, under ``key``."""
        with self._errors(f"write {key}"):
            obstore.put(self._backend, key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Writes ``data`` under ``key`` and returns True, or returns False if ``key`` exists."""
        with self._errors(f"write {key}"):
            try:
                obstore.put(self._backend, key, data, mode="create")
            except obstore_errors.AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        """Returns the bytes under ``key``.

        Raises:
            StoreDamaged: ``key`` is absent."""
        with self._errors(f"read {key}"):
            return bytes(obstore.get(self._backend, key).bytes())

    def find(self, key: str) -> bytes | None:
        """Returns the bytes under ``key``, or None if ``key`` is absent."""
        with self._errors(f"read {key}"):
            try:
                return bytes(obstore.get(self._backend, key).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def size(self, key: str) -> int | None:
        """Returns the size of the object in bytes, or None if ``key`` is absent."""
        with self._errors(f"look up {key}"):
            try:
                return int(obstore.head(self._backend, key)["size"])
            except FileNotFoundError:
                return None

    def folders(self, prefix: str) -> list[str]:
        """Returns the names of all folders directly below the folder ``prefix``, sorted.  Does not list their keys."""
        with self._errors(f"list {prefix}"):
            found = obstore.list_with_delimiter(self._backend, prefix)["common_prefixes"]
        return sorted(path.rsplit("/", 1)[-1] for path in found)

    def list(self, prefix: str) -> list[str]:
        """Returns all keys below the folder ``prefix``, sorted.  Keys of unfinished writes are not among them."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Returns key -> (size in bytes, last change in seconds since the epoch), for all keys below ``prefix``."""
        with self._errors(f"list {prefix}"):
            return {
                entry["path"]: (entry["size"], entry["last_modified"].timestamp())
                for page in obstore.list(self._backend, prefix)
                for entry in page
            }

    def delete(self, key: str) -> None:
        """Deletes an object; an absent ``key`` is not an error."""
        with self._errors(f"delete {key}"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._backend, key)

    def delete_all(self, keys: Iterable[str]) -> None:
        """Deletes objects, in S3 a thousand with each request; absent keys are not an error."""
        if not self.uri.startswith("s3:"):
            side_by_side(self.delete, keys)
            return
        for some in batched(keys, 1000):
            with self._errors("delete objects"):
                obstore.delete(self._backend, some)

    def get_file(self, key: str, path: Path, sha256: str) -> None:
        """Downloads an object to the file ``path``.

        Raises:
            StoreDamaged: The object is absent, or the digest of its bytes is not ``sha256``. If the object is absent,
                no file is made. If the digest is wrong, the object and the file are deleted."""
        actual = hashlib.sha256()
        with self._errors(f"read {key}"):
            found = obstore.get(self._backend, key)  # before the file is made: the object may be absent
            with open(path, "wb") as file:
                for chunk in found.stream(min_chunk_size=CHUNK):
                    actual.update(chunk)
                    file.write(chunk)
        if actual.hexdigest() != sha256:
            path.unlink()
            self._remove_damaged(key)

    def put_json(self, value: Any) -> str:
        """Stores ``value`` as canonical JSON and returns its digest (see ``json_sha256``)."""
        digest = json_sha256(value)
        self.create(f"cas/{digest}", canonical_json(value).encode())
        return digest

    def get_json(self, digest: str) -> Any:
        """Returns the value that ``put_json`` stored.

        Raises:
            StoreDamaged: The object is missing or damaged."""
        data = self.get(f"cas/{digest}")
        if hashlib.sha256(data).hexdigest() != digest:
            self._remove_damaged(f"cas/{digest}")
        return json.loads(data)

    # Folders ---------------------------------------------------------------------------------------------------------

    def put_folder(self, path: Path) -> str:
        """Stores the files below ``path`` and returns the folder's digest, a hash of the files' names and bytes."""
        files = {}
        for file in files_below(path):
            digest = file_sha256(file)
            size = file.stat().st_size
            if self.size(f"cas/{digest}") != size:
                self.put(f"cas/{digest}", file)
            files[file.relative_to(path).as_posix()] = {"sha256": digest, "size": size}
        return self.put_json({"files": files})

    def tree(self, digest: str) -> dict[str, dict[str, Any]]:
        """Returns the list of files of the stored folder ``digest``, as path -> {"sha256", "size"}.

        Raises:
            StoreDamaged: The list is missing or damaged."""
        return self.get_json(digest)["files"]

    def get_folder(self, digest: str, path: Path) -> None:
        """Copies the stored folder ``digest`` to the folder ``path``.  Verifies all files.  The copies are read-only.

        Raises:
            StoreDamaged: A file or the list of files is missing or damaged, or a file's path leads out of ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        for name, entry in self.tree(digest).items():
            target = path / name
            if not target.resolve().is_relative_to(path.resolve()):
                raise StoreDamaged(f"The folder cas/{digest} names a file outside of itself: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.get_file(f"cas/{entry['sha256']}", target, entry["sha256"])
            target.chmod(0o444)

    def has_folder(self, digest: str) -> bool:
        """Returns whether the store holds all files of the folder ``digest``, each with its recorded size.  Reads the
        list of files, but not their contents."""
        try:
            files = {f"cas/{entry['sha256']}": entry["size"] for entry in self.tree(digest).values()}
        except StoreDamaged:
            return False
        return side_by_side(self.size, files) == [*files.values()]

    def _remove_damaged(self, key: str) -> NoReturn:
        self.delete(key)
        raise StoreDamaged(f"The object {key} in {self.uri} did not match its digest. It was removed.")

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turns errors of obstore and the operating system into a ``StoreError`` that names the operation ``doing``."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreUnavailable(f"The store {self.uri} has no such bucket: could not {doing}.") from error
            raise StoreDamaged(f"The store {self.uri} has no such object: could not {doing}.") from error
        except (OSError, obstore_errors.BaseError) as error:
            reason, s3 = _first_line(error), self.uri.startswith("s3:")
            full = r"(os error|Errno) (28|27|122)\b|No space left"  # ENOSPC, EFBIG, EDQUOT
            full += r"|\b507\b|StorageFull|InsufficientStorage|QuotaExceeded" if s3 else ""
            if re.search(full, str(error)):
                raise StoreFull(
                    f"The store {self.uri} is full: could not {doing} ({reason}).\n"
                    "Nothing half-written is visible. Free some space (`cuda-agent gc` removes what no run needs),\n"
                    "then type the same command: it goes on where it stopped."
                ) from error
            if isinstance(error, (obstore_errors.PermissionDeniedError, obstore_errors.UnauthenticatedError)):
                code = re.search(r"<Code>(\w+)</Code>", str(error))
                why = code[1] if code else reason
                raise StoreDenied(
                    f"The store {self.uri} denies access: could not {doing} ({why}). Check the credentials, such as"
                    f" AWS_ACCESS_KEY_ID, and what they may do."
                ) from error
            hint = " Is it running, and do AWS_ENDPOINT_URL and the credentials fit?" if s3 else ""
            said = f"The store {self.uri} does not answer: could not {doing} ({reason}).{hint}"
            raise StoreUnavailable(said) from error


def batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yields the items in lists of at most ``size``."""
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some


def side_by_side(request: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Returns the results of ``request`` for all ``items``, in their order.  Threads send the requests side by side,
    because a store in S3 takes tens of milliseconds for each."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(request, items))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Returns a value as JSON with sorted keys and without spaces, so that equal values give the same string."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def files_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _s3(uri: str) -> Any:
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise StoreUnavailable("Credentials do not belong into the store's address: set AWS_ACCESS_KEY_ID and so on.")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    there: dict[str, Any] = {"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}
    options: Any = {"allow_http": endpoint.startswith("http://"), "timeout": "60s"}
    try:
        if authority := os.environ.get("CUDA_AGENT_CA_FILE"):
            options["root_certificate"] = Path(authority).read_bytes()
        return obstore.store.S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options=options,
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=20)},
            **there,
        )
    except (OSError, obstore_errors.BaseError) as error:
        raise StoreUnavailable(f"The store {uri} cannot be opened: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
