"""Checks of configs and hparams say what was given and what is valid."""

import math
from typing import Any, NamedTuple

import pytest

from marl.agents import registry
from marl.agents.validation import at_least, divisible, hparams_in_range, one_of
from marl.envs.errors import UsageError


class Floats(NamedTuple):
    rate: Any = 0.1
    gamma: Any = 0.9


BOUNDS = {"gamma": (0.0, 1.0)}


@pytest.mark.parametrize(
    "check, message",
    [
        (
            lambda: one_of("torso", "simbaa", ("mlp", "simba")),
            "torso = 'simbaa' is not known; did you mean 'simba'? choose from mlp, simba",
        ),
        (lambda: one_of("torso", None, ("mlp",)), "torso = None is not known; choose from mlp"),
        (
            lambda: at_least("num_epochs", 0, 1),
            "num_epochs = 0 is out of range; give 1 or more",
        ),
        (
            lambda: at_least("x", math.nan, 0),
            "x = nan is out of range; give 0 or more",
        ),
        (
            lambda: divisible("steps", 10, "num_minibatches", 4),
            "steps = 10 is not divisible by num_minibatches = 4; "
            "change one of them so that every minibatch has the same size",
        ),
        (
            lambda: hparams_in_range(Floats(gamma=1.5), BOUNDS),
            "gamma = 1.5 is out of range; give a number in [0.0, 1.0]",
        ),
        (
            lambda: hparams_in_range(Floats(rate=-1), BOUNDS),
            "rate = -1 is out of range; give a number in [0.0, inf)",
        ),
        (
            lambda: hparams_in_range(Floats(gamma=math.nan), BOUNDS),
            "gamma = nan is out of range; give a number in [0.0, 1.0]",
        ),
        (
            lambda: hparams_in_range(Floats(rate=-0.5), {}),
            "rate = -0.5 is out of range; give a number in [0.0, inf)",
        ),
        (
            lambda: hparams_in_range(Floats(rate=math.inf), BOUNDS),
            "rate = inf is out of range; give a number in [0.0, inf)",
        ),
        (
            lambda: hparams_in_range(Floats(rate=-1), {"rate": (0.0, math.inf)}),
            "rate = -1 is out of range; give a number in [0.0, inf]",
        ),
        (
            lambda: one_of("core", "rnn", ("none", "gru", "lstm")),
            "core = 'rnn' is not known; choose from none, gru, lstm",
        ),
        (
            lambda: one_of("scenario", "3n", ("8m", "3m")),
            "scenario = '3n' is not known; did you mean '3m'? choose from 8m, 3m",
        ),
        (lambda: hparams_in_range(Floats(rate="1"), BOUNDS), "rate = '1' is a str; give a number"),
        (
            lambda: hparams_in_range(Floats(rate=None), BOUNDS),
            "rate = None is a NoneType; give a number",
        ),
        (
            lambda: hparams_in_range(Floats(rate=True), BOUNDS),
            "rate = True is a bool; give a number",
        ),
    ],
)
def test_refused_with_a_message(check, message):
    with pytest.raises(UsageError) as caught:
        check()
    assert str(caught.value) == message


def test_valid_values_pass():
    one_of("torso", "mlp", ("mlp", "simba"))
    at_least("num_epochs", 1, 1)
    divisible("steps", 12, "num_minibatches", 4)
    hparams_in_range(Floats(rate=math.inf, gamma=1), BOUNDS | {"rate": (0.0, math.inf)})
    hparams_in_range(Floats(rate=0), {})
    hparams_in_range(Floats(rate=3e38), {})


@pytest.mark.parametrize("learner", registry.ALGORITHMS)
def test_infinity_is_legal_where_it_switches_something_off(learner):
    off = {"max_grad_norm", "huber_delta", "clip_epsilon", "value_clip_epsilon", "noise_clip"}
    algorithm = registry.algorithm(learner)
    bounds, legal = getattr(algorithm, "BOUNDS", {}), set()
    for name in algorithm.Hparams._fields:
        try:
            hparams_in_range(algorithm.Hparams(**{name: math.inf}), bounds)
        except UsageError as error:
            assert str(error).startswith(f"{name} = inf is out of range")
        else:
            legal.add(name)
    assert legal == off & set(algorithm.Hparams._fields)
