"""Measure recurrent IPPO on SMAX 3m beside JaxMARL's script: `python benchmarks/recurrent.py PATH`.

PATH is a checkout of JaxMARL's repository: its scripts are not in its wheel. They run in a virtual
environment of their own with the settings of `ippo_rnn_smax.yaml`, but the map, the number of
environments and of steps; its call-back to a logger is taken out. The same sizes here: parameters
shared by the three agents, 128 units before one GRU of 128 for actor and critic, 128 units in each
head, 4 epochs of 4 minibatches. Gradients flow through 16 steps here and through all 128 there,
unless --sequence-length 0 is given; values at an episode's end are computed here from what was
really seen.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
import venv
from pathlib import Path
from typing import Any

from common import cpu_seconds, report
from compare import HERE, run, same_work, table

PEER = ["jaxmarl[algs]==0.2.0"]
SCENARIO = {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jaxmarl", type=_absolute, help="checkout of JaxMARL's repository")
    parser.add_argument("--num-envs", type=int, default=128, help="JaxMARL trains on 128")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequence-length", type=int, default=16, help="here only; 0: the rollout")
    parser.add_argument(
        "--no-heads", action="store_true", help="no hidden layers in heads, here only"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--core", type=int, default=os.cpu_count() - 1)
    parser.add_argument("--peer-venv", type=_absolute, default=HERE / ".venv-jaxmarl")
    parser.add_argument("--side", choices=("marl", "jaxmarl"), help="measure in this process")
    options = parser.parse_args()
    if options.side:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        (ours if options.side == "marl" else theirs)(options)
        return
    peer_python = options.peer_venv / "bin" / "python"
    if not peer_python.exists():
        venv.create(options.peer_venv, with_pip=True)
        subprocess.run([peer_python, "-m", "pip", "install", "-q", *PEER], check=True)
    sides = {"marl": sys.executable, "jaxmarl": str(peer_python)}
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for side, python in sides.items():
            sizes = (options.num_envs, options.updates, options.repeats, options.sequence_length)
            names = ("--num-envs", "--updates", "--repeats", "--sequence-length")
            given = [x for pair in zip(names, map(str, sizes), strict=True) for x in pair]
            given += ["--no-heads"] if options.no_heads else []
            command = [python, __file__, str(options.jaxmarl), *given, "--side", side]
            row = run(["taskset", "-c", str(options.core), *command])
            rows.setdefault(row["peer"], []).append(row)
    print(table(rows))
    print(same_work(rows))


def _absolute(path: str) -> Path:
    """The sides run in another directory."""
    return Path(path).absolute()


def ours(options: argparse.Namespace) -> None:
    import jax
    import optax

    import marl
    from marl.program import ProgramSpec, program

    env = marl.make("jaxmarl/HeuristicEnemySMAX", scenario="3m", **SCENARIO)
    steps = options.updates * options.num_envs * 128
    team = marl.team(
        env,
        "ppo",
        sharing="group",
        core="gru",
        core_size=128,
        hidden_sizes=(128,),
        head_sizes=() if options.no_heads else (128,),
        activation="relu",
        shared_network=True,
        sequence_length=options.sequence_length,
        learning_rate=4e-3,
        learning_rate_schedule="linear",
        schedule_steps=steps,
        num_epochs=4,
        num_minibatches=4,
        clip_epsilon=0.05,
        max_grad_norm=0.25,
        entropy_coef=0.01,
    )
    spec = ProgramSpec(team.env, team.spec, options.num_envs, 128, 0, 1, options.updates)
    compiled, hparams = program(spec), team.group_hparams()
    timings = compiled.compile(jax.random.split(jax.random.key(0), 1), hparams)
    runs = []
    for seed in range(options.repeats):
        state = compiled.init(jax.random.split(jax.random.key(seed), 1), hparams)
        seconds, (state, _) = cpu_seconds(lambda s=state: compiled.chunk(s, options.updates))
        runs.append(seconds)
    counts = optax.tree.get_all_with_path(state.team[0].actor.optimizer, "count")
    size = len(team.agents) * options.num_envs * 128
    found = {
        "gradient_steps": max(int(count[0]) for _, count in counts),
        "samples": size // team.spec.agents[0].config.num_minibatches,
    }
    report("marl", steps, timings.trace, timings.compile, runs, found)


def theirs(options: argparse.Namespace) -> None:
    os.environ["WANDB_ENTITY"] = ""
    sys.modules["wandb"] = types.ModuleType("wandb")
    sys.path.insert(0, str(options.jaxmarl / "baselines" / "IPPO"))
    import jax
    from omegaconf import OmegaConf

    script: Any = importlib.import_module("ippo_rnn_smax")
    jax.experimental.io_callback = lambda *_: None
    file = options.jaxmarl / "baselines" / "IPPO" / "config" / "ippo_rnn_smax.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    steps = options.updates * options.num_envs * 128
    config |= {"MAP_NAME": "3m", "NUM_ENVS": options.num_envs, "TOTAL_TIMESTEPS": steps}
    assert config["ENV_KWARGS"] == SCENARIO, json.dumps(config["ENV_KWARGS"])
    keys = [jax.random.PRNGKey(seed) for seed in range(options.repeats)]
    trace, lowered = cpu_seconds(lambda: jax.jit(script.make_train(config)).lower(keys[0]))
    compile, compiled = cpu_seconds(lowered.compile)
    runs = [cpu_seconds(lambda k=key: compiled(k))[0] for key in keys]
    passes = config["UPDATE_EPOCHS"] * config["NUM_MINIBATCHES"]
    found = {
        "gradient_steps": int(config["NUM_UPDATES"]) * passes,
        "samples": config["MINIBATCH_SIZE"],
    }
    report("jaxmarl 0.2.0", steps, trace, compile, runs, found)


if __name__ == "__main__":
    main()
