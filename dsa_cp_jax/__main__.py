"""`python -m dsa_cp_jax validate`: the main job."""

import sys

from dsa_cp_jax.validate import main

sys.exit(main())
