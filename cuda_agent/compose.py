"""Composes, validates, freezes and loads the configuration.

``compose`` runs in the process that the user starts: Hydra merges the files of ``conf/`` with the user's overrides, and
the pydantic models of ``config`` validate the result.  ``freeze`` writes a configuration as canonical JSON.  Every
other process passes this JSON and its sha256 to ``load``, which checks the hash and validates again."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cuda_agent.config import WHERE_JUDGED, Config
from cuda_agent.errors import ConfigError

# Keys that change where or how fast a stage computes, but not its result: cache keys leave them out.
_NOT_IN_KEYS: dict[str, Any] = {
    "sandbox": set(WHERE_JUDGED),
    "policy": {"vllm": {"servers"}},
    "ray": {"address", "trainers", "trainer_cpus", "trainer_gpus", "worker_cpus", "worker_gpus"},
    "training": True,
}

# The old names of renamed keys -> their new names.
RENAMED = {
    "sandbox.lane": "sandbox.format",
    "training.ranks": "training.num_processes",
    "training.share": "training.parallelism (rows: data, tokens: context)",
    "ray.staleness": "ray.max_off_policy_steps",
    **{f"{stage}.batch_tokens": f"{stage}.tokens_per_step" for stage in ("bootstrap", "rft", "critic")},
}
for _stage in ("warmup", "agentic"):
    RENAMED |= {
        f"{_stage}.batch": f"{_stage}.episodes_per_step",
        f"{_stage}.samples": f"{_stage}.samples_per_prompt",
        f"{_stage}.importance_cap": f"{_stage}.tis_cap",
        f"{_stage}.old_logprobs": f"{_stage}.behavior_logprobs",
        f"{_stage}.batch_tokens": "training.microbatch_tokens",
    }

Model = TypeVar("Model", bound=BaseModel)
GROUPS = ("experiment", "ablation")  # folders of ``conf/``; the ablation is merged last
_ONLY_IN_TRAINING = ("max_off_policy_steps", "oversample")  # keys of ``ray`` that only training stages read


def conf_folder() -> Path:
    """Returns the folder ``conf/`` of the installed wheel.  In a clone, returns the repository's folder ``conf/``."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if (inside / "config.yaml").exists() else package.parent / "conf"


def compose(overrides: Sequence[str] = ()) -> Config:
    """Returns the validated configuration: the YAML files of ``conf/``, merged with a user's overrides.

    Args:
        overrides: Overrides in Hydra's grammar, such as ``experiment=demo`` and ``critic.lr=1e-4``.

    Raises:
        ConfigError: An override cannot be parsed, its key is unknown, or its value is not allowed."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _check_overrides(overrides)
    ConfigStore.instance().store(name="defaults", node=Config().model_dump(mode="json"))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    return validate(values)


def validate(values: Any) -> Config:
    """Returns the configuration that the nested dict ``values`` describes.  Missing keys take their defaults.  But if
    ``synthesis.seed`` is missing, as in configurations of older runs, it takes the value of ``seed``.

    Raises:
        ConfigError: A key or a value is wrong; the message explains at most 8 mistakes."""
    if isinstance(values, dict) and "seed" in values and isinstance(tasks := values.get("synthesis", {}), dict):
        values = values | {"synthesis": {"seed": values["seed"]} | tasks}
    try:
        return Config.model_validate_json(json.dumps(values), strict=True)  # strict: neither true nor "3" is a number
    except ValidationError as error:
        mistakes = {tuple(str(part) for part in problem["loc"][:2]): problem for problem in reversed(error.errors())}
        raise ConfigError("\n".join(_explain(problem) for problem in list(mistakes.values())[:8])) from error


def freeze(config: Config) -> tuple[str, str]:
    """Returns the canonical JSON of the whole configuration, defaults included, and the sha256 of this JSON."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text, hashlib.sha256(text.encode()).hexdigest()


def load(text: str, sha256: str) -> Config:
    """Returns the configuration from ``text``, which ``freeze`` wrote in another process.

    Raises:
        ConfigError: The text does not have this sha256, or does not validate."""
    actual = hashlib.sha256(text.encode()).hexdigest()
    if actual != sha256:
        raise ConfigError(f"The frozen configuration has sha256 {actual[:12]}, expected {sha256[:12]}: it was changed.")
    return validate(json.loads(text))


