"""Other projects' interfaces on this project's kernels."""
