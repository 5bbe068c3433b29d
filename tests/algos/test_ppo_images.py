"""PPO from pixels keeps the guarantees. What it computes is in test_references.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure, Programs, build, small
from gymnasium import spaces
from torch import Tensor, nn

from rltemplate.algos.ppo_config import LAST_FILTERS, PPOConfig
from rltemplate.learning.networks import Encoder, Rows, convolutions, mlp
from rltemplate.learning.optim import FlatModule, gradient
from runlab.config.loading import to_dict
from runlab.config.schema import Config
from runlab.determinism import kernels
from runlab.determinism.checks import check_repeats, check_rows, differing_rows, passes_of
from runlab.envs.codec import FlatCodec
from runlab.envs.images import ImageBox
from runlab.errors import ConfigError
from runlab.interfaces import ForwardPass
from runlab.machine import cpu_identity
from runlab.rerun.policy import load_policy
from runlab.rerun.policy_file import export_policy, run_or_policy
from runlab.run.checkpoint import Checkpoints

FEW = ["algo.encoder_size=16", "env.max_episode_steps=5"]  # which also truncates


def ppo_from_pixels(configure: Configure, *words: str) -> Any:
    return build(configure(*small("ppo", *FEW, *words, env="Catch")))[0]


Network = Callable[[Tensor], Tensor]


def together(network: Network, x: Tensor) -> Tensor:
    """A network whose rows depend on how many there are."""
    return network(x) * (1.0 + 1e-6 * len(x))


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_the_first_ratio_is_one_where_rows_are_on_their_own(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, num_envs: int
) -> None:
    kernels.use("padded")
    ppo = ppo_from_pixels(configure, f"env.num_envs={num_envs}")
    for _ in range(2):
        assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) == 0.0
    by_rows = kernels.by_rows
    monkeypatch.setattr(kernels, "by_rows", lambda network, x: together(lambda y: by_rows(network, y), x))
    assert float(ppo.train_iteration().metrics["policy/first_ratio_max_error"]) > 0.0
    ppo.close()


def test_the_checks_of_a_level_try_the_encoder(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use("padded")
    config = configure(*small("ppo", *FEW, "determinism=invariant", env="Catch"))
    ppo = build(config)[0]
    passes = passes_of(ppo, config, ["rows"])
    assert check_rows(config, passes)["networks"] == ["policy and value"]
    assert "the policy and value network" in check_repeats(config, passes)["tried"]
    by_rows = kernels.by_rows
    monkeypatch.setattr(kernels, "by_rows", lambda network, x: together(lambda y: by_rows(network, y), x))
    with pytest.raises(ConfigError, match="the policy and value network gives a row other bits in a batch"):
        check_rows(config, passes)
    ppo.close()


@pytest.mark.parametrize("products", ["strict", "padded", "tiled", "plain"])
def test_convolutions_of_one_image_are_those_of_many_above_the_level_repeat(products: str) -> None:
    """Torch gives a single image to other code than two of them."""
    layers = convolutions("nature", 1, True, torch.Generator().manual_seed(0))
    network = Rows(nn.Unflatten(1, (1, 36, 36)), layers)
    kernels.use(products)
    where = differing_rows(ForwardPass(network, 36 * 36, (8, 64), convolves=True), torch.device("cpu"))
    assert (where is None) == (products != "plain"), where


@pytest.mark.parametrize(
    ("products", "layers"), [("padded", "convolutions"), ("padded", "six outputs"), ("plain", "convolutions")]
)
def test_weights_learn_the_same_on_two_threads_where_the_level_says_so(products: str, layers: str) -> None:
    """Without it, convolutions add in another order, at least those for AVX-512."""
    rng = torch.Generator().manual_seed(0)
    net = Rows(Encoder("small", (3, 7, 7), 8, True, rng))
    if layers == "six outputs":
        net = mlp([147, 6], "relu", rng)
    module: FlatModule[Any] = FlatModule(net)
    obs = torch.randint(256, (256, 147), generator=rng, dtype=torch.uint8)
    obs = obs.float() if layers == "six outputs" else obs
    found = []
    kernels.use(products)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gradient(lambda x: (module.apply(x, obs).square().sum(), ()), module.init_params)[0])
        assert torch.get_num_threads() == threads
    same = torch.equal(*found)
    assert same or products == "plain"
    if layers == "convolutions" and "avx512f" in cpu_identity()[1]:
        assert same == (products == "padded")


def test_a_rollout_keeps_observations_once_and_in_bytes(configure: Configure) -> None:
    ppo = ppo_from_pixels(configure)
    rollout = ppo.collect(ppo.begin_iteration())
    assert rollout.obs.dtype == rollout.final_obs.dtype == torch.uint8
    assert rollout.obs.data_ptr() == rollout.normalized_obs.data_ptr()
    assert len(rollout.final_obs) > 0
    assert {*rollout.obs.unique().tolist()} == {0, 255}
    ppo.close()
    scaled: Any = build(configure(*small("ppo", "algo.normalize_obs=true")))[0]
    rollout = scaled.collect(scaled.begin_iteration())
    assert rollout.obs.data_ptr() != rollout.normalized_obs.data_ptr()
    scaled.close()


def test_policy_and_value_share_an_encoder_with_the_stated_gains(configure: Configure) -> None:
    ppo = ppo_from_pixels(configure)
    agent = ppo.net.module
    gains = {"encoder": 2**0.5, "actor": 0.01, "critic": 1.0}
    sizes = {"encoder": 4, "actor": 1, "critic": 1}
    for name, gain in gains.items():
        weights = [p.flatten(1) for p in getattr(agent, name).parameters() if p.dim() > 1]
        assert len(weights) == sizes[name]
        for weight in weights:
            short = weight if len(weight) <= weight.shape[1] else weight.T
            torch.testing.assert_close(short @ short.T, gain**2 * torch.eye(len(short)), atol=1e-5, rtol=1e-4)
    ppo.close()


@pytest.mark.parametrize(("name", "edge"), [("nature", 36), ("impala", 8), ("small", 4)])
def test_an_encoder_takes_the_smallest_image_and_no_smaller_one(name: str, edge: int) -> None:
    """And images that are not square. The configuration refuses what would not work."""
    rng = torch.Generator().manual_seed(0)
    for shape in (3, edge, edge), (1, edge, edge + 5):
        encoder = Encoder(name, shape, 7, True, rng)
        assert encoder(torch.zeros(2, int(np.prod(shape)) + 3)).shape == (2, 10)
    for height, width in ((edge, 2 * edge + 3), (84, 96), (91, 100)):
        filters, less, by = LAST_FILTERS[name]
        features = Encoder(name, (1, height, width), 1, False, rng).linear.in_features
        assert features == filters * ((height - less) // by) * ((width - less) // by)
    if name != "impala":
        with pytest.raises(RuntimeError):
            Encoder(name, (3, edge - 1, edge), 7, True, rng)


def test_images_of_a_large_batch_keep_their_order() -> None:
    """Of which some are convolved at once."""
    rng = torch.Generator().manual_seed(0)
    encoder = Encoder("small", (1, 4, 4), 7, True, rng)
    obs = torch.randint(256, (600, 16), generator=rng, dtype=torch.uint8)
    torch.testing.assert_close(encoder(obs), torch.cat([encoder(row[None]) for row in obs]))


def codec_of(height: int, width: int) -> FlatCodec:
    box = ImageBox(0, 255, (3 * height * width,), np.uint8)
    box.image_shape = (3, height, width)
    return FlatCodec("Some-v0", box, spaces.Discrete(2))


def test_auto_takes_encoder_and_normalisation_by_what_is_observed(configure: Configure) -> None:
    auto = configure("algo=ppo", "env=Catch").algo
    assert isinstance(auto, PPOConfig)
    assert (auto.encoder, auto.normalize_obs) == ("auto", "auto")
    for edge, name in (84, "nature"), (36, "nature"), (35, "small"), (7, "small"):
        fitted = auto.fitted(codec_of(edge, 90))
        assert (fitted.encoder, fitted.normalize_obs) == (name, False)
    vectors = FlatCodec("Some-v0", spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    assert (auto.fitted(vectors).encoder, auto.fitted(vectors).normalize_obs) == ("none", True)
    for chosen in True, False:
        assert replace(auto, normalize_obs=chosen).fitted(vectors).normalize_obs is chosen
    with pytest.raises(ConfigError, match=r"images of 4 x 4 pixels, .* of 3 x 90; use .*FlattenObservation"):
        auto.fitted(codec_of(3, 90))
    with pytest.raises(ConfigError, match=r"algo.encoder=nature: needs images of 36 x 36 pixels"):
        replace(auto, encoder="nature").fitted(codec_of(35, 90))


def test_an_encoder_that_no_machine_can_draw_is_refused(configure: Configure) -> None:
    """One for the frames of a game of Atari as they are is not."""
    words = "algo=ppo", "env=Catch", "algo.encoder=small", "algo.encoder_size=16384"
    with pytest.raises(ConfigError, match=r"8,615,106,560 weights of encoder=small .* use a smaller size"):
        configure(*words).algo.fitted(codec_of(210, 160))
    configure("algo=ppo", "env=Catch").algo.fitted(codec_of(210, 160))


def through_a_policy_file(algorithm: Any, config: Config, folder: Path) -> Any:
    Checkpoints(folder, to_dict(config), 1).save(32, algorithm.state_dict(), None)
    export_policy(folder, folder / "policy.zip")
    with run_or_policy(None, f"{folder / 'policy.zip'}", folder) as run_dir:
        return load_policy(run_dir)[1]


def test_a_policy_file_of_images_acts_as_its_run(configure: Configure, tmp_path: Path) -> None:
    config = configure(*small("ppo", *FEW, env="Catch"))
    ppo: Any = build(config)[0]
    ppo.train_iteration()
    again = through_a_policy_file(ppo, config, tmp_path)
    obs = np.random.default_rng(0).integers(256, size=(50, 36 * 36), dtype=np.uint8)
    logits = [each.policy(each.to_device(obs)) for each in (ppo, again)]
    assert torch.equal(*logits)
    assert len(logits[0].unique(dim=0)) == 50
    state = again.state_dict()
    assert bool(state["net"]["params"].any())
    assert not state["net"]["mu"].any()
    for each in ppo, again:
        each.close()


@pytest.mark.parametrize("action", range(3))
def test_a_policy_file_keeps_a_policy_that_takes_one_action(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: int
) -> None:
    """As trained ones do on noise. Random weights in its place take one action too, at times the same."""
    monkeypatch.setattr("runlab.rerun.policy.check_config", lambda *_: None)  # Catch may not be committed
    config = configure(*small("ppo", *FEW, env="Catch"))
    ppo: Any = build(config)[0]
    params = ppo.state.net.params.clone()
    params[-20:-17] = 1e3 * torch.eye(3)[action]  # biases of the policy; the value has 16 weights and a bias
    ppo.state = ppo.state._replace(net=ppo.state.net._replace(params=params))
    noise = np.random.default_rng(1).integers(256, size=(50, 36 * 36), dtype=np.uint8)
    assert (ppo.act(noise) == action).all()
    again = through_a_policy_file(ppo, config, tmp_path)
    assert torch.equal(again.state.net.params, params)
    for each in ppo, again:
        each.close()


@pytest.mark.long
def test_compiled_updates_of_images_are_near_the_plain_ones(configure: Configure, programs: Programs) -> None:
    found = []
    for compiles in ("false", "true"):
        ppo = ppo_from_pixels(configure, f"compile={compiles}")
        before = ppo.state.net.params.clone()
        ppo.train_iteration()
        assert bool(programs()) == (compiles == "true")
        found.append(ppo.state.net.params - before)
        ppo.close()
    plain, compiled = found
    assert float((plain - compiled).abs().max()) < 1e-2 * float(plain.abs().max())
