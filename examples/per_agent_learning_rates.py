"""Hunters and their prey: two learning rates, one centralised critic each, from one call.

python examples/per_agent_learning_rates.py
"""

import marl


def main(total_steps=100_000):
    env = marl.make("jaxmarl/MPE_simple_tag_v3")
    team = marl.team(
        env,
        "ppo",
        critic="all",
        overrides={
            "adversary_*": {"learning_rate": 1e-3},
            "agent_0": {"learning_rate": 3e-4, "entropy_coef": 0.02},
        },
    )
    print(team.describe())
    run = marl.train(env, team, total_steps=total_steps)
    for agent, result in run.evaluations[-1]["stochastic"]["returns"].items():
        print(f"{agent:12} return {result['mean']:7.2f}")


if __name__ == "__main__":
    main()
