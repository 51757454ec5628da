"""The policy of one agent out of the files of a run, and copies of it beside the run it plays in.

    runs/mine/frozen/agent_0/step_*     a checkpoint of the weights that acting reads; its manifest
                                        says what they are weights of

A run with frozen agents loads, goes on and evaluates with its copies, and needs no other run.
"""

import dataclasses
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from marl import checkpoint, directory, experiment, frozen, groups
from marl import config as configuration
from marl.agents.learner import Given
from marl.binding import bind_options, resolve_algorithm
from marl.config import Config
from marl.directory import CONFIG
from marl.envs import spaces
from marl.envs.errors import UsageError, nearest
from marl.envs.spaces import Box, SpaceTree
from marl.frozen import Parts, Played, Player, State, Trained
from marl.patterns import matching
from marl.program import floats
from marl.record import NAMELESS, nameless
from marl.run import Weights
from marl.specs import Team


class About(NamedTuple):
    """What weights are weights of; JSON values."""

    learner: str  # name of the algorithm
    config: dict[str, Any]  # its options other than the default ones
    num_ids: int
    greedy: bool
    observation: str  # spaces, in words that tell them apart
    action: str
    agent: str
    run: str
    env_steps: int


@dataclasses.dataclass(frozen=True)
class GivenPolicy(Given):
    """A policy that was found, as an hparam; `arrays` are a `State`."""

    about: About = dataclasses.field(compare=False, kw_only=True)


def find(env: Any, agent: str, config: frozen.Config) -> tuple[Player, Played]:
    """What `marl.frozen.bind` returns.

    Raises:
      UsageError: there is no such policy, or it is made for other spaces.
    """
    if not config.run:
        raise UsageError(
            f"{agent} is frozen and has no run; give the directory of the run that its policy "
            f"comes from, as in overrides: {{{agent}: {{learner: frozen, run: runs/prey}}}}"
        )
    path = Path(config.run).expanduser().absolute()
    is_run = (path / CONFIG).is_file() or not any(path.glob("step_*"))
    try:
        about, state = (_of_run if is_run else _of_folder)(path, env, agent, config)
    except UsageError as error:
        raise UsageError(f"{agent} cannot be frozen from run = {config.run!r}: {error}") from None
    state = jax.tree.map(np.asarray, state)
    how = about.learner + ", greedy" * about.greedy
    origin = f"{about.agent} of {about.run} at step {about.env_steps:,} ({how})"
    policy = GivenPolicy(state, _digest(state), origin, about=about)
    return _player(about), Played(policy)


def keep(team: Team, path: Path) -> None:
    """Copy the policies of frozen agents into the run directory `path`."""
    for agent, hparams in zip(team.agents, team.hparams, strict=True):
        if isinstance(hparams, Played):
            policy = hparams.policy
            assert isinstance(policy, GivenPolicy)
            folder, about = directory.frozen(path, agent), policy.about
            manifest = {"about": about._asdict()}
            checkpoint.save(folder, about.env_steps, policy.arrays, manifest, keep=1)


def _of_folder(path: Path, env: Any, agent: str, config: frozen.Config) -> tuple[About, State]:
    """What `keep` wrote; which seed it is, and whether the best, was settled then."""
    found = checkpoint.latest(path)
    manifest = {} if found is None else checkpoint.read_manifest(found)
    if found is None or "about" not in manifest:
        raise UsageError("that folder holds no policy; give the directory of a run")
    about = About(**manifest["about"])
    if config.agent not in ("", about.agent):
        raise UsageError(f"that folder holds the policy of {about.agent}, not {config.agent!r}")
    about = about._replace(greedy=about.greedy or config.greedy)
    parts = _parts(env, agent, about)
    known = frozen.leaves(parts.like)
    agent_id = np.zeros(about.num_ids, np.float32) if about.num_ids else ()
    like = State({name: known[name] for name in parts.reads}, agent_id)
    return about, checkpoint.restore(found, like)


