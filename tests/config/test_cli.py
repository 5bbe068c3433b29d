"""What the words of training mean; those that are refused are in test_bad_input.py."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from conftest import ROOT
from hydra._internal.utils import get_args_parser

from runlab.__main__ import main
from runlab.config.cli import composition, files
from runlab.config.cli import preflight as preflight_module
from runlab.config.cli.preflight import preflight
from runlab.config.command_args import whole
from runlab.config.loading import CONF, to_dict, to_yaml
from runlab.config.yaml_files import DEEPEST, MAX_DIGITS
from runlab.errors import ConfigError
from runlab.launch.checks import check_plan
from runlab.run.validation import parse_json, parse_yaml


def test_lists_of_values_make_a_sweep() -> None:
    for words, num_jobs in {
        "seed=1,2,3": 3,
        "seed=choice(1,2) algo=ppo,sac": 4,
        "env=glob(*Walker*)": 2,
        "algo=sac,sac algo.tau=0.1": 2,  # a key that the default algorithm lacks
        "algo.hidden_sizes=[64,64],[32]": 2,
        "-m": 1,
    }.items():
        plan = preflight(words.split())
        assert (plan.sweep, plan.num_jobs) == (True, num_jobs)
        assert set(plan.argv) & {"-m", "--multirun"}


DIGITS = b"9" * 6000
HEAD = "# @package _global_\n"
NOTES = ['it\'s "so", [x] {y} (z) a=b $HOME \\ end\\', "range(1,3), ünï", "'one', 'two'"]


@pytest.mark.parametrize("note", [*NOTES, r"costs ${x}, ${seed}, ${oc.env:HOME}, \${y} and ${z", "null"])
def test_a_note_is_prose(note: str) -> None:
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        preflight(["note=caf\udce9"])
    plan = preflight([f"note={note}", "seed=1,2"])
    assert plan.num_jobs == 2  # for the seeds alone
    assert [config.note for config in plan.configs] == [None if note == "null" else note]
    assert plan.words == ["seed=1,2"]  # why a sweep is made is not which one it is


@pytest.mark.parametrize("name", ["9e5387", "123456", "it's, [here]", "~/a b"])
def test_a_text_stays_as_it_was_typed(name: str) -> None:
    (config,) = preflight([f"baseline={name}", f"logger.wandb.project={name}"]).configs
    assert (config.baseline, config.logger.wandb.project) == (name, name)


def test_an_id_of_a_file_is_the_file_and_others_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("space/Pole-v3", "gymnasium.envs.classic_control:CartPoleEnv")
    monkeypatch.setitem(gymnasium.registry, "space/Pole-v3", spec)
    for word, (hydra, env_ids) in {
        "env='Hopper-v5'": ("env=Hopper", ["Hopper-v5"]),
        "env=Hopper-v4": ("env=Hopper-v4", ["Hopper-v4"]),
        "env=gymnasium:Taxi-v4": ("env=gymnasium:Taxi-v4", ["gymnasium:Taxi-v4"]),
        "env=space/Pole-v3,CartPole-v1": ("env=space/Pole-v3,CartPole", ["space/Pole-v3", "CartPole-v1"]),
    }.items():
        plan = preflight([word])
        assert plan.argv[0] == hydra
        assert [(each.env.id, each.env.kwargs) for each in plan.configs] == [(name, {}) for name in env_ids]


@pytest.mark.parametrize("sign", ["", "+"])
def test_arguments_of_an_environment_are_added_and_wrappers_keep_their_order(sign: str) -> None:
    words = ["env.kwargs={gravity: -5}", "env.kwargs.wind.power=2"]
    words += ["env.wrappers={own.module:Class:null,A:{x:1}}", "env.training_wrappers.B.y.z=2"]
    words = [*(sign + word for word in words), "env.kwargs.continuous=false", "env.infos=[a.b]"]
    (config,) = preflight(["env=LunarLanderContinuous", *words]).configs
    assert config.env.kwargs == {"continuous": False, "gravity": -5, "wind": {"power": 2}}
    assert list(config.env.wrappers.items()) == [("own.module:Class", None), ("A", {"x": 1})]
    assert (config.env.training_wrappers, config.env.infos) == ({"B": {"y": {"z": 2}}}, ["a.b"])
    (config,) = preflight(["env=LunarLanderContinuous", f"{sign}env.kwargs={{}}"]).configs
    assert config.env.kwargs == {}  # and not joined with those of the file
    (config,) = preflight(["determinism=profile", f"{sign}determinism.golden={{}}"]).configs
    assert config.determinism.golden == {}
    with pytest.raises(ConfigError, match=r"determinism\.golden\.lib=1: no such key"):
        preflight(["determinism.golden.lib=1"])
    with pytest.raises(ConfigError, match=r"^env.kwargs.gravity=-5: env.kwargs=\{\} leaves out all"):
        preflight(["env=LunarLander", f"{sign}env.kwargs={{ }}", "env.kwargs.gravity=-5"])


def test_a_mistake_in_the_file_of_an_algorithm_is_explained_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = Path(shutil.copytree(CONF, tmp_path / "conf"))
    for module in (composition, files, preflight_module):
        monkeypatch.setattr(module, "CONF", conf)
    monkeypatch.chdir(tmp_path)
    file = conf / "algo" / "ppo.yaml"
    values = file.read_text()
    for text, expected in {
        values.replace("name: ppo", "name: sac"): "algo=ppo: its file says name: sac, must be ppo",
        values.replace(HEAD, ""): "conf/algo/ppo.yaml: its first line has to be '# @package _global_'",
        values.replace(
            "_ppo@algo", "_sac@algo"
        ): "conf/algo/ppo.yaml: .* of another algorithm; use _ppo@algo",
        values.replace(
            "_ppo@algo", "_pp@algo"
        ): "'defaults:' of a file: _pp@algo: no algorithm pp in ALGORITHMS",
    }.items():
        assert text != values
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^{expected}"):
            preflight([])


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize("group", ["experiment", "env", "algo", "sweep"])
def test_a_file_that_cannot_be_read_is_named_with_the_line(group: str, tmp_path: Path) -> None:
    """OmegaConf and Hydra would answer by tracebacks that name no file, by silence, or never."""
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir()
    for text, expected in {
        b"# one\nnote: caf\xe9\n": ", line 2: is not text in UTF-8",
        b"seed: 1\n\0": ": unacceptable character #x0000",
        b"seed: 1\nseed: 2\n": ", line 2: found duplicate key seed",
        b"- 1\n": ", line 1: expected keys with values",
        b"3": ", line 1: expected keys with values",
        b"seed: 1\nnull: 2\n": ", line 2: names must be text: put null in quotes",
        b"env:\n  kwargs: {1: 2}\n": ", line 2: names must be text: put 1 in quotes",
        b"? [a]\n: 1\n": ", line 1: names must be text",
        b"seed: " + DIGITS: ", line 1: a number of 6,000 digits",
        b"seed: " + b"[" * 400 + b"]" * 400: ", line 1: is nested more than 20 levels deep",
        b"seed: " + b"[" * 9999 + b"]" * 9999: ", line 1: is nested more than 20 levels deep",
        b"seed: &a [*a]\n": ", line 1: contains itself",
        BOMB.encode(): ", line 5: more than 100,000 values",
        b"note: !!python/object/apply:os.system [ls]\n": ", line 1: !!python/object/apply:os.system: exp",
        b"note: !!set {a}\n": ", line 1: !!set: expected a list or a mapping",
        b"note: ${\n": ": no viable alternative at input '${'",
        b"seed: 1\ndefaults:\n": ", line 2: defaults: expected a list of files",
        b"defaults: [3]\n": ", line 1: defaults: expected a list of files",
        b"hydra: 3\n": ", line 1: hydra: expected keys with values",
    }.items():
        file.write_bytes(text)
        with pytest.raises(ConfigError) as refused:
            preflight([f"--config-dir={tmp_path}", f"{group}=mine"])
        assert f"{file}{expected}" in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    file.unlink()
    file.mkdir()
    for link in (False, True):
        if link:
            file.rmdir()
            file.symlink_to("nowhere")
        with pytest.raises(ConfigError, match="allowed: "):
            preflight([f"--config-dir={tmp_path}", f"{group}=mine"])


def test_mistakes_that_only_whole_files_have_are_explained(tmp_path: Path) -> None:
    for words, mistakes in {
        "experiment=mine": {
            "defaults: [mine]": "is listed below its own 'defaults:'",
            "# @package\nseed: 1": f"{tmp_path}/experiment/mine.yaml: Expected header",
            "gamma: 0.9": "mine.yaml: its first line has to be '# @package _global_'",
            f"{HEAD}total_env_step: 9": "total_env_step: no such key; did you mean total_env_steps?",
            f"{HEAD}device: gpu": "device: Invalid value 'gpu', expected one of [cpu, cuda, auto]",
            f"{HEAD}recipe: ppo-Hopper": "recipe=ppo-Hopper in a file has no effect; list it below 'def",
            f"{HEAD}algo: {{normalize_obs: 7}}": "algo.normalize_obs=7: expected auto, true",
            f"{HEAD}algo: sac": "mine.yaml: algo: expected keys with values, got sac",
            f"{HEAD}defaults: [override /algo: sca]": "algo/sca: no such file; did you mean sac?",
            f"{HEAD}env: {{wrappers: [Own]}}": "env.wrappers: expected keys with values, got ['Own']",
        },
        "experiment=mine algo=sac": {
            f"{HEAD}algo: {{clip_coef: 0.1}}": "algo.clip_coef: algo=sac has no such key, algo=ppo has"
        },
        "logger=mine": {
            "console: 3": f"{tmp_path}/logger/mine.yaml: logger.console=3: expected true or false"
        },
        "algo=mine": {
            f"{HEAD}algo: {{name: ppo}}": "algo=mine: its file needs 'defaults: [_NAME@algo]'",
            f"{HEAD}seed: 3": "algo=mine: its file needs 'defaults: [_NAME@algo]'",
        },
        "sweep=mine": {"seed: 1,x\nalgo.gama: 1": "(in sweep=mine)"},
    }.items():
        file = tmp_path / words.partition("=")[0] / "mine.yaml"
        file.parent.mkdir(exist_ok=True)
        for text, expected in mistakes.items():
            file.write_text(f"{text}\n")
            with pytest.raises(ConfigError) as refused:
                preflight([f"--config-dir={tmp_path}", *words.split()])
            assert expected in str(refused.value)
            assert len(str(refused.value).splitlines()) == 1


def test_the_deepest_and_longest_values_are_read_back_from_a_record() -> None:
    deepest, longest = "[" * DEEPEST + "]" * DEEPEST, "9" * MAX_DIGITS
    (config,) = preflight([f"env.kwargs.a={deepest}", f"env.kwargs.b={longest}"]).configs
    values = to_dict(config)
    assert parse_yaml(to_yaml(config), "config.yaml") == values
    assert parse_json(json.dumps({"config": values}), "a manifest") == {"config": values}


def test_text_that_is_not_ascii_needs_no_quotes() -> None:
    words = [
        "env.kwargs.name=grün und blau",
        "env.kwargs.more={a: {b: [grün, 'ß, ß', x]}}",
        "env.infos=[größe]",
    ]
    for more in ([], ["seed=1,2"]):
        env = preflight([*words, *more]).configs[0].env
        assert env.kwargs == {"name": "grün und blau", "more": {"a": {"b": ["grün", "ß, ß", "x"]}}}
        assert env.infos == ["größe"]
    plan = preflight(["env.kwargs.name=grün,日本"])
    assert [each.env.kwargs["name"] for each in plan.configs] == ["grün", "日本"]


def test_a_check_that_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(preflight_module, "_SOON", 1)
    preflight(["algo.gamma=0.9,0.8", "seed=1,2"])
    assert capsys.readouterr().err == "2 configurations are checked first, which takes about 0 s\n"
    preflight(["seed=1,2"])
    assert capsys.readouterr().err == ""


def test_a_file_of_conf_sweep_stands_for_its_words() -> None:
    typed = preflight(["seed=1,2,3,4,5", "algo=sac"])
    plan = preflight(["sweep=five-seeds", "algo=sac"])
    assert (plan.argv, plan.words, plan.num_jobs) == (typed.argv, typed.words, 5)
    for sweep in (["sweep=five-seeds,resume"], ["sweep=five-seeds", "sweep=resume"]):
        again = preflight([*sweep, "algo=sac", "seed=7,8"])
        assert (again.resume, again.num_jobs, again.words) == (True, 2, ["algo=sac", "seed=7,8"])
    assert preflight(["sweep=paper", "seed=1"]).num_jobs == len(
        {"Hopper", "Walker2d", "HalfCheetah", "Swimmer"}
    )


def test_a_plus_of_hydra_says_nothing_but_for_its_launcher() -> None:
    plan = preflight(["sweep=five-seeds", "+seed=7", "++algo=sac", "+hydra.launcher.batch_size=1"])
    assert (plan.seeds, plan.configs[0].algo.name, plan.words) == ([7], "sac", ["seed=7", "algo=sac"])
    assert "++hydra.launcher.batch_size=1" in plan.argv


def test_configurations_of_another_folder_are_found_and_guessed(tmp_path: Path) -> None:
    for group, text in {"experiment": f"{HEAD}seed: 9", "env": "id: CartPole-v1"}.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"{text}\n")
    (tmp_path / "env" / "old.yaml").write_text("defaults: [_gymnasium, _self_]\nid: Acrobot-v1")
    assert preflight([f"--config-dir={tmp_path}", "env=old"]).configs[0].env.id == "Acrobot-v1"
    (tmp_path / "env" / "unfinished.yaml").touch()
    (tmp_path / "env" / "broken.yaml").write_text("id: [")
    assert preflight([f"--config-dir={tmp_path}", "env=MountainCar-v0"]).configs[0].env.id == "MountainCar-v0"
    words = [f"--config-dir={tmp_path}", "experiment=mine", "env=mine"]
    (config,) = preflight(words).configs
    assert (config.seed, config.experiment, config.env.id) == (9, "mine", "CartPole-v1")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "unset.yaml").write_text("name: null\nseed: 1,2\n")
    assert preflight([words[0], "sweep=unset"]).configs[0].name is None
    lines = preflight([words[0], "env=mine", "total_env_steps=1000,900000"]).auto
    assert [line.partition(", as in ")[2] for line in lines] == [
        f"env=mine total_env_steps={steps}" for steps in (1000, 900000)
    ]
    with pytest.raises(ConfigError, match="did you mean mine"):
        preflight([words[0], "experiment=mne"])
    with pytest.raises(ConfigError, match="no such experiment"):
        preflight(words[1:])


def test_questions_are_answered_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, expected in {
        "--help": "Any key of conf/ can be set.",
        "--cfg job algo=sac seed=7": "seed: 7",
    }.items():
        assert main(["train", *words.split()]) == 0
        assert expected in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []


def test_the_page_of_departures_has_each_flag_of_hydra_with_its_answer() -> None:
    page = (ROOT / "docs/configuration.md").read_text().partition("## Departures")[2].partition("\n## ")[0]
    answers = {
        flag: cells[1].strip()
        for cells in (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `-"))
        for flag in re.findall(r"`(-[\w-]+)`", cells[0])
    }
    taken = {"--help", "-h", "--multirun", "-m", "--cfg", "--config-dir"}
    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert len(flags) > 20
    assert flags == taken | {*answers}
    assert all(f"`{flag}" in page for flag in taken)
    for flag in flags - taken:
        with pytest.raises(ConfigError, match=f"^{flag}: {re.escape(answers[flag])}$"):
            preflight([flag, "x"])
    with pytest.raises(ConfigError, match=r"^--with-package: no such key"):
        preflight(["--with-package"])


def test_whole_numbers_may_be_powers_of_ten() -> None:
    for word, expected in {
        "total_env_steps=1e6": ["total_env_steps=1000000"],
        "total_env_steps=1e5,2.5E+5": ["total_env_steps=100000", "total_env_steps=250000"],
        "total_env_steps=range(1e5,3e5,1e5)": ["total_env_steps=100000", "total_env_steps=200000"],
        "algo.hidden_sizes=[6.4e1,32]": ["algo.hidden_sizes=[64,32]"],
        "env.num_workers=1e0": ["env.num_workers=1"],
        "num_threads=1e0": ["num_threads=1"],
        "algo.learning_rate=1e-3": ["algo.learning_rate=1e-3"],
        "note=1e6 of these": ["note=1e6 of these"],
        "baseline=1e6": ["baseline='1e6'"],
    }.items():
        words = [job[0].replace('"', "'") for job in preflight([word]).overrides]
        assert [each.replace("note='1e6 of these'", "note=1e6 of these") for each in words] == expected
    assert whole(1)("1e3") == 1000
    for text in ("1.5e0", "1e-3", "1e99", "e3", "1e"):
        with pytest.raises(ConfigError, match="expected a whole number"):
            whole(1)(text)
        with pytest.raises(ConfigError, match="expected a whole number"):
            preflight([f"total_env_steps={text}"])


def test_a_tilde_means_null() -> None:
    plan = preflight(["env=Hopper", "~recipe"])
    assert (plan.configs[0].recipe, plan.overrides) == (None, [["env=Hopper", "recipe=none"]])
    assert preflight(["env=Hopper"]).configs[0].recipe is not None


def test_a_run_that_would_learn_nothing_is_noted() -> None:
    # The second ends at 5100, after the first updates.
    for words, noted in {"5000": 1, "4999 env.num_envs=300": 0, "5001": 0}.items():
        (config,) = preflight(["algo=sac", "env=Hopper", *f"total_env_steps={words}".split()]).configs
        notes = list(config.algo.notes(config.env.num_envs, config.total_env_steps))
        assert ["collects random actions" in note for note in notes] == [True] * noted


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("algo=sac env=Pendulum algo.learn_alpha=false algo.target_entropy=-1,-3", "learn_alpha=false"),
        ("algo=sac env=Pendulum algo.learn_alpha=true algo.target_entropy=-1", ""),
        ("algo=sac env=Pendulum algo.learn_alpha=false", ""),  # nobody set the value that has no effect
        ("env=CartPole algo.encoder_size=64", "encoder=none"),  # the environment decides it
        ("env=CartPole algo.ent_coef=0 algo.ent_coef_schedule=linear", "ent_coef=0.0"),
    ],
)
def test_a_value_without_effect_is_noted(words: str, noted: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_plan(preflight(words.split()))
    lines = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert bool(lines) == bool(noted)
    assert all(line.startswith("note: algo.") and line.endswith(f"with algo.{noted}") for line in lines)
