"""Every value is written and explained once, has a type, and fits the rest."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest

from runlab.config.cli.preflight import preflight
from runlab.config.loading import CONF, complete, from_dict, to_dict, to_yaml
from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config, Level, key_types
from runlab.errors import ConfigError
from runlab.run.read import raw_config

FILES = sorted(CONF.rglob("*.yaml"))
ENVS = [path.stem for path in FILES if path.parent.name == "env" and not path.name.startswith("_")]
RECIPES = [
    path.stem for path in FILES if path.parent.name == "recipe" and path.stem.partition("-")[0] in ALGORITHMS
]
FIRST = next(iter(ALGORITHMS))  # it is tried with all that is the same for every algorithm


@functools.cache  # several tests look at the same configurations, and none writes to them
def compose(*words: str) -> Config:
    # A developer's own conf/local/default.yaml must not decide about the tests.
    (config,) = preflight([*words, "local=null"]).configs
    return config


def unexplained(text: str) -> list[str]:
    """Keys that set a value without a comment on their line; Hydra's own blocks need none."""
    own = re.sub(r"^(defaults|hydra):\n(?:[ -].*\n|\n)*", "", text, flags=re.MULTILINE)
    return re.findall(r"^ *([A-Za-z_]\w*): *[^\s#](?!.*\s#\s*\S)", own, re.MULTILINE)


# Said by the comment above the file or by its neighbour, in the words of that file.
EXPLAINED_TOGETHER = {
    "algo": {"name", "log_std_max"},
    "env": {"id", "continuous"},
    "determinism": {"level", "cudnn_deterministic"},
    "logger": {"console", "tensorboard", "enabled"},
}