def _of_run(path: Path, env: Any, agent: str, config: frozen.Config) -> tuple[About, State]:
    """The policy of an agent of a run, from the run's newest checkpoint or its best weights."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}; give the directory of a trained run")
    recorded = configuration.load(experiment.run_directory(path) / CONFIG)
    kept = sorted(path.glob(f"{directory.FROZEN}/*/*/{checkpoint.MANIFEST}"))
    texts = (configuration.to_yaml(recorded), *(file.read_text("utf-8") for file in kept))
    team = _team(path, texts, env if nameless(recorded.env.id) else None)
    source = config.agent or agent
    if source not in team.agents:
        raise UsageError(f"that run has no agent {source!r}; for agent, {_choices(source, team)}")
    position = team.agents.index(source)
    found, weights = _weights(path, team, recorded.training.num_seeds, config)
    about = _about(recorded, team, position)._replace(
        agent=source, run=config.run, env_steps=checkpoint.read_manifest(found)["step"]
    )
    about = about._replace(greedy=about.greedy or config.greedy)
    parts = _parts(env, agent, about)
    built = team.lifted.groups
    trained = Trained(*(groups.of_position(built, tree, position) for tree in weights))
    if isinstance(trained.state, State):  # frozen there too
        return about, trained.state
    return about, State(_select(trained, parts), _agent_id(team, position, about.num_ids))


def _choices(source: str, team: Team) -> str:
    return nearest(source, team.agents, 40)


@lru_cache(maxsize=16)
def _team(path: Path, texts: tuple[str, ...], env: Any) -> Team:
    """The team of the run in `path`; `texts` are all that it is made from.

    `env` stands for an environment that was given as an object, and has no id.
    """
    recorded = configuration.load(path / CONFIG)
    learners = [recorded.team.learner["name"]]
    learners += [changes.get("learner", "") for changes in recorded.team.overrides.values()]
    for name in filter(nameless, learners):
        raise UsageError(
            f"it was trained with a learner object ({name.removeprefix(NAMELESS)}) that has no "
            "name, so nobody can make it again; train with a learner that is a module"
        )
    return experiment.rebuild(recorded, path, env)[1]


def _about(recorded: Config, team: Team, position: int) -> About:
    """Of an agent of a run; what is to be found in its checkpoints is left open."""
    spec, hparams = team.spec.agents[position], team.hparams[position]
    space = {
        "observation": _words(_unbounded(spaces.from_signature(spec.observation))),
        "action": _words(spaces.from_signature(spec.action)),
    }
    if isinstance(hparams, Played) and isinstance(hparams.policy, GivenPolicy):
        return hparams.policy.about
    name = recorded.team.learner["name"]
    for pattern, changes in recorded.team.overrides.items():
        if spec.name in matching(pattern, team.agents):
            name = changes.get("learner", name)
    options = {field.name: field.default for field in dataclasses.fields(spec.config)}
    given = {option: getattr(spec.config, option) for option in options}
    changed = {option: value for option, value in given.items() if value != options[option]}
    members = next(members for members in team.spec.sharing_sets if position in members)
    num_ids = len(members) if len(members) > 1 and team.spec.agent_ids else 0
    return About(name, changed, num_ids, False, **space, agent="", run="", env_steps=0)


def _agent_id(team: Team, position: int, num_ids: int) -> Any:
    if not num_ids:
        return ()
    members = next(members for members in team.spec.sharing_sets if position in members)
    return np.eye(num_ids, dtype=np.float32)[members.index(position)]


def _weights(path: Path, team: Team, num_seeds: int, config: frozen.Config) -> tuple[Path, Weights]:
    """The checkpoint, and of it one seed's weights of the whole team."""
    if config.seed >= num_seeds:
        raise UsageError(f"seed = {config.seed} is out of range; that run has {num_seeds}, from 0")
    hparams = team.group_hparams()

    def fresh(key: jax.Array) -> Weights:
        return Weights(team.learner.init(key, hparams), floats(hparams))

    keys = jax.random.split(jax.random.key(0), num_seeds)
    if config.best or num_seeds == 1:
        like = jax.eval_shape(fresh, keys[0])
    else:
        like = jax.eval_shape(jax.vmap(fresh), keys)
    found = directory.best(path, config.seed) if config.best else directory.newest(path)
    weights = checkpoint.restore(found, like, Weights._fields)
    if config.best or num_seeds == 1:
        return found, weights
    return found, jax.tree.map(lambda x: x[config.seed], weights)


def _select(trained: Trained, parts: Parts) -> dict[str, Any]:
    """The leaves that acting reads."""
    found, expected = frozen.leaves(trained), frozen.leaves(parts.like)
    for name in parts.reads:
        if name not in found or found[name].shape != expected[name].shape:
            raise UsageError(
                f"acting reads {name}, whose shape follows from what its critic saw in that run; "
                "a policy that can be frozen has a critic apart"
            )
    return {name: found[name] for name in parts.reads}


def _player(about: About) -> Player:
    algorithm = resolve_algorithm(about.learner)
    config, _ = bind_options(algorithm, about.learner, about.config)
    return Player(algorithm, config, about.num_ids, about.greedy)


def _parts(env: Any, agent: str, about: About) -> Parts:
    """Raises UsageError where the policy is made for other spaces than the agent's."""
    observation, action = env.observation_spaces[agent], env.action_spaces[agent]
    for what, given, expected in (
        ("observation", about.observation, _words(_unbounded(observation))),
        ("action", about.action, _words(action)),
    ):
        if given != expected:
            raise UsageError(
                f"the {what} space of {about.agent} there is {given}, and that of {agent} here "
                f"{expected}; name an agent of that run with equal spaces, or another run"
            )
    player = _player(about)
    return frozen.make_parts(player, spaces.signature(observation), spaces.signature(action))


def _unbounded(space: SpaceTree) -> SpaceTree:
    """Networks read the structure, shapes and dtypes of observations, not their bounds."""
    return spaces.map_spaces(
        lambda leaf: Box(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Box) else leaf, space
    )


def _words(space: SpaceTree) -> str:
    return repr(space)


def _digest(state: State) -> str:
    """Equal for equal weights."""
    found = hashlib.sha256()
    for name, x in frozen.leaves(state).items():
        found.update(f"{name} {x.shape} {x.dtype} ".encode())
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()
