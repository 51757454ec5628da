"""Patterns over agent ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl import patterns
from marl.envs.errors import UsageError

AGENTS = ("adversary_0", "adversary_10", "adversary_2", "agent_0", "a.b[0]", "a.bx0y")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("adversary_*", ("adversary_0", "adversary_10", "adversary_2")),
        ("adversary_?", ("adversary_0", "adversary_2")),
        ("*", AGENTS),
        ("*_0", ("adversary_0", "agent_0")),
        ("agent_0", ("agent_0",)),
        ("agent", ()),  # the whole id, not a part of it
        ("Agent_0", ()),
        ("agent_0, adversary_2", ("adversary_2", "agent_0")),  # in declared order
        ("'agent_0','adversary_2'", ("adversary_2", "agent_0")),
        ("agent_0, nobody", ("agent_0",)),
        ("a.b[0]", ("a.b[0]",)),  # no character class, and the dot is a dot
        ("a?b*", ("a.b[0]", "a.bx0y")),
        ("", ()),
    ],
)
def test_matching(pattern, expected):
    assert patterns.matching(pattern, AGENTS) == list(expected)


@given(st.text(min_size=1).filter(lambda name: name.strip("\"'") and not set(name) & set(",*?")))
def test_every_id_matches_itself_and_nothing_that_is_longer(name):
    name = name.strip().strip("\"'").strip()
    if name:
        assert patterns.matching(name, [name, name + "x", "x" + name]) == [name]


def test_a_pattern_that_matches_nothing_names_the_agents():
    with pytest.raises(UsageError) as error:
        patterns.matching_some("predator_*", ("adversary_0", "agent_0"), "agents")
    assert str(error.value) == (
        "agents 'predator_*' match nothing; this environment has adversary_0, agent_0"
    )


def test_partition_keeps_declared_order_within_a_set():
    sets = patterns.partition(
        {"late": ["agent_0", "adversary_2"], "early": "adversary_0"}, AGENTS, "sharing"
    )
    assert sets == {"late": ["adversary_2", "agent_0"], "early": ["adversary_0"]}


def test_an_agent_may_be_named_twice_in_one_set_and_not_in_two():
    assert patterns.partition({"x": ["agent_*", "agent_0"]}, AGENTS, "sharing") == {
        "x": ["agent_0"]
    }
    with pytest.raises(UsageError, match=r"sharing: adversary_0 is in 'x' and in 'y'; an agent"):
        patterns.partition({"x": ["adversary_?"], "y": ["*_0"]}, AGENTS, "sharing")


def test_a_set_that_matches_nothing_is_named():
    with pytest.raises(UsageError, match=r"reward_teams\.red: agents 'x_\*' match nothing"):
        patterns.partition({"red": ["x_*"]}, AGENTS, "reward_teams")