def test_every_value_is_explained_where_it_is_set() -> None:
    for path in FILES:
        name, text = path.relative_to(CONF), path.read_text(encoding="utf-8")
        if name != Path("local/default.yaml"):
            assert set(unexplained(text)) <= EXPLAINED_TOGETHER.get(name.parts[0], set()), name
            assert text.lstrip().startswith("#"), f"{name} does not say what it is"
    assert unexplained("a: 1 # one\nb: 2\nc:\n  d: 3\n  e: '#4' # four\n") == ["b", "d"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_all_pairs_compose_and_their_debugging_runs_are_short_and_learn(algo: str) -> None:
    recipes = {name.partition("-")[2] for name in RECIPES if name.startswith(f"{algo}-")}
    assert {*ENVS} >= recipes
    without = [env for env in ENVS if env not in recipes]  # which go the same way, so one may stand for them
    alike = dict[str, str]()  # one environment for each set of values that a debugging run has to do with
    for env in [*sorted(recipes), *(without if algo == FIRST else without[:1])]:
        config = compose(f"algo={algo}", f"env={env}")
        assert config.algo.name == algo
        assert config.recipe == (f"{algo}-{env}" if f"{algo}-{env}" in RECIPES else None)
        alike.setdefault(f"{config.algo} {config.env.num_envs}", env)
    assert alike
    for env in alike.values():
        config = compose(f"algo={algo}", f"env={env}", "debug=fast")
        total = config.total_env_steps
        assert total <= 5000
        assert min(config.log_every, config.eval_every, config.video_every) > 0
        assert max(2 * config.log_every, config.eval_every, config.video_every) <= total
        assert late_updates(config) == []
        assert list(config.algo.notes(config.env.num_envs, total)) == []
    without_file = dataclasses.replace(compose(f"algo={algo}", "recipe=null"), total_env_steps=2)
    (line,) = late_updates(without_file)  # too short for every algorithm
    assert f"conf/debug/algo/fast-{algo}.yaml" in line


def late_updates(config: Config) -> list[str]:
    """Keys that put the first update behind half of a run, and the file that has to set them."""
    name, before = config.algo.name, {"learning_starts": 1, "num_steps": config.env.num_envs}
    steps = {key: each * getattr(config.algo, key, 0) for key, each in before.items()}
    return [
        f"algo.{key}: the first update comes after {each} of {config.total_env_steps} steps; set it in "
        f"conf/debug/algo/fast-{name}.yaml"
        for key, each in steps.items()
        if 2 * each > config.total_env_steps
    ]


# OmegaConf takes every whole number and words such as `on` for true.
ABSURD: dict[Any, list[Any]] = {
    bool: [10_000_000, 0, 1.0, "on", "true"],
    int: [10**30, -(10**30)],
    float: [1e30, -1e30, 1e-300, float("nan")],
}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_key_refuses_a_value_of_another_type_and_some_a_value_out_of_range(algo: str) -> None:
    """Keys outside of `algo`, and inherited ones, are tried with the first algorithm that has them."""
    values = to_dict(compose(f"algo={algo}"))
    inherited = ALGORITHMS[FIRST].config.__dataclass_fields__ if algo != FIRST else {}
    specs = (spec for spec in fields(ALGORITHMS[algo].config) if spec is not inherited.get(spec.name))
    own = {f"algo.{spec.name}" for spec in specs}
    assert own
    assert to_dict(from_dict(values)) == values
    wrong: list[tuple[str, Any]] = [("algo.hidden_sizes", [64, 0]), ("env.num_workers", 9), ("algo.new", 1)]
    for key, hint in key_types(algo).items():
        if is_dataclass(hint):  # no value, but a group of keys
            continue
        if algo != FIRST and key not in own:
            continue
        is_text = hint is str or (str in get_args(hint) and get_origin(hint) not in (list, dict))
        wrong.append((key, ["a", "list"] if is_text else "neither a number nor a name"))
        wrong += [(key, each) for kind in (hint, *get_args(hint)) for each in ABSURD.get(kind, [])]
        if NoneType not in get_args(hint):
            wrong.append((key, None))
    for key, value in wrong:
        with pytest.raises(ConfigError):
            from_dict(with_value(values, key, value))


def test_a_key_that_is_no_text_is_refused_because_a_record_would_make_it_text() -> None:
    values = to_dict(compose())
    values["env"]["kwargs"] = {"bonus": [{"deep": {1: 5.0}}]}
    with pytest.raises(ConfigError, match=r"env\.kwargs: names inside it must be text: put 1 in quotes"):
        from_dict(values)


def with_value(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {**values, head: with_value(values[head], rest, value) if rest else value}


def test_a_text_is_resolved_once_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "71")
    monkeypatch.setenv("VARIABLE", "${oc.env:SECRET}")
    words = [r"logger.wandb.project='\${oc.env:SECRET}'", "logger.wandb.entity=${oc.env:VARIABLE}"]
    wandb = compose(*words).logger.wandb  # what is typed is resolved once
    assert (wandb.project, wandb.entity) == ("${oc.env:SECRET}", "${oc.env:SECRET}")
    path = tmp_path / "config.yaml"
    for text in ("${oc.env:SECRET}", r"\${oc.env:SECRET}", r"a\\${b", "${x", r"ends with \\", "1e3"):
        values = to_dict(compose())
        values["note"] = values["logger"]["wandb"]["project"] = text
        values["logger"]["wandb"]["tags"] = [text]
        values["env"]["kwargs"] = {"name": text, "more": [text, {"deep": text}]}
        config = from_dict(values)
        assert to_dict(config) == values
        path.write_text(to_yaml(config), encoding="utf-8")
        assert complete(raw_config(tmp_path))[0] == config
    path.write_text(to_yaml(compose()).replace("seed: 1", "seed: ${oc.env:SECRET}"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"of another version: (?!.*71).*seed"):  # without the value of it
        complete(raw_config(tmp_path))[0]


def test_an_experiment_comes_on_top_of_the_recipe_of_the_pair() -> None:
    recipe, both = compose("env=CartPole"), compose("env=CartPole", "experiment=seven-runs")
    assert (both.recipe, both.experiment) == ("ppo-CartPole", "seven-runs")
    assert to_dict(both.algo) == to_dict(recipe.algo)
    assert both.total_env_steps != recipe.total_env_steps
    alone = compose("env=CartPole", "experiment=seven-runs", "recipe=null")
    assert alone.recipe is None
    assert to_dict(alone.algo) != to_dict(recipe.algo)
    # An experiment may take the place of the recipe as well, unless the command names one.
    stories = ["env=Pendulum", "experiment=batch-sizes"]
    assert compose(*stories).recipe is None
    assert compose(*stories, "recipe=ppo-CartPole").recipe == "ppo-CartPole"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_key_that_came_after_a_run_takes_the_value_of_conf(algo: str) -> None:
    # What a level sets is the same for every algorithm.
    for level in Level if algo == FIRST else [Level.repeat]:
        # An older run was not compiled and had one thread, whatever this machine gains by.
        words = [f"algo={algo}", f"determinism={level.name}", "recipe=null"]
        now = compose(*words, "num_threads=1", "compile=false")
        values = to_dict(now)
        kept = {key: values[key] for key in ("env", "seed", "total_env_steps")}
        bare = {"algo": {"name": algo}, "determinism": {"level": level.name}, "logger": {"wandb": {}}}
        config, added = complete({**kept, **bare})
        assert config == now
        assert len(added) > 30
        assert added["determinism.hash_seed"] == now.determinism.hash_seed
    assert complete(to_dict(now)) == (now, {})
    removed = to_dict(now)
    removed["logger"]["journal"] = True  # a key of earlier versions
    assert complete(removed) == (now, {})
    with pytest.raises(ConfigError, match="no value for "):  # for what a process is told must be whole
        from_dict({**kept, **bare})
    for name in ("seed", "total_env_steps"):  # of every run
        values = to_dict(now)
        del values[name]
        with pytest.raises(ConfigError, match=f"^no value for {name}:"):
            complete(values)


def test_a_former_hyperparameter_is_read_with_the_value_that_changes_nothing() -> None:
    now = compose("algo=sac", "num_threads=1", "compile=false")
    values = to_dict(now)
    assert complete({**values, "algo": {**values["algo"], "critic_norm": "none"}}) == (now, {})
    with pytest.raises(ConfigError, match=r"^algo.critic_norm=layer: algo=sac has only what none meant;"):
        complete({**values, "algo": {**values["algo"], "critic_norm": "layer"}})
    with pytest.raises(
        ConfigError, match=r"algo\.critic_norm=none: no such key; did you mean algo\.network\?"
    ):
        preflight(["algo=sac", "env=Pendulum", "algo.critic_norm=none"])


def test_a_hyperparameter_that_there_is_is_no_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = compose("algo=sac", "num_threads=1", "compile=false")
    gamma = to_dict(now)["algo"]["gamma"]
    monkeypatch.setitem(ALGORITHMS, "sac", dataclasses.replace(ALGORITHMS["sac"], former={"gamma": gamma}))
    assert complete(to_dict(now)) == (now, {})
    assert compose("algo=sac", "num_threads=1", "compile=false") == now
