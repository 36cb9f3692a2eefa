"""The claims of stage 1, proved on a user's own settings with a tiny random model."""
