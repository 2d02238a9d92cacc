"""Functions of users' files and modules, with the modules beside them: what a config key with an
import path names."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megatron_gspo.errors import InputError, printable

T = TypeVar("T")

# Folders -> the modules imported from them, by name.
_NEIGHBOURS: dict[tuple[Path, ...], dict[str, ModuleType]] = {}


class UserCodeError(InputError):
    """A function of the user's that can't be loaded, or does not do what its key asks for; one line
    naming key, function and the fix.
    """


def is_import_path(name: str) -> bool:
    """Whether a name has the form "path/to/file.py:function" or "package.module:function"."""
    location, _, function = name.rpartition(":")
    if not function.isidentifier():
        return False
    return location.endswith(".py") or all(word.isidentifier() for word in location.split("."))


@functools.cache
def load_user_function(key: str, name: str) -> Callable[..., Any]:
    """The function that a config key names, which may import modules of its folder while it runs;
    loaded once in a process.

    Raises UserCodeError.
    """
    if not is_import_path(name):
        raise UserCodeError(
            f"{key} = {name!r}: names no function; write file.py:function or module:function"
        )
    return with_neighbours(name, load_function(name, f"{key} =", UserCodeError))


def call_for_trial(key: str, name: object, expected: str, call: Callable[[], T]) -> T:
    """The result of a user's function with small inputs, before a run allocates anything.

    expected: its arguments, for the message. Raises UserCodeError where it raises.
    """
    try:
        return call()
    except (UserCodeError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:  # a user's function may fail in any way
        raise UserCodeError(
            f"{key} = {name!r}: called with {expected}, it raised {_reason(error)}; fix it"
        ) from error


def load_function(name: str, what: str, refusal: type[InputError]) -> Callable[..., Any]:
    """A user's function, "path/to/file.py:function" or "package.module:function".

    A file may import modules of its folder and, in a package, of its package. It is run once in a
    process, however many keys name it. what: begins the message of a `refusal`, which is raised in
    one line if it can't be found or loaded.
    """
    location, _, function_name = name.rpartition(":")
    label = f"{what} {name!r}"
    load = _module_from_file if location.endswith(".py") else _module
    module = load(label, location, refusal)
    function = getattr(module, function_name, None)
    if function is None:
        raise refusal(
            f"{label}: {location} has no {function_name!r}; define it or correct the name"
        )
    if not callable(function):
        raise refusal(
            f"{label}: {function_name!r} is a {type(function).__name__}; it must be a function"
        )
    return function


def with_neighbours(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of `name`, which may also import modules of its folder while it is called."""
    location, _, _ = name.rpartition(":")
    if not location.endswith(".py"):
        return function
    folders = _folders_of(Path(location).resolve())

    def call(*arguments: object, **options: object) -> object:
        with _importing_from(folders):
            return function(*arguments, **options)

    return call


def _module(label: str, module: str, refusal: type[InputError]) -> ModuleType:
    try:
        # The command megatron-gspo does not have it on its path.
        with _importing_from((Path.cwd(),)):
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise refusal(f"{label}: importing {module} failed ({_reason(error)}); fix it") from error


def _module_from_file(label: str, location: str, refusal: type[InputError]) -> ModuleType:
    path = Path(location)
    if not path.is_file():
        raise refusal(f"{label}: no such file {path}; check the path (relative to {Path.cwd()})")
    path = path.resolve()
    unique = _module_name(path)
    package = ".".join(path.relative_to(_folders_of(path)[-1]).parent.parts)
    if package:  # so that relative imports find it
        unique = f"{package}.{unique}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look their module up there
    try:
        with _importing_from(_folders_of(path)):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        del sys.modules[unique]
        raise refusal(f"{label}: running {path} failed ({_reason(error)}); fix it") from error
    return module


def _module_name(path: Path) -> str:
    """The module name of a user's file: one for all keys that name it, another once it has changed."""
    version = path.stat()
    text = f"{path} {version.st_mtime_ns} {version.st_size}"
    return f"{path.stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _folders_of(path: Path) -> tuple[Path, ...]:
    """The folder of a file, and the one that has its outermost package."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return (path.parent,) if root == path.parent else (path.parent, root)


@contextlib.contextmanager
def _importing_from(folders: tuple[Path, ...]) -> Iterator[None]:
    """Import from these folders first. The modules of other users' files are not found in the
    meantime, so that two files may have neighbours of the same name."""
    neighbours = _NEIGHBOURS.setdefault(folders, {})
    others = {name for other in _NEIGHBOURS.values() if other is not neighbours for name in other}
    hidden = {name: sys.modules.pop(name) for name in others if name in sys.modules}
    sys.modules.update(neighbours)
    known = set(sys.modules)
    first = [str(folder) for folder in folders]
    sys.path[:0] = first
    try:
        yield
    finally:
        for entry in first:
            with contextlib.suppress(ValueError):  # the user's code has removed it
                sys.path.remove(entry)
        # For threads and processes of the user's.
        sys.path.extend(entry for entry in first if entry not in sys.path)
        new = sys.modules.keys() - known if len(sys.modules) != len(known) else ()
        neighbours.update({name: sys.modules[name] for name in new if _is_in(folders, name)})
        sys.modules.update(hidden)


def _is_in(folders: tuple[Path, ...], name: str) -> bool:
    """Whether a module is a file of these folders by its name, not one of a virtual environment
    below them. Modules of this package do not count."""
    file = getattr(sys.modules[name], "__file__", None)
    paths = [folder.joinpath(*name.split(".")) for folder in folders]
    candidates = [
        candidate for path in paths for candidate in (path.with_suffix(".py"), path / "__init__.py")
    ]
    return file is not None and Path(file) in candidates and not name.startswith("megatron_gspo.")


def _reason(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}".split("\n")[0])
