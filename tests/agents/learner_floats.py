"""Hparams of three agents, all of which make a difference, for the table of learners."""

FLOATS = {
    "learning_rate": (1e-3, 3e-3, 1e-2),
    "gamma": (0.9, 0.99, 0.5),
    "max_grad_norm": (0.5, 1e6, 0.01),
    # large: Adam makes whole steps of gradients near 0, and of their rounding errors
    "adam_epsilon": (1e-3, 2e-3, 1e-3),
}
ENTROPY = {"entropy_coef": (0.0, 0.01, 0.1)}
ENDS = {"learning_rate_end": (1e-4, 2e-3, 5e-3), "schedule_steps": (100.0, 60.0, 80.0)}
ON_POLICY = {
    **FLOATS,
    **ENTROPY,
    **ENDS,
    "entropy_coef_end": (0.0, 0.02, 0.05),
    "critic_learning_rate_scale": (1.0, 2.0, 0.5),
    "gae_lambda": (0.95, 1.0, 0.5),
    "value_coef": (0.5, 1.0, 0.25),
    "initial_std": (1.0, 0.5, 2.0),
}
EPSILON_GREEDY = {
    **FLOATS,
    **ENDS,
    "epsilon_start": (1.0, 0.8, 0.6),
    "epsilon_end": (0.05, 0.1, 0.2),
    "exploration_fraction": (0.8, 0.9, 1.0),
}
OFF_POLICY = {
    **FLOATS,
    **ENDS,
    "critic_learning_rate_scale": (1.0, 2.0, 0.5),
    "tau": (0.1, 0.01, 0.5),
}
SAC = {
    **OFF_POLICY,
    "temperature_learning_rate_scale": (1.0, 3.0, 0.5),
    "initial_temperature": (0.3, 1.0, 0.1),
}
NOISY = {
    **OFF_POLICY,
    "exploration_noise": (0.1, 0.5, 0.2),
    "exploration_noise_end": (0.0, 0.1, 0.3),
    "target_noise": (0.2, 0.5, 1.0),
    "noise_clip": (0.5, 0.1, 0.3),
    "saturation_coef": (0.0, 0.1, 1e-2),
}