def section_values(config: Config, sections: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that can change the result of a stage, as a dict: name -> JSON value.  The stage's cache key
    contains them.

    ``sections`` has the names of the sections that the stage reads, or of single keys, such as ``agentic.reward``.  The
    result has these names, and ``seed``, with these exceptions:

    - ``seed`` is left out if ``sections`` contains ``synthesis``, because that section has a separate seed.
    - Settings that do not change results are left out: addresses, tokens, resources, and the section ``training``.
    - The keys of ``ray`` that only training stages read are left out if ``sections`` does not contain ``training``.
    - The section ``ray`` is left out if ``runtime`` is ``local``."""
    whole = config.model_dump(mode="json", exclude=_NOT_IN_KEYS)
    if "training" not in sections:
        whole["ray"] = {name: value for name, value in whole["ray"].items() if name not in _ONLY_IN_TRAINING}
    if config.runtime == "local":
        del whole["ray"]
    names = [name for name in _with_seed(sections) if name.split(".")[0] in whole]
    return {name: reduce(getitem, name.split("."), whole) for name in names}


def restricted(config: Config, sections: Sequence[str]) -> Config:
    """Returns a copy of the configuration with ``seed`` and the sections and keys that ``sections`` names, and nothing
    else.  If ``sections`` contains ``synthesis``, the copy lacks ``seed``, because that section has a separate seed.  A
    stage gets such a copy, so the stage's result cannot depend on a section that ``sections`` does not name."""
    return _with_only(config, _with_seed(sections))


def _with_seed(sections: Sequence[str]) -> Sequence[str]:
    return sections if "synthesis" in sections else ("seed", *sections)


def _with_only(model: Model, names: Sequence[str]) -> Model:
    part = model.model_copy()
    for field in type(model).model_fields:
        keys = [name.partition(".")[2] for name in names if name.split(".")[0] == field]
        if not keys:
            del part.__dict__[field]
        elif "" not in keys:
            part.__dict__[field] = _with_only(part.__dict__[field], keys)
    return part


def key_paths() -> dict[str, FieldInfo]:
    """Returns dotted path -> pydantic field for every section and every key that a user can set."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, info in model.model_fields.items():
            yield prefix + name, info
            if _is_section(info):
                yield from walk(cast(type[BaseModel], info.annotation), f"{prefix}{name}.")

    return dict(walk(Config, ""))


def flat(config: Config) -> dict[str, Any]:
    """Returns dotted path -> value for every key that is not a section.  MLflow shows these pairs as parameters."""
    return flat_values(config.model_dump(mode="json"))


def flat_values(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted path -> value for every value in nested dictionaries.  Each path begins with ``prefix``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat_values(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def parse_override(text: str) -> Any:
    """Parses an override such as ``critic.lr=1e-4``, and returns Hydra's object for it.

    Raises:
        ConfigError: The text is not an override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        expected = "expected `key=value` in Hydra's grammar, as in critic.lr=1e-4"
        raise ConfigError(f"{text}: {expected}. {str(error).splitlines()[0]}") from error


def _check_overrides(overrides: Sequence[str]) -> None:
    known = key_paths()
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(f"{key}: expected one value, not a sweep. A list is written [a,b].")
        if key in GROUPS:
            choices = sorted(path.stem for path in (conf_folder() / key).glob("*.yaml"))
            if (name := override.value()) not in choices:  # not null either: Hydra refuses it
                expected = f"expected one of {', '.join(choices)}."
                raise ConfigError(f"{key}={name}: {expected}" + _nearest(str(name), choices))
        elif key not in known:
            raise ConfigError(f"{key}: there is no such key." + _nearest(key, [*GROUPS, *known]))
        elif _is_section(known[key]) and not isinstance(override.value(), dict):
            first = next(path for path in known if path.startswith(f"{key}."))
            raise ConfigError(f"{key}: expected a key of this section, as in {first}=…")


def _explain(problem: Any) -> str:
    known = key_paths()
    parts = [str(part) for part in problem["loc"]]
    path = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        return f"{path}: there is no such key." + _nearest(path, list(known))
    while parts and ".".join(parts) not in known:
        parts.pop()
    key = ".".join(parts)
    if problem["type"] == "value_error":  # raised by a validator in ``config`` that compares several keys
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    info = known[key]
    line = f"{key}: expected {_type_words(info.annotation, [*info.metadata])}, got {problem['input']!r}."
    return line + (f"\n  {key} is: {info.description}" if info.description else "")


def _type_words(annotation: Any, metadata: list[Any]) -> str:
    """Describes a type and its constraints (``metadata``) in words, such as "a number > 0 and < 1"."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _type_words(inner, [*more, *metadata])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_words(arg, metadata if arg is not type(None) else []) for arg in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        parts = [_type_words(part, []) for part in get_args(annotation)]
        return f"a list of {len(parts)}: [{', '.join(parts)}]"
    if get_origin(annotation) is list:
        return "a list, each " + _type_words(get_args(annotation)[0], [])
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    constraints = [constraint for item in metadata for constraint in getattr(item, "metadata", None) or [item]]
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    bounds = [f"{sign} {getattr(c, name)}" for c in constraints for name, sign in signs if hasattr(c, name)]
    return words.get(annotation, "a section") + (f" {' and '.join(bounds)}" if bounds else "")


def _nearest(name: str, choices: Sequence[str]) -> str:
    """Returns a hint for a wrong ``name``, as in " Did you mean critic.lr?".  ``choices`` are the correct names."""
    if name in RENAMED:
        return f" It is called {RENAMED[name]} now."
    tails = {choice: choice.rsplit(".", 1)[-1] for choice in choices}
    last = name.rsplit(".", 1)[-1]
    similar = difflib.get_close_matches(last, tails.values(), 1, 0.7)
    close = (
        difflib.get_close_matches(name, choices, n=1, cutoff=0.8)
        or [choice for choice, tail in tails.items() if tail == last][:3]
        or [choice for choice, tail in tails.items() if tail in similar][:3]
        or difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    )
    return f" Did you mean {' or '.join(close)}?" if close else " `cuda-agent config` prints all keys."


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
