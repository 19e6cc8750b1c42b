"""A pytest plugin (`-p benchmarks.gate_profile`): the hypothesis profile "gate", for a verdict within a minute.

Few examples, and none made smaller: whether a hook is right counts, not the prettiest way in which it is wrong.
"""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "gate",
    max_examples=5,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
