"""A backend for kalign: the host's processor, through Triton's interpreter."""
