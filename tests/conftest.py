import os

import torch
from hypothesis import HealthCheck, settings

# For tests/kernels. Here, because it must be set before anybody imports triton, and Lightning does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
# The machine decides how long an example takes; a failing example is printed and can be replayed.
settings.register_profile(
    "default", max_examples=40, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
